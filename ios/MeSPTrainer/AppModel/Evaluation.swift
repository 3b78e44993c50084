import Foundation
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPFiles
import Observation

/// The scores of the base model and the fine-tuned one on the same records, by the rules of `mesp evaluate`: the perplexity of texts, how
/// often the right one of several choices is the likeliest, or how often the written answer is the right one. While the app is not in front,
/// it waits.
@MainActor @Observable public final class Evaluation {
    /// A figure of both models.
    public struct Figure: Sendable, Equatable {
        public let kind: Kind
        public let records: Int
        public let base: Double
        /// nil without adapters.
        public let tuned: Double?
        /// The 95% bootstrap interval of the difference from the base model; nil for less than two records.
        public let difference: ClosedRange<Double>?

        public enum Kind: Sendable { case perplexity, accuracy, exactMatch }
    }

    /// The results of the last evaluation; nil until it has ended.
    public private(set) var figure: Figure?
    /// What was not read of the records; nil where all was.
    public private(set) var notice: Sentence?
    /// The part of it that is done, from 0 to 1; nil while no evaluation is in progress.
    public private(set) var progress: Double?
    /// Why it ended early, in a sentence.
    public private(set) var problem: Sentence?
    public var isRunning: Bool { progress != nil }

    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private var gate = BoundaryGate()

    public init(monitor: any DeviceMonitor) {
        self.monitor = monitor
        monitor.observers.append { [weak self] _ in self?.update() }
    }

    /// Begins an evaluation. Does nothing while another is in progress.
    ///
    /// - Parameters:
    ///   - records: JSON, a record a line or a list of them: with `text`, with `prompt`, `choices` and `answer`, with `prompt` and `completion`, or with
    ///     `messages` that end with an answer; all of one kind.
    ///   - adapters: of the fine-tuned model; without them only the base model is measured.
    public func start(_ records: Data, bundle: URL, adapters: URL?, tokenizer: any TextTokenizer) {
        guard !isRunning else { return }
        (figure, problem, notice, progress) = (nil, nil, nil, 0)
        let gate = BoundaryGate()
        self.gate = gate
        update()
        let messages = gate.start("measuring", sending: Message.self) { send in
            let (records, unread) = try EvaluationRecord.read(records)
            if !unread.isEmpty { send(.notice(DataNotices.unread(unread))) }
            let examiner = Examiner(bundle: bundle, tokenizer: tokenizer) { try gate.pass { _ in } }
            let models = [nil] + (adapters.map { [$0] } ?? [])
            let parts = try models.enumerated().map { index, adapters in
                try examiner.parts(of: records, adapters: adapters) { done in
                    let all = Double(records.count * models.count)
                    send(.progress(Double(records.count * index + done) / all))
                }
            }
            send(.ended(Figure(records[0].kind, base: parts[0], tuned: parts.count > 1 ? parts[1] : nil)))
        }
        Task {
            do {
                for try await message in messages {
                    switch message {
                    case .progress(let part): progress = part
                    case .notice(let found): notice = found
                    case .ended(let found): figure = found
                    }
                }
            } catch is CancellationError {
            } catch {
                problem = error.plainSentence
            }
            progress = nil
        }
    }

    /// Ends it at the next block.
    public func stop() { gate.stop() }

    private enum Message: Sendable {
        case progress(Double)
        case notice(Sentence)
        case ended(Figure)
    }

    private func update() { gate.follow(monitor) }
}

/// A record's part of a figure, which is Σ sum / Σ weight.
struct FigurePart: Equatable {
    var sum: Double
    var weight = 1.0
}

extension Evaluation.Figure {
    /// Draws of the bootstrap.
    private static let draws = 1000

    init(_ kind: Kind, base: [FigurePart], tuned: [FigurePart]?) {
        func value(_ parts: [FigurePart], _ rows: [Int]) -> Double {
            let (sum, weight) = rows.reduce((0.0, 0.0)) { ($0.0 + parts[$1].sum, $0.1 + parts[$1].weight) }
            return kind == .perplexity ? exp(sum / weight) : sum / weight
        }
        let all = Array(base.indices)
        (self.kind, records) = (kind, base.count)
        self.base = value(base, all)
        self.tuned = tuned.map { value($0, all) }
        guard let tuned, base.count > 1 else {
            difference = nil
            return
        }
        // Both models on the same draws. The same records give the same bounds again.
        var random = SplitMix64()
        let differences = (0..<Self.draws).map { _ in
            let rows = all.map { _ in Int.random(in: 0..<base.count, using: &random) }
            return value(tuned, rows) - value(base, rows)
        }.sorted()
        difference = differences[Self.draws * 25 / 1000]...differences[Self.draws * 975 / 1000 - 1]
    }
}

/// Steele, Lea and Flood's generator, from 0 on.
private struct SplitMix64: RandomNumberGenerator {
    private var state: UInt64 = 0

    mutating func next() -> UInt64 {
        state &+= 0x9E37_79B9_7F4A_7C15
        var z = (state ^ (state >> 30)) &* 0xBF58_476D_1CE4_E5B9
        z = (z ^ (z >> 27)) &* 0x94D0_49BB_1331_11EB
        return z ^ (z >> 31)
    }
}

/// The data on which models are evaluated.
enum EvaluationRecord: Sendable {
    case text(String)
    /// `answer` is the index of the right choice.
    case question(prompt: String, choices: [String], answer: Int)
    /// A conversation, and the answer that should follow.
    case task([ChatMessage], answer: String)

    var kind: Evaluation.Figure.Kind {
        switch self {
        case .text: .perplexity
        case .question: .accuracy
        case .task: .exactMatch
        }
    }

    /// - Parameter data: JSON, a record a line, or one list of records.
    /// - Returns: the records, and the keys of them that are not read.
    /// - Throws: `MeSPError` with the line that is wrong, or if there is none.
    static func read(_ data: Data) throws -> (records: [EvaluationRecord], unread: Set<String>) {
        var (records, unread, refusals) = ([EvaluationRecord](), Set<String>(), Refusals())
        for (place, fields) in TextRecords.objects(in: data, of: nil) {
            try refusals.take(place) {
                guard let fields else { throw TextRecords.noObject }
                let (record, keys) = try Self.record(fields)
                guard record.kind == records.first?.kind ?? record.kind else {
                    throw MeSPError("it is another kind of record than the first; keep one kind.")
                }
                records.append(record)
                unread.formUnion(TextRecords.unread(fields, but: keys))
            }
        }
        try refusals.check()
        guard !records.isEmpty else { throw MeSPError("The file has no records to measure.") }
        return (records, unread)
    }

    private static func record(_ fields: [String: JSONValue]) throws -> (EvaluationRecord, read: [String]) {
        let wrong = MeSPError(
            "it is not a record to evaluate; records have \"text\", \"prompt\", \"choices\" and \"answer\", \"prompt\" and \"completion\", or \"messages\"."
        )
        try TextRecords.refuseTools(in: fields)
        if let choices = fields["choices"] {
            let texts = choices.array?.compactMap(\.string) ?? []
            let answer: Int? =
                switch fields["answer"] {
                case .number(let index): Int(exactly: index)
                case .string(let text): texts.firstIndex(of: text)
                default: nil
                }
            guard let prompt = fields["prompt"]?.string, let answer, texts.count > 1,
                texts.count == choices.array?.count,
                texts.indices.contains(answer), !texts.contains(where: \.isEmpty)
            else { throw wrong }
            return (.question(prompt: prompt, choices: texts, answer: answer), ["prompt", "choices", "answer"])
        }
        if let prompt = fields["prompt"], let completion = fields["completion"], !prompt.isEmpty {
            let asked = try messages(prompt, "user", in: "prompt")
            return (try task(asked + messages(completion, "assistant", in: "completion")), ["prompt", "completion"])
        }
        if let messages = fields["messages"], !messages.isEmpty {
            return (try task(TextRecords.messages(messages, in: "messages").map(\.message)), ["messages"])
        }
        guard let text = fields["text"]?.string, !text.isEmpty else { throw wrong }
        return (.text(text), ["text"])
    }

    private static func messages(_ value: JSONValue, _ role: String, in key: String) throws -> [ChatMessage] {
        if let text = value.string { return [ChatMessage(role: role, content: text)] }
        return try TextRecords.messages(value, in: key).map(\.message)
    }

    private static func task(_ messages: [ChatMessage]) throws -> EvaluationRecord {
        guard messages.count > 1, let last = messages.last, last.role == "assistant" else {
            throw MeSPError("the last message is not an answer; add an assistant message.")
        }
        return .task(messages.dropLast(), answer: last.content)
    }
}

/// Puts records to a bundle's model.
private struct Examiner {
    let bundle: URL
    let tokenizer: any TextTokenizer
    /// Called before each block.
    let atBlock: () throws -> Void

    /// - Parameter tell: gets how many records are done.
    /// - Throws: `MeSPError`, also of a record that cannot be taken; what `atBlock` throws.
    func parts(of records: [EvaluationRecord], adapters: URL?, tell: (Int) -> Void) throws -> [FigurePart] {
        try atBlock()
        let evaluator = try Evaluator(ModelBundle(url: bundle), adapters: adapters)
        let window = contextLength(of: bundle)
        return try records.enumerated().map { index, record in
            defer { tell(index + 1) }
            do {
                return try part(of: record, evaluator, window)
            } catch let error as MeSPError {
                throw MeSPError("Record \(index + 1): \(error.sentence).")
            }
        }
    }

    private func part(of record: EvaluationRecord, _ evaluator: Evaluator, _ window: Int) throws -> FigurePart {
        switch record {
        case .text(let text):
            var plain = PlainEncoder(tokenizer)
            let tokens = try plain.encode(text, addsSpecialTokens: false)
            let sum = try evaluator.logLikelihood(
                of: try [tokenizer.prefixToken] + tokens, window: window, atBlock: atBlock)
            return FigurePart(sum: -sum, weight: Double(tokens.count))
        case .question(let prompt, let choices, let answer):
            let (before, continuations) = try tokenizer.encode(prompt, followedBy: choices)
            let room = window + 1 - (continuations.map(\.count).max() ?? 0)
            guard room > 0 else { throw MeSPError("A choice is longer than the \(window) tokens that the model sees.") }
            let scores = try evaluator.scores(of: continuations, after: before.suffix(room), atBlock: atBlock)
            let best = scores.indices.max { scores[$0].logLikelihood < scores[$1].logLikelihood }
            return FigurePart(sum: best == answer ? 1 : 0)
        case .task(let messages, let answer):
            let prompt = try tokenizer.encode(upToAnswer: messages)
            var request = Generator.Request(prompt: prompt.suffix(max(1, window - 256)))
            request.stop = endTokens(of: bundle, tokenizer)
            var written = [Int]()
            // A stop is thrown, not taken for the answer's end.
            let summary = try evaluator.generator.generate(request, atBlock: atBlock) { written.append($0) }
            if summary.reason == .stopped { throw CancellationError() }
            return FigurePart(sum: trimmed(tokenizer.decode(written)) == trimmed(answer) ? 1 : 0)
        }
    }

    private func trimmed(_ text: String) -> String { text.trimmingCharacters(in: .whitespacesAndNewlines) }
}

extension TextTokenizer {
    /// The token before a text, so that its first token has a probability too.
    fileprivate var prefixToken: Int {
        get throws {
            guard let token = beginOfText ?? endOfText else {
                throw MeSPError("The model has no token that begins or ends a text.")
            }
            return token
        }
    }

    /// The ids of a prompt, and of what follows it, cut where `mesp evaluate` cuts: white space at the prompt's end goes to the choice, and
    /// both are tokenized together.
    func encode(_ prompt: String, followedBy choices: [String]) throws -> (prompt: [Int], choices: [[Int]]) {
        let kept = prompt.reversed().drop(while: \.isWhitespace).reversed().reduce(into: "") { $0.append($1) }
        let space = String(prompt.dropFirst(kept.count))
        var plain = PlainEncoder(self)
        if kept.isEmpty {
            return ([try prefixToken], try choices.map { try plain.encode(space + $0, addsSpecialTokens: false) })
        }
        let before = try plain.encode(kept, addsSpecialTokens: true)
        let texts = try choices.map { try plain.encode(kept + space + $0, addsSpecialTokens: true) }
        // A token across the border is of the choice.
        let common = texts.map { zip($0, before).prefix { $0 == $1 }.count }.min() ?? before.count
        guard common > 0 else { return ([try prefixToken], texts) }
        return (Array(before.prefix(common)), texts.map { Array($0.dropFirst(common)) })
    }

    /// The ids of a conversation up to where its answer begins; of a single message, without a template where the model has none.
    func encode(upToAnswer messages: [ChatMessage]) throws -> [Int] {
        if hasChatTemplate { return try encode(prompt: messages) }
        guard messages.count == 1 else {
            throw MeSPError("The model has no chat template, which a conversation needs; take an -Instruct model.")
        }
        var plain = PlainEncoder(self)
        return try plain.encode(messages[0].content, addsSpecialTokens: true)
    }
}

/// The number of tokens that the model in a bundle's folder sees at once, at most 2,048, as keys and values of all are held.
private func contextLength(of bundle: URL) -> Int {
    struct Config: Decodable {
        let positions: Int?
        enum CodingKeys: String, CodingKey { case positions = "max_position_embeddings" }
    }
    let json = regularFile(bundle.appendingPathComponent("config.json"))
    let config = json.flatMap { try? JSONDecoder().decode(Config.self, from: $0) }
    return min(max(config?.positions ?? 2048, 1), 2048)
}
