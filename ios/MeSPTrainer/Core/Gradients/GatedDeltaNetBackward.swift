import MLX

extension BlockBackward {
    /// The derivative of out(norm(o) ∘ silu(z)), with o the gated delta rule of qkv, b and a, from that of its output `[T, hidden]`.
    func gatedDeltaNet(
        _ mixer: GatedDeltaNetMixer, _ forward: consuming Intermediates, dOut: MLXArray,
        _ gradients: inout [Projection: LoRAMatrices]
    ) -> Projected {
        let net = weights.gatedDeltaNet(mixer)
        let (qkv, ba) = (forward.m1, forward.m3)
        let parts = gatedOutput(net, consume forward, dOut: dOut, &gradients)
        let (dO, dZ) = (concatenated(parts.map(\.dO)), concatenated(parts.map(\.dZ)))
        tile.pace.finish([dO, dZ])
        let d = net.backward(
            qkv: consume qkv, b: ba[0..., ..<mixer.numValueHeads], a: ba[0..., mixer.numValueHeads...],
            dO: consume dO, tile: net.tile(length: dOut.dim(0), bytes: tile.bytes), pace: tile.pace)
        return [.qkv: d.dQKV, .z: dZ, .b: d.dB, .a: d.dA]
    }

    /// - Returns: the gradients of o and z, some tokens' after the other. What they are made of goes with the function.
    private func gatedOutput(
        _ net: GatedDeltaNet, _ forward: consuming Intermediates, dOut: MLXArray,
        _ gradients: inout [Projection: LoRAMatrices]
    ) -> [(dO: MLXArray, dZ: MLXArray)] {
        let (z, o) = (forward.m2, forward.mixed)
        let dy = lastProjection(.out, net.output(o: o, z: z), dy: dOut, &gradients)
        return tiles(of: z.dim(0), size: tile.rows(of: z)).map {
            net.outputBackward(o: o[$0], z: z[$0], dy: dy[$0])
        }
    }
}
