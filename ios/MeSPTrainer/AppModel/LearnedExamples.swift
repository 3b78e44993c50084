import Foundation
import MeSP
import MeSPAdapters
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPSentences
import Observation

/// Examples of a run's effect: prompts from its held-out data, continued by the base model and by the fine-tuned model.
///
/// The examples are saved in the run's folder as `samples.json`. Generation pauses while the app is not active. It stops when other work needs the
/// model or memory is short.
@MainActor @Observable public final class LearnedExamples {
    public struct Sample: Codable, Sendable, Equatable, Identifiable {
        public let prompt: String
        public let before: String
        public let after: String
        package let isMessage: Bool

        public var id: String { prompt }
    }

    public private(set) var writing: StoredRun.ID?

    private var samples = [StoredRun.ID: [Sample]]()
    private var problems = [StoredRun.ID: Sentence]()
    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private var gate = BoundaryGate()
    @ObservationIgnored private var work: Task<Void, Never>?
    /// Whether the app has been inactive since this was last reset.
    @ObservationIgnored private var wasLeft = false
    /// Waits as long as the app must be active before generation starts by itself.
    @ObservationIgnored var settle: @MainActor () async throws -> Void = { try await Task.sleep(for: .seconds(5)) }

    init(monitor: any DeviceMonitor) {
        self.monitor = monitor
        monitor.observers.append { [weak self] event in
            guard let self else { return }
            wasLeft = wasLeft || self.monitor.scene != .active
            gate.pauseUnlessInFront(self.monitor)
            if event == .memoryWarning { stop() }
        }
    }

    public func of(_ run: StoredRun) -> [Sample] { samples[run.id] ?? [] }

    public func problem(of run: StoredRun) -> Sentence? { problems[run.id] }

    public func load(_ run: StoredRun) async {
        guard writing != run.id else { return }
        let file = Self.file(of: run)
        let kept = await Task.detached {
            (try? Data(contentsOf: file)).flatMap { try? JSONDecoder().decode([Sample].self, from: $0) }
        }.value
        if let kept { samples[run.id] = kept }
    }

    func start(
        _ run: StoredRun, bundle: URL, isAskedFor: Bool,
        loadTokenizer: @escaping @Sendable (URL) async throws -> any TextTokenizer
    ) {
        guard let adapters = run.adapters, let settings = run.log?.start?.settings else { return }
        stop()
        (writing, problems[run.id], samples[run.id]) = (run.id, nil, [])
        let gate = BoundaryGate()
        self.gate = gate
        gate.pauseUnlessInFront(monitor)
        let data = settings.data.map { _ in run.url.appendingPathComponent(TextData.folderName) }
        work = Task {
            do {
                if !isAskedFor { try await stayInFront() }
                let tokenizer = try await loadTokenizer(bundle)
                try Task.checkCancellation()
                let written = gate.start("examples", sending: Sample.self) { send in
                    try gate.pass { _ in }
                    let bundle = try ModelBundle(url: bundle, text: data, checksums: false)
                    let source = HeldOutPrompts(tokenizer: tokenizer)
                    let writers = try [[], [.init(adapters)]].map { try Generator(bundle, adapters: $0) }
                    let stop = endTokens(of: bundle.url, tokenizer)
                    for prompt in try source.choose(Self.count, from: bundle, length: settings.seqLen) {
                        var request = Generator.Request(prompt: prompt.tokens)
                        (request.maxTokens, request.stop) = (Self.tokens, stop)
                        let texts = try writers.map { writer in
                            var tokens = [Int]()
                            let end = try writer.generate(request, atBlock: { try gate.pass { _ in } }) {
                                tokens.append($0)
                            }
                            if end.reason == .stopped { throw CancellationError() }
                            return source.text(tokens)
                        }
                        send(
                            Sample(prompt: prompt.text, before: texts[0], after: texts[1], isMessage: prompt.isMessage))
                    }
                }
                for try await sample in written {
                    try Task.checkCancellation()
                    samples[run.id, default: []].append(sample)
                }
                try Task.checkCancellation()
                save(run)
            } catch {
                if Task.isCancelled || error is CancellationError { return }
                (problems[run.id], samples[run.id]) = (error.plainSentence, nil)
            }
            writing = nil
        }
    }

    private func stayInFront() async throws {
        repeat {
            wasLeft = false
            try await settle()
        } while wasLeft || monitor.scene != .active
    }

    public func stop() {
        work?.cancel()
        if let writing { samples[writing] = nil }
        writing = nil
        gate.abandon()
    }

    private func save(_ run: StoredRun) {
        let encoder = JSONEncoder()
        encoder.outputFormatting = [.prettyPrinted, .sortedKeys, .withoutEscapingSlashes]
        let file = Self.file(of: run)
        // Writing fails if the run was deleted during generation, which is harmless.
        try? encoder.encode(of(run)).write(to: file, options: .atomic)
    }

    private static func file(of run: StoredRun) -> URL { run.url.appendingPathComponent("samples.json") }
    nonisolated private static let count = 2
    nonisolated private static let tokens = 48
}

private struct HeldOutPrompts: Sendable {
    struct Prompt {
        let tokens: [Int]
        let text: String
        let isMessage: Bool
    }

    let tokenizer: any TextTokenizer
    /// The approximate length in tokens of a prompt taken from a text. The prompt ends with a whole word if possible.
    private static let length = 16

    func text(_ tokens: some Sequence<Int>) -> String {
        tokenizer.decode(Array(tokens)).trimmingCharacters(in: .whitespacesAndNewlines)
    }

    func choose(_ count: Int, from bundle: ModelBundle, length: Int) throws -> [Prompt] {
        guard let sequences = try bundle.tokens("valid")?.sequences(lengths: [length]), sequences.count > 0 else {
            throw MeSPError("This run held out no text for examples.")
        }
        let frame = messageFrame()
        var prompts = [Prompt]()
        for index in [0, sequences.count / 2] + Array(0..<sequences.count) where prompts.count < count {
            let prompt = prompt(of: sequences[index], frame)
            if !prompt.text.isEmpty, !prompts.contains(where: { $0.text == prompt.text }) { prompts.append(prompt) }
        }
        return prompts
    }

    private func prompt(of example: Example, _ frame: (before: [Int], after: [Int])?) -> Prompt {
        let tokens = example.tokens.map { Int($0) }
        let first = example.counted.first ?? 0
        guard first > 0 else {
            let start = opening(of: tokens)
            return Prompt(tokens: start, text: text(start), isMessage: false)
        }
        let asked = Array(tokens.prefix(first + 1))
        if let frame, asked.count > frame.before.count + frame.after.count, asked.starts(with: frame.before),
            asked.suffix(frame.after.count).elementsEqual(frame.after)
        {
            let message = asked.dropFirst(frame.before.count).dropLast(frame.after.count)
            return Prompt(tokens: asked, text: text(message), isMessage: true)
        }
        return Prompt(tokens: asked, text: text(asked), isMessage: false)
    }

    private func messageFrame() -> (before: [Int], after: [Int])? {
        guard tokenizer.hasChatTemplate else { return nil }
        let texts = ["x", "y"].compactMap {
            try? Conversation([.user($0)]).applied(to: tokenizer, addsGenerationPrompt: true)
        }
        guard texts.count == 2 else { return nil }
        let before = zip(texts[0], texts[1]).prefix { $0 == $1 }.count
        let after = zip(texts[0].reversed(), texts[1].reversed()).prefix { $0 == $1 }.count
        return (Array(texts[0].prefix(before)), texts[0].suffix(after))
    }

    private func opening(of tokens: [Int]) -> [Int] {
        let pieces = tokens.map { tokenizer.decode([$0]) }
        let half = pieces.prefix(pieces.count / 2)
        var start = (half.firstIndex { $0.contains("\n") } ?? half.firstIndex { $0.hasSuffix(".") }).map { $0 + 1 } ?? 0
        while start < half.count, pieces[start].allSatisfy(\.isWhitespace) || tokens[start] == tokenizer.endOfText {
            start += 1
        }
        var end = min(start + Self.length, (start + tokens.count) / 2)
        let limit = min(end + Self.length / 2, tokens.count)
        while end < limit, !(pieces[end].first?.isWhitespace ?? false) { end += 1 }
        return Array(tokens[start..<end])
    }
}
