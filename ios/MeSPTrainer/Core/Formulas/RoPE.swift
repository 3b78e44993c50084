import MLX

/// Rotary positions:  (y₁, y₂) = s (x₁ cos θ − x₂ sin θ, x₁ sin θ + x₂ cos θ),  θ = t · frequency
struct RoPE {
    /// Radians a position of each pair (x₁, x₂), which lie in the two halves of a head's first dimensions; the others stay as they
    /// are.
    let frequencies: [Float]
    /// s
    let scale: Float

    /// - Parameter x: `[heads, n, d]`, positions `start ..< start + n`
    func callAsFunction(_ x: MLXArray, start: Int) -> MLXArray { turned(x, start: start, sign: 1) }

    /// The derivative of a rotation is the rotation by the opposite angle.
    func backward(dy: MLXArray, start: Int) -> MLXArray { turned(dy, start: start, sign: -1) }

    private func turned(_ x: MLXArray, start: Int, sign: Float) -> MLXArray {
        let half = frequencies.count
        guard half > 0 else { return x }
        let angles = MLXArray.arange(start, start + x.dim(-2)).asType(.float32)[0..., .newAxis] * MLXArray(frequencies)
        let (cosine, sine) = (cos(angles) * scale, sin(angles) * (sign * scale))
        let (x1, x2) = (x[.ellipsis, 0..<half], x[.ellipsis, half..<2 * half])
        var parts = [x1 * cosine - x2 * sine, x1 * sine + x2 * cosine]
        if 2 * half < x.dim(-1) { parts.append(x[.ellipsis, (2 * half)...]) }
        return concatenated(parts, axis: -1)
    }
}
