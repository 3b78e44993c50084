import MLX

extension BlockBackward {
    /// The derivative of out(c ∘ conv(b ∘ u)) from that of its output `[T, hidden]`.
    func shortConvolution(
        _ forward: consuming Intermediates, dOut: MLXArray, _ gradients: inout [Projection: LoRAMatrices]
    ) -> Projected {
        let convolution = weights.shortConvolution
        let (b, c, u, mixed) = (forward.m1, forward.m2, forward.m3, forward.mixed)
        let dy = lastProjection(.out, convolution.output(mixed: mixed, c: c), dy: dOut, &gradients)
        let (db, dc, du) = convolution.backward(b: b, c: c, u: u, mixed: mixed, dy: dy)
        let d = concatenated([db, dc, du], axis: -1)
        tile.pace.finish([d])
        return [.in: d]
    }
}
