import MLX
import MeSPBundle

/// Rotary positions:  (y₁, y₂) = s (x₁ cos θ − x₂ sin θ, x₁ sin θ + x₂ cos θ),  θ = t · frequency
///
/// The pairs (x₁, x₂) lie in the two halves of a head's first dimensions; the others stay as they are. s is `ropeScale`.
extension AttentionMixer {
    /// - Parameter x: `[heads, n, d]`, positions `start ..< start + n`
    func rope(_ x: MLXArray, start: Int) -> MLXArray { turned(x, start: start, sign: 1) }

    /// x `[n, heads, 1, d]` of n sequences, each at a position of its own.
    func rope(_ x: MLXArray, positions: MLXArray) -> MLXArray {
        guard !frequencies.isEmpty else { return x }
        return MLXFast.RoPE(
            scaled(x), dimensions: 2 * frequencies.count, traditional: false, base: nil, scale: 1, offset: positions,
            freqs: periods(sign: 1))
    }

    /// The derivative of a rotation is the rotation by the opposite angle.
    func ropeBackward(dy: MLXArray, start: Int) -> MLXArray { turned(dy, start: start, sign: -1) }

    private func turned(_ x: MLXArray, start: Int, sign: Float) -> MLXArray {
        guard !frequencies.isEmpty else { return x }
        return MLXFast.RoPE(
            scaled(x), dimensions: 2 * frequencies.count, traditional: false, base: nil, scale: 1, offset: start,
            freqs: periods(sign: sign))
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
