import CHostMLX
import Foundation
import MLX

/// Behaviour of MLX 0.32.2 on Metal that a CPU does not show.
public struct MetalRules: Sendable {
    /// Whether float32 matrix products round their operands to TF32, as on an A19 or an M5. The environment variable `MLX_ENABLE_TF32=0` switches
    /// TF32 off. This rule needs OpenBLAS, which HostMLX uses on Linux if it is installed.
    public var tf32 = false
    /// Whether the GPU is the default device. Work on the GPU fails.
    public var gpuByDefault = false
    public var failingBuffers: FailingCommandBuffers?

    public init(tf32: Bool = false, gpuByDefault: Bool = false, failingBuffers: FailingCommandBuffers? = nil) {
        self.tf32 = tf32
        self.gpuByDefault = gpuByDefault
        self.failingBuffers = failingBuffers
    }
}

public struct MetalReport: Sendable, Equatable {
    /// The number of command buffers: of evaluations that had something to compute, and of waits for a stream. If allocations fail, their number.
    public var commandBuffers = 0
    /// The faults that would have ended a process on Metal, with their counts.
    public var faults = [String: Int]()
}

/// Runs `body` while HostMLX follows the rules. Only one call may run at a time.
public func withMetal<R>(_ rules: MetalRules, _ body: () throws -> R) -> (
    result: Result<R, any Error>, report: MetalReport
) {
    beginMetal(rules)
    let result = Result {
        rules.gpuByDefault ? try Device.withDefaultDevice(Device(.gpu), body) : try body()
    }
    return (result, endMetal())
}

/// Makes HostMLX follow the rules until `endMetal`, on all threads. The rules may not have `gpuByDefault`.
public func beginMetal(_ rules: MetalRules) {
    // Creates the CPU's stream before the rules apply.
    _ = Stream.cpu
    let failing = rules.failingBuffers
    let begun = (failing?.message ?? "").withCString { message in
        host_metal_begin(
            HostMetalRules(
                tf32: rules.tf32, gpu_by_default: rules.gpuByDefault,
                first_failing: failing?.first ?? 0, failing_count: failing?.count ?? 0,
                period: failing?.period ?? 1, delay: failing?.delay ?? 0,
                leaves_zeros: failing?.garbage == .zeros, of_allocations: failing?.areAllocations ?? false,
                message: message))
    }
    precondition(begun, "HostMLX behaves like Metal already")
}

public func endMetal() -> MetalReport {
    var report = MetalReport()
    report.commandBuffers = withUnsafeMutablePointer(to: &report.faults) { faults in
        host_metal_end(faults) { context, text, count in
            guard let context, let text else { return }
            context.assumingMemoryBound(to: [String: Int].self).pointee[String(cString: text)] = count
        }
    }
    return report
}
