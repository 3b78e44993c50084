import MLX
import MeSPBundle

/// Rotary position embedding (RoPE):  (y₁, y₂) = s (x₁ cos θ − x₂ sin θ, x₁ sin θ + x₂ cos θ),  θ = t · frequency
///
/// The pairs (x₁, x₂) lie in the two halves of a head's first dimensions. The other dimensions do not change. s is `ropeScale`.
extension AttentionMixer {
    /// Rotates x by its positions.
    /// - Parameter x: `[heads, n, d]`, or `[n, heads, 1, d]` for one token of each of n sequences
    func rope(_ x: MLXArray, at positions: Positions) -> MLXArray { turned(x, at: positions, sign: 1) }

    /// Rotates dy by the opposite angles, which is the derivative of the rotation.
    func ropeBackward(dy: MLXArray, start: Int) -> MLXArray { turned(dy, at: .from(start), sign: -1) }

    private func turned(_ x: MLXArray, at positions: Positions, sign: Float) -> MLXArray {
        guard !frequencies.isEmpty else { return x }
        let (x, dimensions, periods) = (scaled(x), 2 * frequencies.count, periods(sign: sign))
        return switch positions {
        case .from(let start):
            MLXFast.RoPE(
                x, dimensions: dimensions, traditional: false, base: nil, scale: 1, offset: start, freqs: periods)
        case .each(let positions):
            MLXFast.RoPE(
                x, dimensions: dimensions, traditional: false, base: nil, scale: 1, offset: positions, freqs: periods)
        }
    }

    /// Returns x with its first dimensions times s.
    private func scaled(_ x: MLXArray) -> MLXArray {
        guard ropeScale != 1 else { return x }
        let dimensions = 2 * frequencies.count
        return concatenated([x[.ellipsis, 0..<dimensions] * ropeScale, x[.ellipsis, dimensions...]], axis: -1)
    }

    /// Returns the number of positions per radian for each pair. For a pair that does not rotate, this is the largest finite number instead of
    /// infinity. A GPU's kernels are compiled with fast math, in which the inverse of infinity is undefined. Such a pair rotates by less than 10⁻³²
    /// radians, which changes none of its bits.
    func periods(sign: Float) -> MLXArray {
        MLXArray(frequencies.map { sign * min(1 / $0, .greatestFiniteMagnitude) })
    }
}

/// The positions of consecutive tokens from a first one on, or of one token in each of n sequences, int32 `[n]`.
enum Positions {
    case from(Int)
    case each(MLXArray)
}
