import CHostMLX
import Foundation
import MLX

/// The behaviour of MLX 0.32.2 on Metal that a CPU does not show.
///
/// Everything is still computed on the CPU. `Sources/CHostMLX/Metal.cpp` cites the lines of MLX for each rule.
public struct MetalRules: Sendable {
    /// Matrix products in float32 round their operands to TF32, as on an A19 or an M5, unless the environment's `MLX_ENABLE_TF32`
    /// is 0. Needs OpenBLAS, as on Linux.
    public var tf32 = false
    /// The GPU is the default device of C++, and of Swift outside of `Device.withDefaultDevice`. Work for it fails.
    public var gpuByDefault = false
    /// The failure of command buffers; nil for none.
    public var failure: Failure?

    /// Command buffers that fail, each evaluation being one.
    public struct Failure: Sendable {
        /// The number of the first, from 1.
        public var buffer: Int
        /// How many fail: after the error of one was thrown, the next does.
        public var count = 1
        /// The evaluations that go through before one throws the error and computes nothing. Waiting for a stream throws it earlier. It is
        /// thrown once. The buffer's arrays count as evaluated and hold `garbage`.
        public var delay = Int.max
        public var garbage = Garbage.nan
        /// Whether the evaluation throws the error itself and computes nothing, as where memory is refused. `item()` is then 0, and reading
        /// the data of an array, which ends a process on Metal, is a fault.
        public var isAtOnce = false
        public var message = hang

        /// The contents of the arrays of a buffer that failed; integers are zeros.
        public enum Garbage: Sendable, CaseIterable { case nan, zeros }

        public static let hang = description("Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)")
        public static let refusedInBackground = description(
            "Insufficient Permission (to submit GPU work from background) "
                + "(00000006:kIOGPUCommandBufferCallbackErrorBackgroundExecutionNotPermitted)")
        public static let outOfMemory = description(
            "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)")

        private static func description(_ reason: String) -> String {
            "[METAL] Command buffer execution failed: \(reason)."
        }

        public init(buffer: Int) { self.buffer = buffer }
    }

    public init(tf32: Bool = false, gpuByDefault: Bool = false, failure: Failure? = nil) {
        self.tf32 = tf32
        self.gpuByDefault = gpuByDefault
        self.failure = failure
    }
}

/// The events while HostMLX behaved like Metal.
public struct MetalReport: Sendable, Equatable {
    /// Evaluations that had something to compute.
    public var evaluations = 0
    /// The faults that would have ended the process, with their counts.
    public var faults = [String: Int]()
}

/// Runs `body` with HostMLX behaving like Metal by the rules. One call at a time in a process.
///
/// - Returns: the result of `body`, or the error that it threw, and the report.
public func withMetal<R>(_ rules: MetalRules, _ body: () throws -> R) -> (
    result: Result<R, any Error>, report: MetalReport
) {
    // Made before the rules are in force, so that it is the CPU's own.
    _ = Stream.cpu
    let failure = rules.failure
    let begun = (failure?.message ?? "").withCString { message in
        host_metal_begin(
            HostMetalRules(
                tf32: rules.tf32, gpu_by_default: rules.gpuByDefault,
                failing_buffer: failure?.buffer ?? 0, failures: failure?.count ?? 0, delay: failure?.delay ?? 0,
                leaves_zeros: failure?.garbage == .zeros, fails_at_once: failure?.isAtOnce ?? false, message: message))
    }
    precondition(begun, "HostMLX behaves like Metal already")
    let result = Result {
        rules.gpuByDefault ? try Device.withDefaultDevice(Device(.gpu), body) : try body()
    }
    var report = MetalReport()
    report.evaluations = withUnsafeMutablePointer(to: &report.faults) { faults in
        host_metal_end(faults) { context, text, count in
            guard let context, let text else { return }
            context.assumingMemoryBound(to: [String: Int].self).pointee[String(cString: text)] = count
        }
    }
    return (result, report)
}
