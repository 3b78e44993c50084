import Foundation
import MeSP
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSentences
import Observation

/// Evaluates the base model and the fine-tuned model on the same records, as `mesp evaluate` does.
///
/// The score is the perplexity of texts, the accuracy of choices, or the exact match of generated answers. The evaluation pauses while the app is not
/// active.
@MainActor @Observable public final class Evaluation {
    public struct Score: Sendable, Equatable {
        public let kind: Kind
        public let records: Int
        public let base: Double
        public let tuned: Double?
        /// The 95% bootstrap interval of tuned − base, or nil without adapters or with fewer than two records.
        public let difference: ClosedRange<Double>?

        public enum Kind: Sendable { case perplexity, accuracy, exactMatch }
    }

    public private(set) var score: Score?
    public private(set) var notice: Sentence?
    public private(set) var progress: Double?
    public private(set) var problem: Sentence?
    public var isRunning: Bool { progress != nil }

    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private var gate = BoundaryGate()

    public init(monitor: any DeviceMonitor) {
        self.monitor = monitor
        monitor.observers.append { [weak self] _ in self?.update() }
    }

    /// Starts an evaluation, unless one is in progress.
    ///
    /// - Parameters:
    ///   - records: JSON Lines or a JSON array of records, all of one kind: `text`; `prompt`, `choices` and `answer`; `prompt` and `completion`; or
    ///     `messages` that end with an answer.
    public func start(_ records: Data, bundle: URL, adapters: URL?, tokenizer: any TextTokenizer) {
        guard !isRunning else { return }
        (score, problem, notice, progress) = (nil, nil, nil, 0)
        let gate = BoundaryGate()
        self.gate = gate
        update()
        let messages = gate.start("measuring", sending: Message.self) { send in
            let (records, noted) = try EvaluationRecord.read(records)
            if !noted.isEmpty { send(.notice(DataNotices.noted(noted))) }
            try gate.pass { _ in }
            let scorer = RecordScorer(bundle: bundle, tokenizer: tokenizer) { try gate.pass { _ in } }
            let models = [nil] + (adapters.map { [$0] } ?? [])
            let parts = try models.enumerated().map { index, adapters in
                try scorer.score(records, adapters: adapters) { done in
                    let all = Double(records.count * models.count)
                    send(.progress(Double(records.count * index + done) / all))
                }
            }
            if records[0].kind == .perplexity, let part = parts.joined().first(where: { $0.mean >= ScorePart.mostLoss })
            {
                throw MeSPError(
                    "The perplexity is above every number, because the loss is \(part.mean) nats a token: train the adapters again."
                )
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

    public func stop() { gate.stop() }

    private enum Message: Sendable {
        case progress(Double)
        case notice(Sentence)
        case ended(Score)
    }

    private func update() { gate.pauseUnlessInFront(monitor) }
}

/// One record's contribution to a score. The score is the mean Σ sum / Σ weight over all records or, for perplexity, the exponential of this mean.
struct ScorePart: Equatable {
    var sum: Double
    var weight = 1.0

    /// The loss in nats whose exponential is about the largest number.
    static let mostLoss = 700.0

    var mean: Double { sum / weight }
}

extension Evaluation.Score {
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
        // Both models use the same bootstrap samples. The fixed seed makes the interval reproducible.
        var random = SplitMix64()
        let differences = (0..<Self.draws).map { _ in
            let rows = all.map { _ in Int.random(in: 0..<base.count, using: &random) }
            return value(tuned, rows) - value(base, rows)
        }.sorted()
        difference = differences[Self.draws * 25 / 1000]...differences[Self.draws * 975 / 1000 - 1]
    }
}

private struct SplitMix64: RandomNumberGenerator {
    private var state: UInt64 = 0

    mutating func next() -> UInt64 {
        state &+= 0x9E37_79B9_7F4A_7C15
        var z = (state ^ (state >> 30)) &* 0xBF58_476D_1CE4_E5B9
        z = (z ^ (z >> 27)) &* 0x94D0_49BB_1331_11EB
        return z ^ (z >> 31)
    }
}
