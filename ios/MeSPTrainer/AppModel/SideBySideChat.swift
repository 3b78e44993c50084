import Foundation
import MeSP
import MeSPAdapters
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPSentences
import Observation

/// Texts of the base model and of the fine-tuned one, for a view that shows both side by side: the continuations of a prompt, or a
/// conversation that each model continues with its own answers.
///
/// Texts grow as tokens come. While the app is not in front, writing waits.
@MainActor @Observable public final class SideBySideChat {
    public enum Side: Sendable { case base, tuned }

    /// The text that one model has written so far.
    public struct Text: Sendable {
        public fileprivate(set) var text = ""
        /// nil until it has ended.
        public fileprivate(set) var summary: Generator.Summary?
        fileprivate var tokens = [Int]()
    }

    /// A prompt and what each model has written to it.
    public struct Turn: Sendable, Identifiable {
        public let id: Int
        public let prompt: String
        public fileprivate(set) var base = Text()
        public fileprivate(set) var tuned = Text()
        /// Of the adapters of each run, in the order of the runs' names.
        fileprivate var strengths = [Float]()
    }

    /// The text to continue, and the models and settings.
    public struct Request: Sendable {
        public var prompt = ""
        /// Whether the prompt is a message in the model's chat template, and the text the answer.
        public var isChat = false
        /// The system message of a conversation; empty for none.
        public var system = ""
        public var maxTokens = 128
        /// 0 takes the likeliest token each time.
        public var temperature: Float = 0
        public var topP: Float = 1
        package var seed: UInt64 = 0

        public init() {}
    }

    /// The turns of the conversation, the oldest first; for a prompt that is continued, one turn.
    public private(set) var turns = [Turn]()
    /// The prompt in progress.
    public var draft = Request()
    /// The bundle that the turns are of.
    public private(set) var bundleName = ""
    /// The runs whose adapters the fine-tuned model of the turns has; none where only the base model writes.
    private var runNames = [String]()
    /// Whether the turns are messages and answers.
    public var isConversation: Bool { !partners.isEmpty }
    public var base: Text { turns.last?.base ?? Text() }
    public var tuned: Text { turns.last?.tuned ?? Text() }
    /// The side that is being written; nil where none is.
    public private(set) var writing: Side?
    /// Why it ended early, in a sentence.
    public private(set) var problem: Sentence?

    @ObservationIgnored private let monitor: any DeviceMonitor
    /// The file of the conversation.
    @ObservationIgnored private let folder: DocumentsFolder?
    /// Whether the saved conversation was read or cleared. Until then it is not replaced.
    @ObservationIgnored private var hasReadSaved = false
    /// The bundle, runs and system message of the conversation, each in a line; another conversation begins with others.
    @ObservationIgnored private var partners = ""
    @ObservationIgnored private var gate = BoundaryGate()
    /// The model, and the part of the conversation that each side has read.
    @ObservationIgnored private var read = Read()

    /// Used by one thread at a time, the one that writes a text.
    private final class Read: @unchecked Sendable {
        /// For one side, in bytes: with float32 keys and values, some 2,600 tokens of Qwen2.5-0.5B.
        static let limit = 1 << 26

        let bundle: URL?
        var base = PromptCache(limit: limit)
        var tuned = PromptCache(limit: limit)
        private var generator: Generator?

        init(_ bundle: URL? = nil) { self.bundle = bundle }

        /// The model with these adapters. It is opened once; then only adapters are loaded.
        func model(_ url: URL, with adapters: [WeightedAdapters]) throws -> Generator {
            var model = try generator ?? Generator(ModelBundle(url: url))
            generator = nil  // so that the adapters before go
            try model.use(adapters)
            generator = model
            return model
        }

        /// Lets go of the adapters until the next text.
        func freeAdapters() { try? generator?.use([]) }
    }

    public init(monitor: any DeviceMonitor, folder: DocumentsFolder? = nil) {
        (self.monitor, self.folder) = (monitor, folder)
        try? readSaved()
        monitor.observers.append { [weak self] event in
            self?.update()
            if event == .memoryWarning { self?.freeCaches() } else { try? self?.readSaved() }
        }
    }

    /// Reads the saved conversation, unless it was read. It can't be read while the phone is locked, and the system may start the app then.
    private func readSaved() throws {
        guard !hasReadSaved else { return }
        if let stored = try folder?.readChat() {
            partners = stored.partners
            let names = partners.split(separator: "\n", maxSplits: 2, omittingEmptySubsequences: false).map(String.init)
            if names.count == 3 { name(bundle: names[0], runs: names[1]) }
            turns = stored.turns.enumerated().map { index, turn in
                Turn(
                    id: index, prompt: turn.prompt, base: Text(text: turn.base), tuned: Text(text: turn.tuned),
                    strengths: turn.strengths ?? [])
            }
        }
        hasReadSaved = true
    }

    /// The caches of the text that the models have read.
    var bytesRead: Int { read.base.size + read.tuned.size }

    /// Frees the model and what is kept of the conversation. The next message is then read with all that was said before.
    func freeCaches() { read = Read() }

    /// Writes both texts, the base model's first. Does nothing while another is being written. A message continues the conversation,
    /// where that is with the same bundle and runs, at any strengths.
    ///
    /// - Parameter adapters: of the runs of the fine-tuned model, with their strengths; without them only the base model writes.
    func start(_ request: Request, bundle: URL, adapters: [WeightedAdapters], tokenizer: any TextTokenizer) {
        guard writing == nil else { return }
        do {
            try readSaved()
        } catch {
            problem = error.plainSentence
            return
        }
        let names = [
            bundle.lastPathComponent,
            adapters.map { $0.folder.deletingLastPathComponent().lastPathComponent }.joined(separator: "/"),
            request.system,
        ]
        let partners = request.isChat ? names.joined(separator: "\n") : ""
        if !request.isChat || partners != self.partners { turns = [] }
        if read.bundle != bundle { read = Read(bundle) }
        self.partners = partners
        name(bundle: names[0], runs: names[1])
        let history = turns
        turns.append(Turn(id: history.count, prompt: request.prompt, strengths: adapters.map(\.weight)))
        (problem, writing) = (nil, .base)
        let (gate, read) = (BoundaryGate(), read)
        self.gate = gate
        update()
        let messages = gate.start("writing", sending: Progress.self) { send in
            defer { read.freeAdapters() }
            var generation = Generator.Request(prompt: [])
            generation.maxTokens = request.maxTokens
            (generation.temperature, generation.topP) = (request.temperature, request.topP)
            generation.seed = request.seed
            generation.stop = endTokens(of: bundle, tokenizer)
            var plain = PlainEncoder(tokenizer)
            for (side, text, cache) in [
                (Side.base, \Turn.base, \Read.base), (.tuned, \.tuned, \.tuned),
            ] where side == .base || !adapters.isEmpty {
                try gate.pass { _ in }
                generation.prompt =
                    request.isChat
                    ? try plain.encode(
                        Conversation(request.messages(after: history, text)), addsGenerationPrompt: true)
                    : try plain.encode(request.prompt, addsSpecialTokens: true)
                let generator = try read.model(bundle, with: side == .tuned ? adapters : [])
                send(.begins(side))
                let summary = try generator.generate(
                    generation, continuing: &read[keyPath: cache], atBlock: { try gate.pass { _ in } }
                ) { send(.token(side, $0)) }
                send(.ends(side, summary))
            }
        }
        Task {
            do {
                for try await message in messages { receive(message, tokenizer) }
            } catch is CancellationError {
            } catch {
                problem = error.plainSentence
            }
            // A message that got no answer is not part of the conversation.
            if base.text.isEmpty, tuned.text.isEmpty, problem != nil { turns.removeLast() }
            if !isConversation { freeCaches() }
            save()
            writing = nil
        }
    }

    /// A person's choice: one side's answer of a turn over the other side's, or `corrected` over this side's answer. The prompt is the
    /// conversation as this side has it.
    ///
    /// - Throws: `MeSPError` if there is no such answer, or nothing to choose.
    func choice(_ side: Side, of id: Turn.ID, corrected: String?) throws -> Choice {
        guard writing == nil, !partners.isEmpty, let index = turns.firstIndex(where: { $0.id == id }) else {
            throw MeSPError("Choose between answers to a message, once both are written.")
        }
        let (chosen, other) = side == .base ? (\Turn.base, \Turn.tuned) : (\Turn.tuned, \Turn.base)
        let answer = turns[index][keyPath: chosen].text
        var request = Request()
        request.prompt = turns[index].prompt
        request.system = String(partners.split(separator: "\n", maxSplits: 2, omittingEmptySubsequences: false)[2])
        return try Choice(
            prompt: request.messages(after: Array(turns.prefix(index)), chosen), chosen: corrected ?? answer,
            rejected: corrected == nil ? turns[index][keyPath: other].text : answer)
    }

    /// Begins a new conversation.
    public func clear() {
        guard writing == nil else { return }
        (turns, partners, problem, hasReadSaved) = ([], "", nil, true)
        freeCaches()
        save()
    }

    private func save() {
        let stored = StoredChat(
            partners: partners,
            turns: turns.map {
                .init(prompt: $0.prompt, base: $0.base.text, tuned: $0.tuned.text, strengths: $0.strengths)
            })
        folder?.save(partners.isEmpty ? nil : stored)
    }

    /// The runs whose adapters wrote the fine-tuned answer of a turn, with their strengths where these are not 1; nil where none did.
    public func tunedName(of turn: Turn) -> String? {
        guard !runNames.isEmpty else { return nil }
        return runNames.enumerated().map { index, name in
            let strength = index < turn.strengths.count ? turn.strengths[index] : 1
            return strength == 1 ? name : "\(name) × \(strength.formatted(.number.precision(.fractionLength(2))))"
        }.joined(separator: " + ")
    }

    private func name(bundle: String, runs: String) {
        bundleName = bundle.hasSuffix(".mesp") ? String(bundle.dropLast(5)) : bundle
        runNames = runs.split(separator: "/").map(String.init)
    }

    /// Ends both texts at the next block.
    public func stop() { gate.stop() }

    private func update() { gate.pauseUnlessInFront(monitor) }

    private enum Progress: Sendable {
        case begins(Side)
        case token(Side, Int)
        case ends(Side, Generator.Summary)
    }

    private func receive(_ message: Progress, _ tokenizer: any TextTokenizer) {
        switch message {
        case .begins(let side): writing = side
        case .token(let side, let token): change(side) { $0.append(token, tokenizer) }
        case .ends(let side, let summary): change(side) { $0.summary = summary }
        }
    }

    private func change(_ side: Side, _ body: (inout Text) -> Void) {
        let last = turns.count - 1
        switch side {
        case .base: body(&turns[last].base)
        case .tuned: body(&turns[last].tuned)
        }
    }
}

extension SideBySideChat.Request {
    /// The conversation as one side has it, with the prompt as its last message.
    ///
    /// - Parameter text: that side's answer of a turn. A turn without one is left out: messages and answers alternate.
    fileprivate func messages(
        after history: [SideBySideChat.Turn], _ text: KeyPath<SideBySideChat.Turn, SideBySideChat.Text>
    ) -> [Conversation.Message] {
        var messages = system.isEmpty ? [] : [Conversation.Message.system(system)]
        for turn in history where !turn[keyPath: text].text.isEmpty {
            messages.append(.user(turn.prompt))
            messages.append(.assistant(turn[keyPath: text].text))
        }
        return messages + [.user(prompt)]
    }
}

/// A conversation in its file.
struct StoredChat: Codable, Equatable {
    struct Turn: Codable, Equatable {
        var prompt: String
        var base: String
        var tuned: String
        /// Of the runs' adapters; 1 where there are none.
        var strengths: [Float]?
    }

    /// The bundle, runs and system message, each in a line.
    var partners: String
    var turns: [Turn]
}

extension SideBySideChat.Text {
    /// A token can end within a character, which then shows when it is whole.
    fileprivate mutating func append(_ token: Int, _ tokenizer: any TextTokenizer) {
        tokens.append(token)
        let text = tokenizer.decode(tokens)
        self.text = text.hasSuffix("\u{FFFD}") ? String(text.dropLast()) : text
    }
}
