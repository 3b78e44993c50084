import Foundation
import MLX
import MeSPBundle

/// The memory that Metal itself takes in the process, for example for its command queue, libraries and pipelines.
///
/// Apple's MLX allocates all arrays through Metal, on a CPU too.
package enum MetalMemory {
    static let assumed = 20_000_000

    private static let cacheOnCPU = 1 << 20

    /// Returns an estimate of the bytes that Metal's allocator takes on a CPU in addition to the arrays: the cached buffers, and the unused part of
    /// each array's last page of 16 KiB. About 50 arrays are alive in a block, and four more for each block of the model.
    static func beyondArrays(blocks: Int) -> Int { 2 * cacheOnCPU + (50 + 4 * blocks) << 14 }

    /// Calls `body`, which computes on a CPU, with a small cache of freed buffers if MLX uses Metal.
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

    package static subscript(_ backend: Backend) -> Int? {
        get { known[backend] }
        set { known[backend] = newValue }
    }
}

/// Calls `body` with a limit of `bytes` on the memory of new arrays; nil means no limit. At the limit, MLX waits for the GPU before it encodes more
/// operations.
///
/// MLX allocates an operation's output when it encodes the operation, and frees the inputs when the GPU has completed them. Without a limit, the
/// arrays of several command buffers would exist at once. Mapped weights count too, so they must be mapped before the call.
///
/// After an `eval`, MLX may not have freed all unused arrays yet, and they would count as existing. So call this only at the beginning of a piece of
/// work (`MLXErrors.repeating`), after the wait that ended the piece before.
func withWorkspace<R>(_ bytes: Int?, _ body: () throws -> R) rethrows -> R {
    guard let bytes else { return try body() }
    return try MLXLimits.set(.memory, to: Memory.activeMemory + bytes, body)
}
