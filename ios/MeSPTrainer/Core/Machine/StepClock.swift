import MLX
import MeSPBundle

/// The points at which a step may wait or end, how work that failed is done again, and the time of the step's phases.
package final class StepClock {
    /// Called at every block boundary, forward and backward, some times within the head, and in a GPU's first step within blocks. It may
    /// wait (a pause, with the half-done step in memory) or throw `CancellationError`, which ends the step while that has changed nothing
    /// yet, and is not heeded afterwards.
    package var atBlock: () throws -> Void = {}

    /// The time of each phase since the start, in seconds.
    package private(set) var time = Phases()

    package struct Phases {
        package var forward = 0.0
        package var loss = 0.0
        package var backward = 0.0
        /// The time of `atBlock`; not in the others.
        var waiting = 0.0
    }

    /// Whether the step has changed parameters, and so must be finished.
    var hasChanged = false

    func boundary() throws {
        let start = ContinuousClock.now
        defer { time.waiting += (.now - start) / .seconds(1) }
        do { try atBlock() } catch is CancellationError where hasChanged {}
    }

    /// Waits where there is a reason to, within a block. A stop, or an error, is heeded at the next boundary.
    func pause() { try? boundary() }

    /// `MLXErrors.repeating`, with a boundary before the work is done again.
    func repeating<R>(_ body: () throws -> R) throws -> R { try MLXErrors.repeating(beforeRetry: boundary, body) }

    /// Returns the array of `body` for later work: on a GPU evaluated and confirmed, on a CPU as it is.
    func confirmed(_ body: () throws -> MLXArray) throws -> MLXArray {
        try repeating {
            let array = try body()
            MLXErrors.evaluateOnGPU([array])
            return array
        }
    }

    /// Waits where there is a reason to, within work that must be finished. A stop is heeded later.
    func wait() throws {
        do { try boundary() } catch is CancellationError {}
    }

    /// The result of a phase's work, timed, within a workspace for its arrays. Where a GPU fails it is done again.
    func work<R>(
        _ phase: WritableKeyPath<Phases, Double>, in workspace: Int?, _ body: () throws -> R
    ) throws -> R {
        try timed(phase) { try repeating { try withWorkspace(workspace, body) } }
    }

    func timed<R>(_ phase: WritableKeyPath<Phases, Double>, _ body: () throws -> R) rethrows -> R {
        let (start, waiting) = (ContinuousClock.now, time.waiting)
        defer { time[keyPath: phase] += (.now - start) / .seconds(1) - (time.waiting - waiting) }
        return try body()
    }
}
