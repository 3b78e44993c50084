import MLX
import MeSPBundle

/// x_mid − x = out(norm(o) ∘ silu(z)), with o the gated delta rule of qkv, b and a.
extension Block {
    func gatedDeltaNet(
        _ mixer: GatedDeltaNetMixer, _ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]
    ) -> Mixed {
        let net = weights.gatedDeltaNet(mixer)
        let (qkv, z, b, a) = (
            projected(.qkv, mixerIn), projected(.z, mixerIn), projected(.b, mixerIn), projected(.a, mixerIn)
        )
        let o = eachSequence(sequences, &states) { rows, state in
            guard case .recurrent(var memory, let count) = state else { preconditionFailure("another mixer's state") }
            let o = net(
                qkv: qkv[rows], b: b[rows], a: a[rows], state: &memory,
                tile: net.tile(length: rows.count, bytes: tile.bytes))
            state = .recurrent(memory, count: count + rows.count)
            return o.asType(mixerIn.dtype)
        }
        return Mixed(
            m1: qkv, m2: z, m3: concatenated([b, a], axis: -1), mixed: o,
            out: projection(.out)(net.output(o: o, z: z), tile: tile.projection))
    }

    /// The derivative of out(norm(o) ∘ silu(z)), with o the gated delta rule of qkv, b and a, from that of its output `[T, hidden]`.
    func gatedDeltaNetBackward(
        _ mixer: GatedDeltaNetMixer, _ forward: consuming Intermediates, dOut: MLXArray, _ behind: inout Behind,
        _ gradients: inout LoRAGradients
    ) -> Projected {
        let net = weights.gatedDeltaNet(mixer)
        let (qkv, ba) = (forward.m1, forward.m3)
        var before: MixerState.Recurrent?
        if case .recurrent(let state, _) = forward.segment?.state { before = state }
        if before != nil, behind.net == nil { behind.net = net.nothingBehind }
        let parts = gatedOutput(net, consume forward, dOut: dOut, &gradients)
        let (dO, dZ) = (concatenated(parts.map(\.dO)), concatenated(parts.map(\.dZ)))
        tile.pace.finish([dO, dZ])
        let d = net.backward(
            qkv: consume qkv, b: ba[0..., ..<mixer.numValueHeads], a: ba[0..., mixer.numValueHeads...],
            dO: consume dO, records: records(dOut.dim(0)), before: before, behind: &behind.net,
            tile: net.tile(length: dOut.dim(0), bytes: tile.bytes), pace: tile.pace)
        return [.qkv: d.dQKV, .z: dZ, .b: d.dB, .a: d.dA]
    }

    /// - Returns: the gradients of o and z, some tokens' after the other. Their inputs are released when the function returns.
    private func gatedOutput(
        _ net: GatedDeltaNet, _ forward: consuming Intermediates, dOut: MLXArray,
        _ gradients: inout LoRAGradients
    ) -> [(dO: MLXArray, dZ: MLXArray)] {
        let (z, o) = (forward.m2, forward.mixed)
        let dy = lastProjection(.out, net.output(o: o, z: z), dy: dOut, &gradients)
        return tiles(of: z.dim(0), size: tile.rows(of: z)).map {
            net.outputBackward(o: o[$0], z: z[$0], dy: dy[$0])
        }
    }
}
