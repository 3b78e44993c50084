import Foundation
import MLX
import MeSPBundle

/// The memory of Metal itself in the process: the device, the command queue and its buffers, libraries and pipelines of some 100 kernels.
///
/// Apple's MLX has one allocator, Metal's, and makes it with the first array on any device: with it come the device, MLX's library of
/// kernels and a heap (allocator.cpp:60, device.cpp:586), on a CPU too.
package enum MetalMemory {
    /// Before it is measured, in bytes: nothing that could be found gives a figure for iOS. A CPU has no pipelines, and takes less.
    static let assumed = 20_000_000

    /// The freed buffers that MLX may keep while it works on a CPU, in bytes. Without a limit a block's would take as much as its arrays.
    private static let cacheOnCPU = 1 << 20

    /// What Metal's allocator takes beyond the arrays on a CPU, in bytes: that cache and a buffer that goes into it, and the rest of the last
    /// page of 16 KiB of each array (allocator.cpp:126), of which some 50 are alive in a block, and four of each block.
    static func beyondArrays(blocks: Int) -> Int { 2 * cacheOnCPU + (50 + 4 * blocks) << 14 }

    /// Calls `body`, in which MLX works on a CPU.
    static func withSmallCache<R>(_ body: () throws -> R) rethrows -> R {
        guard Processor.cpu.startsMetal else { return try body() }
        return try MLXLimits.set(.cache, to: min(cacheOnCPU, Memory.cacheLimit), body)
    }

    private static let known = Known()

    private final class Known: @unchecked Sendable {
        private let lock = NSLock()
        private var measured = [Backend: Int]()

        subscript(_ backend: Backend) -> Int? {
            get { lock.withLock { measured[backend] } }
            set { lock.withLock { measured[backend] = newValue } }
        }
    }

    /// The bytes that a self-check of this machine measured for bundles of a backend; nil without a self-check.
    package static subscript(_ backend: Backend) -> Int? {
        get { known[backend] }
        set { known[backend] = newValue }
    }
}

/// Calls `body`. Where its arrays take more than `bytes` beside those that there are, MLX waits for the GPU before it encodes more.
///
/// An operation's output is taken when it is encoded, and its inputs go when the GPU is through with their command buffer, so that the
/// encoder's lead, of up to 11 command buffers, would be all memory. The limit counts mapped weights, which must be mapped already.
///
/// Arrays are freed by completion handlers, on another thread, for which an `eval` does not wait (metal/eval.cpp:60): of slow ones those of
/// the phase before would count as lasting, and live beside this one's. So they are waited for.
func withWorkspace<R>(_ bytes: Int?, _ body: () throws -> R) rethrows -> R {
    guard let bytes else { return try body() }
    Stream.defaultStream(Device.isCPU ? .cpu : .gpu).synchronize()
    return try MLXLimits.set(.memory, to: Memory.activeMemory + bytes, body)
}
