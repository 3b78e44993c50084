import Foundation
import MeSPControl
import MeSPCore

/// The state of a run at one moment.
public struct TrainingUpdate: Sendable, Equatable {
    /// The last step that is done, from 0.
    public let step: Int
    /// The number of steps of the run.
    public let steps: Int
    /// The part of the run that is done, from 0 to 1.
    public let fraction: Double
    /// The loss of the last step, in nats a token; nil before the first. For choices it is the loss of DPO, which is ln 2 before anything is
    /// learned.
    public let loss: Float?
    /// The last measured loss on held-out data, of the same kind as ``loss``; nil before the first measurement.
    public let heldOutLoss: Float?
    /// The process's `phys_footprint` after the last step, in bytes.
    public let footprint: Int
    /// The highest `phys_footprint` of a step so far, in bytes.
    public let peakFootprint: Int
    /// The predicted peak of what training takes beside the rest of the process, in bytes; nil until the plan is made.
    public let predictedPeak: Int?
    /// The time until the last step; nil until it is known.
    public let timeRemaining: Duration?
    /// Why the run waits; nil while it trains.
    public let pause: PauseReason?
    /// What happened so far that the person may want to know, a sentence each in the language of the app: what of the data was left out or cut,
    /// and what the run did where memory was short.
    public let notices: [String]
}

/// A reason why a run waits. It continues by itself when the reason is gone.
public enum PauseReason: String, Sendable, CaseIterable {
    /// ``FineTuner/pause()`` was called.
    case user
    /// The app uses MLX, in ``FineTuner/whilePaused(isolation:_:)``.
    case app
    /// The app is not in front, and the system gives it no time to train.
    case away
    /// The system ran short of memory.
    case memory
    /// The thermal state is serious or critical.
    case heat
    /// The battery is below 20% and not charging.
    case battery
    /// The time in the background is for a device on its charger.
    case charger

    /// The reason and what ends the pause, in the language of the app.
    public var message: String { MeSPControl.PauseReason(rawValue: rawValue)?.advice.localized ?? rawValue }
}

/// The updates of a run in progress, one for each change. One loop can read them.
///
/// Where the task that reads them is cancelled, the run saves its adapters and ends, and then the updates end. Where the loop is left and nothing
/// else has the updates, the run does the same. At the top level of a script compiled for debugging the loop keeps them, so call
/// ``FineTuner/stop()``, which returns when the run has ended.
public final class TrainingUpdates: AsyncSequence, AsyncIteratorProtocol, Sendable {
    private let updates: AsyncThrowingStream<TrainingUpdate, any Error>
    private let stop: @Sendable () -> Void

    init(_ updates: AsyncThrowingStream<TrainingUpdate, any Error>, stop: @escaping @Sendable () -> Void) {
        (self.updates, self.stop) = (updates, stop)
    }

    deinit { stop() }

    /// The updates themselves: there is one iterator.
    public func makeAsyncIterator() -> TrainingUpdates { self }

    /// The next update, when something has changed; nil when the run has ended.
    ///
    /// - Throws: ``FineTuningError``, where the run fails. The adapters that it has saved stay.
    public func next() async throws -> TrainingUpdate? {
        try await withTaskCancellationHandler {
            // In a task of its own, which is not cancelled: the stream would then end before the run has saved.
            try await Task { [updates] in try await updates.first { _ in true } }.value
        } onCancel: {
            stop()
        }
    }
}
