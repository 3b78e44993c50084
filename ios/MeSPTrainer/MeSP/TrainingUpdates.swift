import Foundation
import MeSPControl
import MeSPCore

/// The state of a run at one moment.
public struct TrainingUpdate: Sendable, Equatable {
    /// The number of the last completed step; 0 before the first.
    public let step: Int
    /// The number of steps of the run; 0 until ``TrainingOptions/epochs`` are counted.
    public let steps: Int
    /// What the run does, or how it has ended.
    public let phase: TrainingPhase
    /// The loss of the last step, in nats per token; nil before the first step. For choices it is the DPO loss, which begins at ln 2.
    public let loss: Float?
    /// The last measured loss on held-out data, of the same kind as ``loss``; nil before the first measurement.
    public let heldOutLoss: Float?
    /// The process's `phys_footprint` in bytes, after the last step or, before the first step, at the time of this update.
    public let footprint: Int
    /// The highest `phys_footprint` of the process during the steps so far, in bytes; before the first step, the same as ``footprint``.
    public let peakFootprint: Int
    /// The predicted peak memory that training adds to the process, in bytes; nil if it is not known yet.
    public let predictedPeak: Int?
    /// The estimated time until the last step ends; nil until it is known.
    public let timeRemaining: Duration?
    /// The reason why the run waits; nil if it does not wait.
    public let pause: PauseReason?
    /// Notices for the person, one sentence each, in the app's language.
    public let notices: [String]
    /// The records that are left out because they cannot be trained, with ``TrainingOptions/leavesOutInvalidRecords``. Empty in a continued run.
    public let leftOut: [InvalidRecord]

    /// The completed fraction of the run, from 0 to 1.
    public var fraction: Double { phase == .finished ? 1 : min(Double(step) / Double(max(steps, 1)), 1) }

    /// Creates an update, for example for a test or a preview.
    public init(
        step: Int = 0, steps: Int, phase: TrainingPhase = .training, loss: Float? = nil, heldOutLoss: Float? = nil,
        footprint: Int = 0, peakFootprint: Int? = nil, predictedPeak: Int? = nil, timeRemaining: Duration? = nil,
        pause: PauseReason? = nil, notices: [String] = [], leftOut: [InvalidRecord] = []
    ) {
        (self.step, self.steps, self.phase) = (step, steps, phase)
        (self.loss, self.heldOutLoss) = (loss, heldOutLoss)
        (self.footprint, self.peakFootprint) = (footprint, peakFootprint ?? footprint)
        (self.predictedPeak, self.timeRemaining) = (predictedPeak, timeRemaining)
        (self.pause, self.notices, self.leftOut) = (pause, notices, leftOut)
    }
}

/// What a run does, or how it has ended.
public enum TrainingPhase: Sendable {
    /// The data is tokenized, or the model is loaded.
    case preparing
    /// Steps are taken.
    case training
    /// The held-out loss, or forgetting, is measured.
    case evaluating
    /// The adapters and the state are saved.
    case saving
    /// The run waits; see ``TrainingUpdate/pause``.
    case waiting
    /// All steps are done.
    case finished
    /// The run was stopped, and can be continued.
    case stopped
}

/// A reason why a run waits. The run continues when the reason no longer applies.
public enum PauseReason: String, Sendable, CaseIterable {
    /// ``FineTuner/pause()`` was called.
    case user
    /// The app uses MLX, in ``FineTuner/whilePaused(isolation:_:)``.
    case app
    /// The app is not in the foreground, and the system grants it no time to train.
    case away
    /// The system ran short of memory.
    case memory
    /// The thermal state is serious or critical.
    case heat
    /// The battery is below 20% and not charging.
    case battery
    /// Low Power Mode is on, and the device is not charging.
    case lowPower
    /// The granted background time requires a device that is charging.
    case charger

    /// The reason for the pause and what ends it, in the app's language.
    public var message: String { MeSPControl.PauseReason(rawValue: rawValue)?.advice.localized ?? rawValue }
}

/// The updates of a run, one for each change of its state. Only one loop can read them.
///
/// If the reading task is cancelled, the run saves its adapters and ends. The same happens if the loop is left and nothing else holds the updates. In
/// a debug build of a top-level script, the loop's variable holds the updates, so call ``FineTuner/stop()`` there.
public final class TrainingUpdates: AsyncSequence, AsyncIteratorProtocol, Sendable {
    private let updates: AsyncThrowingStream<TrainingUpdate, any Error>
    private let stop: @Sendable () -> Void

    /// Creates a sequence of `updates`, and of an error at their end, for example for a test or a preview.
    public convenience init(_ updates: [TrainingUpdate], throwing error: FineTuningError? = nil) {
        let (stream, sender) = AsyncThrowingStream.makeStream(of: TrainingUpdate.self)
        for update in updates { sender.yield(update) }
        sender.finish(throwing: error)
        self.init(stream) {}
    }

    init(_ updates: AsyncThrowingStream<TrainingUpdate, any Error>, stop: @escaping @Sendable () -> Void) {
        (self.updates, self.stop) = (updates, stop)
    }

    deinit { stop() }

    /// Returns the sequence itself. It is its own iterator.
    public func makeAsyncIterator() -> TrainingUpdates { self }

    /// Waits for the next change and returns its update; nil when the run has ended.
    ///
    /// - Throws: ``FineTuningError`` if the run fails. Adapters that it has saved stay.
    public func next() async throws -> TrainingUpdate? {
        try await withTaskCancellationHandler {
            // A separate task reads the stream, because a cancelled stream would end before the run has saved its adapters.
            try await Task { [updates] in try await updates.first { _ in true } }.value
        } onCancel: {
            stop()
        }
    }
}
