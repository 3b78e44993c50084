import Foundation
import MeSPCore
import MeSPFiles
import MeSPSentences

public struct LogSummary: Sendable {
    public struct Event: Sendable, Identifiable {
        public let id: Int
        public let time: Date
        package let name: String
        public let message: Sentence
    }

    public struct Point: Sendable, Identifiable {
        /// The last step of the averaged interval.
        public let id: Int
        public let value: Double
    }

    package var start: LogRecord.Start?
    public var prediction: LogRecord.Prediction?
    public var steps = [LogRecord.Step]()
    public var evals = [LogRecord.Eval]()
    public var events = [Event]()
    public var strength: LogRecord.Strength?
    package var end: LogRecord.End?
    package private(set) var peakFootprintBytes = 0

    package init() {}

    /// Reads the log in a run's folder. Ignores an incomplete last line.
    package init(folder: URL) throws {
        for (record, time) in try LogRecord.readAll(in: folder) { append(record, time: time) }
    }

    package mutating func append(_ record: LogRecord, time: Date = .now) {
        switch record {
        case .start(let start): self.start = start
        case .plan(_, let prediction): self.prediction = prediction
        case .step(let step):
            // A resumed run repeats the steps after its last saved state.
            if let last = steps.last, last.step >= step.step { steps.removeAll { $0.step >= step.step } }
            steps.append(step)
            peakFootprintBytes = max(peakFootprintBytes, step.footprintPeakBytes)
        case .eval(let eval):
            evals.removeAll { $0.step >= eval.step && $0.split == eval.split }
            evals.append(eval)
        case .event(let event):
            events.append(Event(id: events.count, time: time, name: event.event, message: event.message))
        case .strength(let strength): self.strength = strength
        case .end(let end): self.end = end
        }
    }

    public var lastStep: Int { steps.last?.step ?? end?.step ?? 0 }

    /// The upper median of the durations of the last 20 steps in seconds, or nil before the first step.
    public var stepSeconds: Double? {
        let last = steps.suffix(20).map(\.seconds).sorted()
        return last.isEmpty ? nil : last[last.count / 2]
    }

    package func secondsLeft(of steps: Int) -> Double? { stepSeconds.map { $0 * Double(max(0, steps - lastStep)) } }

    /// The input tokens per second over the last 20 steps, or nil before the first step. A step whose record has no count of input tokens counts with
    /// its tokens in the loss.
    public var tokensPerSecond: Double? { perSecond { $0.inputTokens ?? $0.tokens } }

    /// The tokens in the loss per second over the last 20 steps, or nil before the first step.
    public var lossTokensPerSecond: Double? { perSecond(\.tokens) }

    private func perSecond(_ count: (LogRecord.Step) -> Int) -> Double? {
        let last = steps.suffix(20)
        let seconds = last.reduce(0) { $0 + $1.seconds }
        return seconds > 0 ? Double(last.reduce(0) { $0 + count($1) }) / seconds : nil
    }

    public var peakFootprint: Int? {
        (steps.map(\.footprintPeakBytes) + [end?.footprintPeakBytes].compactMap { $0 }).max()
    }

    /// The fraction of the battery that the run used, from 0 to 1. It is nil if unknown, for example if the battery was charged or the run was
    /// resumed.
    public var batteryUsed: Float? {
        guard let before = start?.battery, let after = end?.battery, !before.isCharging, !after.isCharging,
            before.level >= after.level, !events.contains(where: { $0.name == "resumed" })
        else { return nil }
        return before.level - after.level
    }

    /// Returns at most `points` means of `value`, over intervals of equal numbers of steps. The last interval may be shorter.
    public func curve(points: Int = 200, _ value: (LogRecord.Step) -> Double) -> [Point] {
        let stretch = max(1, (steps.count + points - 1) / max(1, points))
        return stride(from: 0, to: steps.count, by: stretch).map { start in
            let part = steps[start..<min(start + stretch, steps.count)]
            return Point(
                id: part[part.endIndex - 1].step, value: part.reduce(0) { $0 + value($1) } / Double(part.count))
        }
    }
}

extension LogRecord {
    static func readAll(in folder: URL) throws -> [(record: LogRecord, time: Date)] {
        let url = LogWriter.url(in: folder)
        guard let data = regularFile(url) else {
            throw MeSPError("\(folder.path) holds no run: there is no metrics.jsonl in it.")
        }
        return try data.split(separator: UInt8(ascii: "\n")).enumerated().compactMap { index, line in
            do {
                let (record, time) = try read(line)
                return record.map { ($0, time) }
            } catch {
                guard line.endIndex == data.endIndex else {
                    throw MeSPError("Line \(index + 1) of \(url.path) is not a log record.")
                }
                return nil
            }
        }
    }
}

extension LogRecord.Strength {
    /// A sentence about what the run has learned: the losses before and after the run and the change of the perplexity on other text, or that the
    /// model is unchanged.
    public var sentence: Sentence {
        guard strength > 0 else {
            return
                "The model is unchanged: nothing it learned improves held-out text and leaves other text as good as before."
        }
        let loss = (String(format: "%.2f", lossBefore), String(format: "%.2f", lossAfter))
        let other = String(format: "%+.1f", 100 * expm1(generalAfter - generalBefore))
        guard let generalKl else {
            return
                "The model has learned: held-out loss \(loss.0) before, \(loss.1) after; perplexity on other text \(other) percent."
        }
        let kl = String(format: "%.3f", generalKl)
        return
            "The model has learned: held-out loss \(loss.0) before, \(loss.1) after; on other text perplexity \(other) percent, KL divergence \(kl) nats a token."
    }
}
