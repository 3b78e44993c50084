import MLX
import MeSPBundle

/// How a step's work runs on a processor: the boundaries at which it waits, what it repeats after an error, its tiles and its time.
package final class StepWork {
    /// A function called at every block boundary, and within parts of a step that take long. It may wait, which pauses the run. It may throw
    /// `CancellationError`, which ends the step unless the step has already changed parameters.
    package var atBlock: () throws -> Void = {}

    package private(set) var time = Phases()

    package struct Phases {
        package var forward = 0.0
        package var loss = 0.0
        package var backward = 0.0
        /// The time spent in `atBlock`, which the other times do not contain.
        var waiting = 0.0
    }

    /// Whether the step has changed parameters and so must be finished.
    var hasChanged = false
    /// Whether all kernels are compiled. A GPU compiles them in the first step.
    var isWarm: Bool
    /// The maximum bytes of the arrays of one block or of the head on a GPU before MLX waits; nil on a CPU.
    private let workspace: Int?
    private let tileBytes: Int
    private let keepsCache: Bool
    private let bundle: ModelBundle

    init(_ bundle: ModelBundle, _ settings: RunSettings, _ plan: Plan) {
        self.bundle = bundle
        tileBytes = plan.tileBytes
        workspace = bundle.processor.workspace(Planner(bundle.manifest, settings), plan)
        keepsCache = bundle.processor.keepsCache(plan)
        isWarm = bundle.processor.hasKernels
    }

    func schedule(length: Int) -> Schedule {
        bundle.schedule(length: length, bytes: tileBytes, pause: isWarm ? nil : pause)
    }

    func freeCache() {
        if !keepsCache { Memory.clearCache() }
    }

    func boundary() throws {
        let start = ContinuousClock.now
        defer { time.waiting += (.now - start) / .seconds(1) }
        do { try atBlock() } catch is CancellationError where hasChanged {
        } catch {
            MLXErrors.interrupt(error)
            throw error
        }
    }

    /// Waits within a block, if `atBlock` waits. An error of `atBlock` interrupts work on a GPU. On a CPU, a stop takes effect at the next boundary.
    func pause() { try? boundary() }

    /// Performs a piece of a step's work, on a GPU again if MLX fails (`MLXErrors.repeating`).
    ///
    /// - Parameter isBounded: whether the piece has the plan's workspace (`withWorkspace`) on a GPU.
    func repeating<R>(isBounded: Bool = false, confirms: Bool = true, _ body: () throws -> R) throws -> R {
        guard MLXErrors.areLate else {
            let result = try body()
            try MLXErrors.check()
            return result
        }
        return try MLXErrors.repeating(confirms: confirms, beforeRetry: boundary) {
            try withWorkspace(isBounded ? workspace : nil, body)
        }
    }

    /// On a GPU the array is evaluated and checked for errors (`MLXErrors`).
    func confirmed(_ body: () throws -> MLXArray) throws -> MLXArray {
        try repeating {
            let array = try body()
            MLXErrors.evaluateOnGPU([array])
            return array
        }
    }

    /// Waits within work that must be finished, if `atBlock` waits. A stop takes effect at a later boundary.
    func wait() throws {
        do { try boundary() } catch is CancellationError {}
    }

    typealias Start = (instant: ContinuousClock.Instant, waiting: Double)

    var now: Start { (.now, time.waiting) }

    /// Adds the time since `start` to a phase, without the time spent in `atBlock`.
    func add(since start: Start, to phase: WritableKeyPath<Phases, Double>) {
        time[keyPath: phase] += (.now - start.instant) / .seconds(1) - (time.waiting - start.waiting)
    }
}
