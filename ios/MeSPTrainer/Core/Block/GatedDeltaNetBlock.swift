import MLX
import MeSPAdapters
import MeSPBundle

/// The gated delta net mixer:  x_mid − x = out(norm(o) ∘ silu(z)), where o is the output of the gated delta rule for qkv, b and a.
extension Block {
    func gatedDeltaNet(
        _ mixer: GatedDeltaNetMixer, _ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]
    ) -> MixerResult {
        let net = weights.gatedDeltaNet(mixer)
        let (qkv, z, b, a) = (
            project(.qkv, mixerIn), project(.z, mixerIn), project(.b, mixerIn), project(.a, mixerIn)
        )
        let o = eachSequence(sequences, &states) { rows, state in
            guard case .recurrent(var memory, let count) = state else { preconditionFailure("another mixer's state") }
            let o = tiled(net)(qkv: qkv[rows], b: b[rows], a: a[rows], state: &memory)
            state = .recurrent(memory, count: count + rows.count)
            return o.asType(mixerIn.dtype)
        }
        return (
            .gatedDeltaNet(qkv: qkv, z: z, ba: concatenated([b, a], axis: -1), o: o),
            linear(.out)(net.gatedNorm(o: o, z: z))
        )
    }

    func gatedDeltaNetBackward(
        _ mixer: GatedDeltaNetMixer, _ intermediates: consuming Intermediates, dOut: MLXArray,
        _ carried: inout CarriedGradients,
        _ gradients: inout LoRAGradients
    ) -> ProjectionGradients {
        let net = weights.gatedDeltaNet(mixer)
        let (qkv, _, ba, _) = intermediates.gatedDeltaNet
        var before: MixerState.Recurrent?
        if case .recurrent(let state, _) = intermediates.segment?.state { before = state }
        if before != nil, carried.net == nil { carried.net = net.noCarriedGradients }
        let (dO, dZ) = gatedOutputBackward(
            consume intermediates, { ($0.gatedDeltaNet.o, $0.gatedDeltaNet.z) }, dOut: dOut, &gradients,
            net.gatedNorm(o:z:), net.gatedNormBackward(o:z:dy:))
        let d = tiled(net).backward(
            qkv: consume qkv, b: ba[0..., ..<mixer.numValueHeads], a: ba[0..., mixer.numValueHeads...],
            dO: consume dO, records: records(dOut.dim(0)), before: before, carried: &carried.net)
        return [.qkv: d.dQKV, .z: dZ, .b: d.dB, .a: d.dA]
    }

    /// Returns the gradients of o and z for out(f(o, z)).
    func gatedOutputBackward(
        _ intermediates: consuming Intermediates, _ inputs: (Intermediates) -> (o: MLXArray, z: MLXArray),
        dOut: MLXArray,
        _ gradients: inout LoRAGradients, _ f: (_ o: MLXArray, _ z: MLXArray) -> MLXArray,
        _ derivative: (_ o: MLXArray, _ z: MLXArray, _ dy: MLXArray) -> (dO: MLXArray, dZ: MLXArray)
    ) -> (dO: MLXArray, dZ: MLXArray) {
        func parts(_ intermediates: consuming Intermediates) -> [[MLXArray]] {
            let (o, z) = inputs(intermediates)
            let dy = outputProjectionBackward(.out, f(o, z), dy: dOut, &gradients)
            return schedule.rows(of: z) { rows in
                let d = derivative(o[rows], z[rows], dy[rows])
                return [d.dO, d.dZ]
            }
        }
        let all = parts(consume intermediates)
        return schedule.phase(concatenated(all.map { $0[0] }), concatenated(all.map { $0[1] }))
    }
}
