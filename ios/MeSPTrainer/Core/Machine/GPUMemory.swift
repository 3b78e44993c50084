import Foundation
import MLX
import MeSPBundle

/// The memory of Metal itself in the process: the device, the command queue and its buffers, and the libraries and pipelines of about 100 kernels.
///
/// Apple's MLX allocates all arrays through Metal, on a CPU too. The first array creates the allocator, the device, MLX's library of
/// kernels and a heap (allocator.cpp:60, device.cpp:586).
package enum MetalMemory {
    /// The bytes of Metal that are assumed until a self-check has measured them. No figure for iOS could be found. Work on a CPU needs no pipelines,
    /// so it takes fewer bytes.
    static let assumed = 20_000_000

    /// The limit of the freed buffers that MLX keeps while it works on a CPU, in bytes. Without a limit, a block's freed buffers would take as much
    /// memory as the block's arrays.
    private static let cacheOnCPU = 1 << 20

    /// Returns the bytes that Metal's allocator takes on a CPU beyond the arrays: the cache, a buffer that enters it, and the unused part of each
    /// array's last page of 16 KiB (allocator.cpp:126). About 50 arrays are alive in a block, and four more for each block of the model.
    static func beyondArrays(blocks: Int) -> Int { 2 * cacheOnCPU + (50 + 4 * blocks) << 14 }

    /// Calls `body`, in which MLX works on a CPU. If MLX starts Metal, MLX's cache of freed buffers is small meanwhile.
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

/// Calls `body` with a limit on the memory of its arrays. When these arrays take more than `bytes`, beyond the arrays that exist before the call, MLX
/// waits for the GPU before it encodes more operations.
///
/// MLX allocates an operation's output when it encodes the operation. It frees the operation's inputs when the GPU has completed the command buffer.
/// Without a limit, the arrays of up to 11 command buffers that are encoded ahead would exist at once. Mapped weights count too, so they must be
/// mapped before the call.
///
/// Completion handlers on another thread free the arrays, and an `eval` does not wait for them (metal/eval.cpp:60). If the handlers were late, arrays
/// of the phase before would count as existing and would live beside the arrays of this phase. So this function first waits for the handlers.
func withWorkspace<R>(_ bytes: Int?, _ body: () throws -> R) rethrows -> R {
    guard let bytes else { return try body() }
    Stream.defaultStream(Device.isCPU ? .cpu : .gpu).synchronize()
    return try MLXLimits.set(.memory, to: Memory.activeMemory + bytes, body)
}
