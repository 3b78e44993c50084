import MLX

extension BlockBackward {
    /// The derivative of o(attention(q, k, v)), or of o(attention(q, k, v) ∘ σ(g)), from that of its output `[T, hidden]`.
    func attention(
        _ mixer: AttentionMixer, _ forward: consuming Intermediates, dOut: MLXArray,
        _ gradients: inout [Projection: LoRAMatrices]
    ) -> Projected {
        let (length, heads, d) = (dOut.dim(0), mixer.numAttentionHeads, mixer.headDim)
        func byHead(_ x: MLXArray) -> MLXArray { x.reshaped([length, heads, d]).swappedAxes(0, 1) }
        func byToken(_ x: MLXArray) -> MLXArray { x.swappedAxes(0, 1).reshaped([length, heads * d]) }
        let attnOut = forward.mixed.asType(.float32)
        let attention = weights.attention(mixer)

        guard mixer.outputGate else {
            let dAttnOut = lastProjection(.o, attnOut, dy: dOut, &gradients)
            let (dq, dk, dv) = attention.backward(
                q: forward.m1, k: forward.m2, v: forward.m3, dOut: byHead(dAttnOut), tile: tile)
            return [.q: dq, .k: dk, .v: dv]
        }
        let gate = OutputGate(g: byToken(forward.m1[.ellipsis, d...]))
        let (dAttnOut, dg) = gate.backward(attnOut, dy: lastProjection(.o, gate(attnOut), dy: dOut, &gradients))
        tile.pace.finish([dAttnOut, dg])
        let (dq, dk, dv) = attention.backward(
            q: forward.m1[.ellipsis, ..<d], k: forward.m2, v: forward.m3, dOut: byHead(dAttnOut), tile: tile)
        let dqg = concatenated([dq, dg].map { $0.reshaped([length, heads, d]) }, axis: -1)
            .reshaped([length, 2 * heads * d])
        tile.pace.finish([dqg])
        return [.q: dqg, .k: dk, .v: dv]
    }
}
