import CHostMLX
import Foundation
import MLX

/// The behaviour of MLX 0.32.2 on Metal that a CPU does not show.
///
/// Everything is still computed on the CPU. `Sources/CHostMLX/FailingCommandBuffers.cpp` cites the lines of MLX.
public struct MetalRules: Sendable {
    /// Matrix products in float32 round their operands to TF32, as on an A19 or an M5, unless the environment's `MLX_ENABLE_TF32`
    /// is 0. Needs OpenBLAS, as on Linux.
    public var tf32 = false
    /// The GPU is the default device of C++, and of Swift outside of `Device.withDefaultDevice`. Work for it fails.
    public var gpuByDefault = false
    /// Nil where no command buffer fails.
    public var failingBuffers: FailingCommandBuffers?

    public init(tf32: Bool = false, gpuByDefault: Bool = false, failingBuffers: FailingCommandBuffers? = nil) {
        self.tf32 = tf32
        self.gpuByDefault = gpuByDefault
        self.failingBuffers = failingBuffers
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
    let failing = rules.failingBuffers
    let begun = (failing?.message ?? "").withCString { message in
        host_metal_begin(
            HostMetalRules(
                tf32: rules.tf32, gpu_by_default: rules.gpuByDefault,
                first_failing: failing?.first ?? 0, failing_count: failing?.count ?? 0, delay: failing?.delay ?? 0,
                leaves_zeros: failing?.garbage == .zeros, fails_at_once: failing?.isAtOnce ?? false, message: message))
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
