import MLX
import MeSPBundle

/// Rotary positions:  (y₁, y₂) = s (x₁ cos θ − x₂ sin θ, x₁ sin θ + x₂ cos θ),  θ = t · frequency
///
/// The pairs (x₁, x₂) lie in the two halves of a head's first dimensions; the others stay as they are. s is `ropeScale`.
extension AttentionMixer {
    /// - Parameter x: `[heads, n, d]`, or `[n, heads, 1, d]` of n sequences
    func rope(_ x: MLXArray, at positions: Positions) -> MLXArray { turned(x, at: positions, sign: 1) }

    /// The derivative of a rotation is the rotation by the opposite angle.
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

    /// x with its first dimensions times s.
    private func scaled(_ x: MLXArray) -> MLXArray {
        guard ropeScale != 1 else { return x }
        let dimensions = 2 * frequencies.count
        return concatenated([x[.ellipsis, 0..<dimensions] * ropeScale, x[.ellipsis, dimensions...]], axis: -1)
    }

    /// The positions a radian of each pair. Of one that stays they are the largest number and not infinite: under fast math, in which a GPU's
    /// kernel is compiled, the inverse of an infinite one is undefined. It turns such a pair by less than 10⁻³², which changes no bit of it.
    func periods(sign: Float) -> MLXArray {
        MLXArray(frequencies.map { sign * min(1 / $0, .greatestFiniteMagnitude) })
    }
}

/// The positions of tokens that follow each other, from the first on; or of one token of each of n sequences, int32 `[n]`.
enum Positions {
    case from(Int)
    case each(MLXArray)
}
