import MLX

extension BlockBackward {
    /// The derivative of out(c ∘ conv(b ∘ u)) from that of its output `[T, hidden]`.
    func shortConvolution(
        _ forward: consuming Intermediates, dOut: MLXArray, _ gradients: inout [Projection: LoRAMatrices]
    ) -> Projected {
        let convolution = weights.shortConvolution
        let parts = parts(convolution, consume forward, dOut: dOut, &gradients)
        let d = concatenated(parts.map(\.db) + parts.map(\.dc) + parts.map(\.du), axis: -1)
        tile.pace.finish([d])
        return [.in: d]
    }

    /// - Returns: the gradients of b, c and u, some features' after the other. What they are made of goes with the function.
    private func parts(
        _ convolution: ShortConvolution, _ forward: consuming Intermediates, dOut: MLXArray,
        _ gradients: inout [Projection: LoRAMatrices]
    ) -> [(db: MLXArray, dc: MLXArray, du: MLXArray)] {
        let (b, c, u, mixed) = (forward.m1, forward.m2, forward.m3, forward.mixed)
        let dy = lastProjection(.out, convolution.output(mixed: mixed, c: c), dy: dOut, &gradients)
        let columns = tile.rows(of: dy.T)
        return tiles(of: dy.dim(1), size: columns).map { f in
            convolution.features(f).backward(
                b: b[0..., f], c: c[0..., f], u: u[0..., f], mixed: mixed[0..., f], dy: dy[0..., f])
        }
    }
}
