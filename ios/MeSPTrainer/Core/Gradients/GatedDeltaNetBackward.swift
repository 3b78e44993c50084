import MLX

extension BlockBackward {
    /// The derivative of out(norm(o) ∘ silu(z)), with o the gated delta net of qkv, b and a, from that of its output `[T, hidden]`.
    func gatedDeltaNet(
        _ mixer: GatedDeltaNetMixer, _ forward: consuming Intermediates, dOut: MLXArray,
        _ gradients: inout [Projection: LoRAMatrices]
    ) -> Projected {
        let net = weights.gatedDeltaNet(mixer)
        let (qkv, z, o) = (forward.m1[0], forward.m2[0], forward.mixed[0])
        let (b, a) = (forward.m3[0][0..., ..<mixer.numValueHeads], forward.m3[0][0..., mixer.numValueHeads...])
        let dy = lastProjection(.out, net.output(o: o, z: z), dy: dOut, &gradients)
        let d = net.backward(
            qkv: qkv, z: z, b: b, a: a, o: o, dy: dy, tile: net.tile(length: dOut.dim(0), bytes: tile.bytes),
            pace: tile.pace)
        return [.qkv: d.dQKV, .z: d.dZ, .b: d.dB, .a: d.dA]
    }
}
