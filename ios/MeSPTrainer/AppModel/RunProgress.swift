import Foundation
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSentences

public struct RunProgress: Sendable, Equatable {
    public var step: Int
    public var steps: Int
    public var loss: Float?
    package var secondsLeft: Double?
    public var blocks: Int

    public init(_ log: LogSummary, steps: Int, blocks: Int = 0) {
        (step, self.steps, self.blocks, loss) = (log.lastStep, steps, blocks, log.steps.last?.loss)
        secondsLeft = log.secondsLeft(of: steps)
    }

    public var part: Double { steps > 0 ? min(Double(step) / Double(steps), 1) : 0 }
    private static let unitsOfStep = 1000.0
    public var units: Int64 { Int64(whole: Double(steps) * Self.unitsOfStep) }
    /// The completed units of progress. The number of blocks in a step is not known in advance, so each further block adds less.
    public var unitsDone: Int64 {
        min(units, Int64(whole: (Double(step) + Double(blocks) / Double(blocks + 100)) * Self.unitsOfStep))
    }
    public var stepWords: Sentence { "Step \(step) of \(steps)" }
    public var lossWords: Sentence? { loss.map { "loss \(String(format: "%.2f", $0))" } }
    public var timeWords: Sentence? {
        guard let secondsLeft, step < steps else { return nil }
        let minutes = Int(whole: (secondsLeft / 60).rounded(.up))
        return minutes < 60 ? "\(minutes) min left" : "\(minutes / 60) h \(minutes % 60) min left"
    }

    /// The progress as text, such as `Step 12 of 100, loss 2.31, 14 min left`.
    public var sentence: Sentence { [lossWords, timeWords].compactMap { $0 }.reduce(stepWords) { "\($0), \($1)" } }
}
