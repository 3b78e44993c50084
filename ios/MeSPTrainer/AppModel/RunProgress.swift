import Foundation
import MeSPControl
import MeSPCore
import MeSPSentences

/// The progress of a run.
public struct RunProgress: Sendable, Equatable {
    public var step: Int
    public var steps: Int
    /// In nats a token; nil before the first step.
    public var loss: Float?
    /// nil before the first step.
    package var secondsLeft: Double?
    /// The number of blocks of the current step that have begun.
    public var blocks: Int

    public init(_ log: LogSummary, steps: Int, blocks: Int = 0) {
        (step, self.steps, self.blocks, loss) = (log.lastStep, steps, blocks, log.steps.last?.loss)
        secondsLeft = log.secondsLeft(of: steps)
    }

    /// From 0 to 1.
    public var part: Double { steps > 0 ? min(Double(step) / Double(steps), 1) : 0 }
    private static let unitsOfStep = 1000.0
    /// The size of the run in units of progress, which are parts of a step.
    public var units: Int64 { Int64(Double(steps) * Self.unitsOfStep) }
    /// The number of them that are done. A block of the step in progress adds less than the one before it, as it is not known how many there will
    /// be: that depends on the batches, and on whether held-out data is measured.
    public var unitsDone: Int64 {
        min(units, Int64((Double(step) + Double(blocks) / Double(blocks + 100)) * Self.unitsOfStep))
    }
    /// `Step 12 of 100`
    public var stepWords: Sentence { "Step \(step) of \(steps)" }
    /// `loss 2.31`
    public var lossWords: Sentence? { loss.map { "loss \(String(format: "%.2f", $0))" } }
    /// `14 min left`; nil where nothing is left, or the time of a step is not known.
    public var timeWords: Sentence? {
        guard let secondsLeft, step < steps else { return nil }
        let minutes = Int((secondsLeft / 60).rounded(.up))
        return minutes < 60 ? "\(minutes) min left" : "\(minutes / 60) h \(minutes % 60) min left"
    }

    /// `Step 12 of 100, loss 2.31, 14 min left`
    public var sentence: Sentence { [lossWords, timeWords].compactMap { $0 }.reduce(stepWords) { "\($0), \($1)" } }
}
