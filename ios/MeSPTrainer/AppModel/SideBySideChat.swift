import Foundation
import MeSP
import MeSPAdapters
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPSentences
import Observation

/// Texts of the base model and the fine-tuned model: two continuations of a prompt, or two parallel conversations.
///
/// The texts grow during generation, which pauses while the app is not active.
@MainActor @Observable public final class SideBySideChat {
    public enum Side: Sendable {
        case base, tuned

        fileprivate var text: WritableKeyPath<Turn, Text> { self == .base ? \.base : \.tuned }
    }

    public struct Text: Sendable {
        public fileprivate(set) var text = ""
        public fileprivate(set) var summary: Generator.Summary?
        fileprivate var tokens = [Int]()
    }

    public struct Turn: Sendable, Identifiable {
        public let id: Int
        public let prompt: String
        public fileprivate(set) var base = Text()
        public fileprivate(set) var tuned = Text()
        fileprivate var strengths = [Float]()
    }

    public struct Request: Sendable {
        public var prompt = ""
        public var isChat = false
        public var system = ""
        public var maxTokens = 128
        /// The sampling temperature. 0 selects the most likely token.
        public var temperature: Float = 0
        public var topP: Float = 1
        package var seed: UInt64 = 0

        public init() {}
    }

    /// The turns, the oldest first. Outside a conversation there is at most one.
    public private(set) var turns = [Turn]()
    public var draft = Request()
    public private(set) var bundleName = ""
    private var runNames = [String]()
    public var isConversation: Bool { !partners.isEmpty }
    public var base: Text { turns.last?.base ?? Text() }
    public var tuned: Text { turns.last?.tuned ?? Text() }
    public private(set) var writing: Side?
    public private(set) var problem: Sentence?

    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private let folder: DocumentsFolder?
    /// Whether the saved conversation was read or cleared. Until then, it must not be overwritten.
    @ObservationIgnored private var hasReadSaved = false
    /// The names of the bundle and of the runs, and the system message, separated by newlines. Empty outside a conversation. A change begins a new
    /// conversation.
    @ObservationIgnored private var partners = ""
    @ObservationIgnored private var gate = BoundaryGate()
    @ObservationIgnored private var read = Read()

    /// The model and its prompt caches. Only the generating thread changes this object.
    private final class Read: @unchecked Sendable {
        /// The maximum size of one side's prompt cache, in bytes: about 2,700 tokens of Qwen2.5-0.5B in float32.
        static let limit = 1 << 26

        let bundle: URL?
        var base = PromptCache(limit: limit)
        var tuned = PromptCache(limit: limit)
        private var generator: Generator?

        init(_ bundle: URL? = nil) { self.bundle = bundle }

        func model(_ url: URL, with adapters: [WeightedAdapters]) throws -> Generator {
            var model = try generator ?? Generator(ModelBundle(url: url))
            generator = nil  // frees the previous adapters
            try model.use(adapters)
            generator = model
            return model
        }

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

    /// Reads the saved conversation once. Reading fails while the phone is locked.
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

    var bytesRead: Int { read.base.size + read.tuned.size }

    /// Frees the model and the prompt caches. The next message processes the whole conversation again.
    func freeCaches() { read = Read() }

    /// Generates the base model's text, then the fine-tuned model's text, unless a text is already being generated.
    ///
    /// A message continues the conversation if the bundle, the runs and the system message are the same.
    ///
    /// - Parameter adapters: the weighted adapters of the fine-tuned model. If empty, only the base model generates.
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
            try gate.pass { _ in }
            var generation = Generator.Request(prompt: [])
            generation.maxTokens = request.maxTokens
            (generation.temperature, generation.topP) = (request.temperature, request.topP)
            generation.seed = request.seed
            generation.stop = endTokens(of: bundle, tokenizer)
            var plain = PlainEncoder(tokenizer)
            for (side, cache) in [(Side.base, \Read.base), (.tuned, \.tuned)] where side == .base || !adapters.isEmpty {
                try gate.pass { _ in }
                generation.prompt =
                    request.isChat
                    ? try plain.encode(
                        Conversation(request.messages(after: history, side)), addsGenerationPrompt: true)
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
            // If an error left a message without any answer, the message is removed.
            if base.text.isEmpty, tuned.text.isEmpty, problem != nil { turns.removeLast() }
            if !isConversation { freeCaches() }
            save()
            writing = nil
        }
    }

    /// Returns the person's preference in a turn. The prompt is the conversation of `side`.
    ///
    /// - Throws: `MeSPError`, for example while a text is being generated, or if the two answers cannot form a preference.
    func choice(_ side: Side, of id: Turn.ID, corrected: String?) throws -> Choice {
        guard writing == nil, !partners.isEmpty, let index = turns.firstIndex(where: { $0.id == id }) else {
            throw MeSPError("Choose between answers to a message, once both are written.")
        }
        let (turn, other) = (turns[index], side == .base ? Side.tuned : .base)
        let answer = turn[keyPath: side.text].text
        var request = Request()
        request.prompt = turn.prompt
        request.system = String(partners.split(separator: "\n", maxSplits: 2, omittingEmptySubsequences: false)[2])
        return try Choice(
            prompt: request.messages(after: Array(turns.prefix(index)), side), chosen: corrected ?? answer,
            rejected: corrected == nil ? turn[keyPath: other.text].text : answer)
    }

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
        case .token(let side, let token): turns[turns.count - 1][keyPath: side.text].append(token, tokenizer)
        case .ends(let side, let summary): turns[turns.count - 1][keyPath: side.text].summary = summary
        }
    }
}

extension SideBySideChat.Request {
    /// Returns one side's conversation, which ends with the prompt.
    ///
    /// Turns without an answer are left out, because user and assistant messages must alternate.
    fileprivate func messages(
        after history: [SideBySideChat.Turn], _ side: SideBySideChat.Side
    ) -> [Conversation.Message] {
        var messages = system.isEmpty ? [] : [Conversation.Message.system(system)]
        for turn in history where !turn[keyPath: side.text].text.isEmpty {
            messages += [.user(turn.prompt), .assistant(turn[keyPath: side.text].text)]
        }
        return messages + [.user(prompt)]
    }
}

struct StoredChat: Codable, Equatable {
    struct Turn: Codable, Equatable {
        var prompt: String
        var base: String
        var tuned: String
        /// The strength of each run's adapters. Nil means 1 for all.
        var strengths: [Float]?
    }

    var partners: String
    var turns: [Turn]
}

extension SideBySideChat.Text {
    /// Appends a token's text. Leaves out an incomplete character until later tokens complete it.
    fileprivate mutating func append(_ token: Int, _ tokenizer: any TextTokenizer) {
        tokens.append(token)
        let text = tokenizer.decode(tokens)
        self.text = text.hasSuffix("\u{FFFD}") ? String(text.dropLast()) : text
    }
}
