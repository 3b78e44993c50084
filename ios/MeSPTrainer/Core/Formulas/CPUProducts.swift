import Foundation
import MLX

/// How `quantizedMM` computes on the CPU, by which MLX this is.
struct CPUProducts {
    /// Whether it dequantizes W by tiles that stay in the caches. MLX's own, some 50 times slower than a dense product, does not: there W
    /// is dequantized before the product.
    let dequantizeInside: Bool
    /// The threads of a product, each of which unpacks and arranges matrices in buffers of its own.
    let threads: Int

    /// Tests compute the plain way too.
    @TaskLocal static var current = host

    /// MLX's.
    static let plain = CPUProducts(dequantizeInside: false, threads: 1)

    /// Those of this program: on Linux HostMLX's.
    private static var host: CPUProducts {
        #if os(Linux)
            let process = ProcessInfo.processInfo
            let asked = process.environment["OPENBLAS_NUM_THREADS"].flatMap { Int($0) } ?? 0
            return CPUProducts(
                dequantizeInside: true, threads: asked > 0 ? asked : min(8, process.activeProcessorCount))
        #else
            return plain
        #endif
    }
}
