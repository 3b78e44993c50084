import MLX
import MeSPAdapters
import MeSPBundle

/// The Mamba-2 mixer:  x_mid − x = out(norm(o ∘ silu(z))), where o is the output of the state space model for xBC and dt.
extension Block {
    func mamba2(
        _ mixer: Mamba2Mixer, _ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]
    ) -> MixerResult {
        let mamba = weights.mamba2(mixer)
        // z, xBC and dt are separate products. As views of one product, each would keep the whole product alive.
        func part(_ start: Int, _ count: Int) -> MLXArray {
            tiled(layer(.in).outputs(start..<start + count))(mixerIn).asType(mixerIn.dtype)
        }
        let (z, xBC) = (part(0, mixer.width), part(mixer.width, mixer.convolutionWidth))
        let dt = part(mixer.width + mixer.convolutionWidth, mixer.numHeads)
        let o = eachSequence(sequences, &states) { rows, state in
            guard case .recurrent(var memory, let count) = state else { preconditionFailure("another mixer's state") }
            let o = tiled(mamba)(xBC: xBC[rows], dt: dt[rows], state: &memory)
            state = .recurrent(memory, count: count + rows.count)
            return o.asType(mixerIn.dtype)
        }
        return (.mamba2(z: z, xBC: xBC, dt: dt, o: o), linear(.out)(mamba.gatedNorm(o: o, z: z)))
    }

    func mamba2Backward(
        _ mixer: Mamba2Mixer, _ intermediates: consuming Intermediates, dOut: MLXArray, _ gradients: inout LoRAGradients
    ) -> ProjectionGradients {
        let mamba = weights.mamba2(mixer)
        let (_, xBC, dt, _) = intermediates.mamba2
        let (dO, dZ) = gatedOutputBackward(
            consume intermediates, { ($0.mamba2.o, $0.mamba2.z) }, dOut: dOut, &gradients, mamba.gatedNorm(o:z:),
            mamba.gatedNormBackward(o:z:dy:))
        let d = tiled(mamba).backward(xBC: consume xBC, dt: dt, dO: consume dO, records: records(dOut.dim(0)))
        return [.in: concatenated([dZ, d.dXBC, d.dDt], axis: -1)]
    }
}
