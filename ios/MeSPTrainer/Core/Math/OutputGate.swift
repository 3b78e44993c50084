import MLX

/// The gate of attention's output:  y = x ∘ σ(g)
struct OutputGate {
    /// The gates `[T, heads, d]`, or `[T, heads, 1]` if a head has one gate.
    let g: MLXArray

    func callAsFunction(_ x: MLXArray) -> MLXArray { Self.y([byHead(x), g]).reshaped(x.shape) }

    /// Returns dx `[T, heads·d]` = dy σ(g), and dg = dy x σ(g) (1 − σ(g)) in the shape of g, in float32. If a head has one gate, dg is summed over
    /// the head's elements.
    func backward(_ x: MLXArray, dy: MLXArray) -> (dx: MLXArray, dg: MLXArray) {
        let dg = Self.dg([byHead(x), byHead(dy), g])
        return (self(dy), g.dim(-1) == 1 ? dg.sum(axis: -1, keepDims: true) : dg)
    }

    private func byHead(_ x: MLXArray) -> MLXArray { x.reshaped([g.dim(0), g.dim(1), -1]) }

    private static let y = Fused { $0[0].asType(.float32) * sigmoid($0[1].asType(.float32)) }
    private static let dg = Fused {
        let sigma = sigmoid($0[2].asType(.float32))
        return $0[0].asType(.float32) * $0[1] * sigma * (1 - sigma)
    }
}
