import Foundation
import MLX

/// eˣ. On a CPU as a power of two, which the C library makes: on x86 MLX's own exponential takes three times as long.
/// - Parameter x: in float32
func exponential(_ x: MLXArray) -> MLXArray {
    Device.defaultDevice().deviceType == .gpu ? exp(x) : pow(2 as Float, x * Float(M_LOG2E))
}

/// σ(x) = 1 / (1 + e⁻ˣ)
/// - Parameter x: in float32
func logistic(_ x: MLXArray) -> MLXArray {
    Device.defaultDevice().deviceType == .gpu ? sigmoid(x) : 1 / (1 + exponential(-x))
}
