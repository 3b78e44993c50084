import MLX

/// The output of attention whose heads have gates:  y = x ∘ σ(g)
struct OutputGate {
    /// `[T, heads·d]`
    let g: MLXArray

    /// x `[T, heads·d]` to y, in float32.
    func callAsFunction(_ x: MLXArray) -> MLXArray { Self.y([x, g]) }

    /// dx = dy σ(g),  dg = dy x σ(g) (1 − σ(g)), in float32.
    func backward(_ x: MLXArray, dy: MLXArray) -> (dx: MLXArray, dg: MLXArray) {
        (Self.y([dy, g]), Self.dg([x, dy, g]))
    }

    private static let y = Fused { $0[0].asType(.float32) * sigmoid($0[1].asType(.float32)) }
    private static let dg = Fused {
        let sigma = sigmoid($0[2].asType(.float32))
        return $0[0].asType(.float32) * $0[1] * sigma * (1 - sigma)
    }
}
