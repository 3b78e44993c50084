import Foundation
import MLX

/// TF32, the format to which the neural accelerators of A19, M5 and later round the operands of float32 products unless
/// MLX_ENABLE_TF32 is 0.
package enum TF32 {
    /// Whether the formulas round the operands of their products. The self-check sets it to compute the effect of TF32 on any device.
    @TaskLocal package static var isEmulated = false

    /// x with 10 bits of mantissa instead of float32's 23, rounded to the nearest, a tie to the even one.
    static func rounded(_ x: MLXArray) -> MLXArray {
        guard x.dtype == .float32 else { return x }
        let bits = x.view(dtype: .uint32)
        let odd = (bits >> UInt32(13)) & UInt32(1)
        return ((bits + odd + UInt32(0xFFF)) & ~UInt32(0x1FFF)).view(dtype: .float32)
    }
}

// In this module these functions hide those of MLX with the same names, so every product of the formulas is one of them.

func matmul(_ a: MLXArray, _ b: MLXArray) -> MLXArray {
    guard TF32.isEmulated else { return MLX.matmul(a, b) }
    return MLX.matmul(TF32.rounded(a), TF32.rounded(b))
}

/// c + alpha a b
func addMM(_ c: MLXArray, _ a: MLXArray, _ b: MLXArray, alpha: Float = 1) -> MLXArray {
    guard TF32.isEmulated else { return MLX.addMM(c, a, b, alpha: alpha) }
    return MLX.addMM(c, TF32.rounded(a), TF32.rounded(b), alpha: alpha)
}

func quantizedMM(
    _ x: MLXArray, _ w: MLXArray, scales: MLXArray, biases: MLXArray?, transpose: Bool, groupSize: Int, bits: Int,
    mode: QuantizationMode
) -> MLXArray {
    // The accelerators take x Wᵀ only.
    guard TF32.isEmulated, transpose, x.dtype == .float32 else {
        return MLX.quantizedMM(
            x, w, scales: scales, biases: biases, transpose: transpose, groupSize: groupSize, bits: bits, mode: mode)
    }
    let dense = dequantized(
        w, scales: scales, biases: biases, groupSize: groupSize, bits: bits, mode: mode, dtype: .float32)
    return MLX.matmul(TF32.rounded(x), TF32.rounded(dense).T)
}

/// The behaviour of `quantizedMM`, `compile`, attention and freed memory on the CPU, which depends on the MLX in use.
package struct CPUProducts {
    /// Whether it dequantizes W by tiles that stay in the caches. MLX's own, some 50 times slower than a dense product, does not: there W
    /// is dequantized before the product.
    package let dequantizeInside: Bool
    /// The threads of a product, each of which unpacks and arranges matrices in buffers of its own.
    let threads: Int
    /// Whether `compile` fuses operations on a CPU. MLX's own would call a compiler of C++.
    let fuses: Bool
    /// Whether attention, and its derivative, make the scores by tiles that stay in the caches. MLX's own makes all of them.
    var attendsByTiles: Bool
    /// Whether MLX takes the memory of arrays from Metal, which it starts for that.
    var startsMetal: Bool
    /// Whether memory that is freed serves an array of any size, as malloc's does. MLX's own keeps buffers for arrays of their size.
    let reusesMemory: Bool

    /// Tests compute the plain way too.
    @TaskLocal package static var current = host

    /// MLX's.
    static let plain = CPUProducts(
        dequantizeInside: false, threads: 1, fuses: false, attendsByTiles: false, startsMetal: false,
        reusesMemory: false)

    /// The same on Apple's devices.
    static let apple = {
        var apple = plain
        apple.startsMetal = true
        return apple
    }()

    /// Those of this program: on Linux HostMLX's.
    private static var host: CPUProducts {
        #if os(Linux)
            let process = ProcessInfo.processInfo
            let asked = process.environment["OPENBLAS_NUM_THREADS"].flatMap { Int($0) } ?? 0
            return CPUProducts(
                dequantizeInside: true, threads: asked > 0 ? asked : min(8, process.activeProcessorCount), fuses: true,
                attendsByTiles: true, startsMetal: false, reusesMemory: true)
        #else
            return apple
        #endif
    }
}
