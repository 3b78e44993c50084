import Foundation
import MeSP
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSentences
import Observation

/// The scores of the base model and the fine-tuned one on the same records, by the rules of `mesp evaluate`: the perplexity of texts, how
/// often the right one of several choices is the likeliest, or how often the written answer is the right one. While the app is not in front,
/// it waits.
@MainActor @Observable public final class Evaluation {
    /// A figure of both models.
    public struct Score: Sendable, Equatable {
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
    public private(set) var score: Score?
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
        (score, problem, notice, progress) = (nil, nil, nil, 0)
        let gate = BoundaryGate()
        self.gate = gate
        update()
        let messages = gate.start("measuring", sending: Message.self) { send in
            let (records, unread) = try EvaluationRecord.read(records)
            if !unread.isEmpty { send(.notice(DataNotices.unread(unread))) }
            let scorer = RecordScorer(bundle: bundle, tokenizer: tokenizer) { try gate.pass { _ in } }
            let models = [nil] + (adapters.map { [$0] } ?? [])
            let parts = try models.enumerated().map { index, adapters in
                try scorer.score(records, adapters: adapters) { done in
                    let all = Double(records.count * models.count)
                    send(.progress(Double(records.count * index + done) / all))
                }
            }
            send(.ended(Score(records[0].kind, base: parts[0], tuned: parts.count > 1 ? parts[1] : nil)))
        }
        Task {
            do {
                for try await message in messages {
                    switch message {
                    case .progress(let part): progress = part
                    case .notice(let found): notice = found
                    case .ended(let found): score = found
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
        case ended(Score)
    }

    private func update() { gate.pauseUnlessInFront(monitor) }
}

/// A record's part of a figure, which is Σ sum / Σ weight.
struct ScorePart: Equatable {
    var sum: Double
    var weight = 1.0
}

extension Evaluation.Score {
    /// Draws of the bootstrap.
    private static let draws = 1000

    init(_ kind: Kind, base: [ScorePart], tuned: [ScorePart]?) {
        func value(_ parts: [ScorePart], _ rows: [Int]) -> Double {
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
