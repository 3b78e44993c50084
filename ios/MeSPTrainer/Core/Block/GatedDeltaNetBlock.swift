import MLX
import MeSPAdapters
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
                qkv: qkv[rows], b: b[rows], a: a[rows], state: &memory, machine: machine)
            state = .recurrent(memory, count: count + rows.count)
            return o.asType(mixerIn.dtype)
        }
        return Mixed(
            m1: qkv, m2: z, m3: concatenated([b, a], axis: -1), mixed: o,
            out: projection(.out)(net.output(o: o, z: z), machine: machine))
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
        let parts = gatedOutput(
            consume forward, z: \.m2, dOut: dOut, &gradients, net.output(o:z:), net.outputBackward(o:z:dy:))
        let (dO, dZ) = machine.phase(concatenated(parts.map { $0[0] }), concatenated(parts.map { $0[1] }))
        let d = net.backward(
            qkv: consume qkv, b: ba[0..., ..<mixer.numValueHeads], a: ba[0..., mixer.numValueHeads...],
            dO: consume dO, records: records(dOut.dim(0)), before: before, behind: &behind.net, machine: machine)
        machine.phase(d.dQKV, d.dB, d.dA, behind.net)
        return [.qkv: d.dQKV, .z: dZ, .b: d.dB, .a: d.dA]
    }

    /// The derivative of out(f(o, z)), with f the gated norm of a recurrent mixer, some tokens after the other.
    ///
    /// - Parameters:
    ///   - z: takes z from the intermediates, which are released when the function returns
    ///   - f, derivative: f, and its derivative, which gives those of o and z
    /// - Returns: the gradients of o and z, some tokens' after the other.
    func gatedOutput(
        _ forward: consuming Intermediates, z: (Intermediates) -> MLXArray, dOut: MLXArray,
        _ gradients: inout LoRAGradients, _ f: (_ o: MLXArray, _ z: MLXArray) -> MLXArray,
        _ derivative: (_ o: MLXArray, _ z: MLXArray, _ dy: MLXArray) -> (dO: MLXArray, dZ: MLXArray)
    ) -> [[MLXArray]] {
        let (z, o) = (z(forward), forward.mixed)
        let dy = outputProjectionBackward(.out, f(o, z), dy: dOut, &gradients)
        return machine.rows(of: z) { rows in
            let d = derivative(o[rows], z[rows], dy[rows])
            return [d.dO, d.dZ]
        }
    }
}
