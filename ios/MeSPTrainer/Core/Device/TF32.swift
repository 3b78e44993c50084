import Foundation
import MLX

/// TF32, the format to which the neural accelerators of A19, M5 and later round the operands of float32 products. The environment variable
/// MLX_ENABLE_TF32=0 turns TF32 off.
package enum TF32 {
    /// Whether operands of products are rounded to TF32 in software. The self-check sets it to measure the effect of TF32 on any device.
    @TaskLocal package static var isEmulated = false

    /// Returns x rounded to a mantissa of 10 bits, to nearest with ties to even.
    static func rounded(_ x: MLXArray) -> MLXArray {
        guard x.dtype == .float32 else { return x }
        let bits = x.view(dtype: .uint32)
        let odd = (bits >> UInt32(13)) & UInt32(1)
        return ((bits + odd + UInt32(0xFFF)) & ~UInt32(0x1FFF)).view(dtype: .float32)
    }
}

// The functions below hide MLX's functions of the same names in this module.

func matmul(_ a: MLXArray, _ b: MLXArray) -> MLXArray {
    guard TF32.isEmulated else { return MLX.matmul(a, b) }
    return MLX.matmul(TF32.rounded(a), TF32.rounded(b))
}

func addMM(_ c: MLXArray, _ a: MLXArray, _ b: MLXArray, alpha: Float = 1) -> MLXArray {
    guard TF32.isEmulated else { return MLX.addMM(c, a, b, alpha: alpha) }
    return MLX.addMM(c, TF32.rounded(a), TF32.rounded(b), alpha: alpha)
}
