import MLX
import MeSPBundle

/// Rotary position embedding (RoPE) at position t:  (y₁, y₂) = s (x₁ cos θ − x₂ sin θ, x₁ sin θ + x₂ cos θ),  θ = t · frequency
///
/// x₁ and x₂ are the two halves of a head's first dimensions. The other dimensions do not change. s is `ropeScale`.
extension AttentionMixer {
    /// Returns y for x.
    /// - Parameter x: `[heads, n, d]`; or `[n, heads, 1, d]`, with one token of each of n sequences
    func rope(_ x: MLXArray, at positions: Positions) -> MLXArray { turned(x, at: positions, sign: 1) }

    /// Returns dx from dy: the rotation by −θ instead of θ, with the same factor s.
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

    private func scaled(_ x: MLXArray) -> MLXArray {
        guard ropeScale != 1 else { return x }
        let dimensions = 2 * frequencies.count
        return concatenated([x[.ellipsis, 0..<dimensions] * ropeScale, x[.ellipsis, dimensions...]], axis: -1)
    }

    /// Returns 1 / frequency of each pair of dimensions, with the given sign. The result is finite even for frequency 0, because 1 / infinity is
    /// undefined in a GPU's fast math.
    func periods(sign: Float) -> MLXArray {
        .of(frequencies.map { sign * min(1 / $0, .greatestFiniteMagnitude) })
    }
}

/// The positions of tokens: consecutive from a first position, or one position for each of n sequences, int32 `[n]`.
enum Positions {
    case from(Int)
    case each(MLXArray)
}
