import Foundation
import MLX

/// TF32, the format to which the neural accelerators of A19, M5 and later round the operands of float32 products unless
/// MLX_ENABLE_TF32 is 0.
package enum TF32 {
    /// Whether the formulas round the operands of their products. The self-check sets it to compute the effect of TF32 on any device.
    @TaskLocal package static var isEmulated = false

    /// Returns x rounded to 10 of float32's 23 bits of mantissa, to nearest with ties to even.
    static func rounded(_ x: MLXArray) -> MLXArray {
        guard x.dtype == .float32 else { return x }
        let bits = x.view(dtype: .uint32)
        let odd = (bits >> UInt32(13)) & UInt32(1)
        return ((bits + odd + UInt32(0xFFF)) & ~UInt32(0x1FFF)).view(dtype: .float32)
    }
}

// In this module the functions below hide MLX's functions with equal names, so the formulas call these for all products.

func matmul(_ a: MLXArray, _ b: MLXArray) -> MLXArray {
    guard TF32.isEmulated else { return MLX.matmul(a, b) }
    return MLX.matmul(TF32.rounded(a), TF32.rounded(b))
}

/// Returns c + alpha a b.
func addMM(_ c: MLXArray, _ a: MLXArray, _ b: MLXArray, alpha: Float = 1) -> MLXArray {
    guard TF32.isEmulated else { return MLX.addMM(c, a, b, alpha: alpha) }
    return MLX.addMM(c, TF32.rounded(a), TF32.rounded(b), alpha: alpha)
}

func quantizedMM(
    _ x: MLXArray, _ w: MLXArray, scales: MLXArray, biases: MLXArray?, transpose: Bool, groupSize: Int, bits: Int,
    mode: QuantizationMode
) -> MLXArray {
    // The neural accelerators compute x Wᵀ, but not x W.
    guard TF32.isEmulated, transpose, x.dtype == .float32 else {
        return MLX.quantizedMM(
            x, w, scales: scales, biases: biases, transpose: transpose, groupSize: groupSize, bits: bits, mode: mode)
    }
    let dense = dequantized(
        w, scales: scales, biases: biases, groupSize: groupSize, bits: bits, mode: mode, dtype: .float32)
    return MLX.matmul(TF32.rounded(x), TF32.rounded(dense).T)
}
