import MLX

/// LFM2's gated short convolution:  y = c ∘ conv_out,  conv_out = conv(b ∘ u)
///
/// b, c, u, conv_out and y are `[n, hidden]`.
extension CausalConvolution {
    /// Returns conv_out, in float32.
    /// - Parameter tail: b ∘ u of the tokens before, `[K − 1, hidden]` float32; replaced by b ∘ u of the last K − 1 tokens
    func callAsFunction(b: MLXArray, u: MLXArray, tail: inout MLXArray) -> MLXArray {
        let x = product(b, u)
        let convOut = self(x, tail: tail)
        tail = self.tail(after: x, tail: tail)
        return convOut
    }

    func gated(convOut: MLXArray, c: MLXArray) -> MLXArray { product(convOut, c) }

    /// Returns the gradients, where x = b ∘ u:  dc = dy ∘ conv_out,  dx = convᵀ(dy ∘ c),  db = dx ∘ u,  du = dx ∘ b
    ///
    /// - Returns: db, dc and du `[T, hidden]`, in float32.
    func backward(b: MLXArray, c: MLXArray, u: MLXArray, convOut: MLXArray, dy: MLXArray)
        -> (db: MLXArray, dc: MLXArray, du: MLXArray)
    {
        let dx = backward(dy: product(dy, c))
        return (product(dx, u), product(dy, convOut), product(dx, b))
    }

    private func product(_ a: MLXArray, _ b: MLXArray) -> MLXArray { Self.product([a, b]) }

    private static let product = Fused { $0[0].asType(.float32) * $0[1].asType(.float32) }
}
