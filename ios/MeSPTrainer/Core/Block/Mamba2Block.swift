import MLX
import MeSPBundle

/// x_mid − x = out(norm(o ∘ silu(z))), with o the state space of xBC and dt.
extension Block {
    func mamba2(
        _ mixer: Mamba2Mixer, _ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]
    ) -> Mixed {
        let mamba = weights.mamba2(mixer)
        // Products of their own: as a view, any of the parts would keep all three.
        func part(_ start: Int, _ count: Int) -> MLXArray {
            projection(.in).outputs(start..<start + count)(mixerIn, tile: tile.projection).asType(mixerIn.dtype)
        }
        let (z, xBC) = (part(0, mixer.width), part(mixer.width, mixer.convolutionWidth))
        let dt = part(mixer.width + mixer.convolutionWidth, mixer.numHeads)
        let o = eachSequence(sequences, &states) { rows, state in
            guard case .recurrent(var memory, let count) = state else { preconditionFailure("another mixer's state") }
            let o = mamba(
                xBC: xBC[rows], dt: dt[rows], state: &memory, tile: mamba.tile(length: rows.count, bytes: tile.bytes))
            state = .recurrent(memory, count: count + rows.count)
            return o.asType(mixerIn.dtype)
        }
        return Mixed(
            m1: z, m2: xBC, m3: dt, mixed: o, out: projection(.out)(mamba.output(o: o, z: z), tile: tile.projection))
    }

    /// The derivative of out(norm(o ∘ silu(z))), with o the state space of xBC and dt, from that of its output `[T, hidden]`.
    func mamba2Backward(
        _ mixer: Mamba2Mixer, _ forward: consuming Intermediates, dOut: MLXArray, _ gradients: inout LoRAGradients
    ) -> Projected {
        let mamba = weights.mamba2(mixer)
        let (xBC, dt) = (forward.m2, forward.m3)
        let parts = gatedOutput(mamba, consume forward, dOut: dOut, &gradients)
        let (dO, dZ) = (concatenated(parts.map(\.dO)), concatenated(parts.map(\.dZ)))
        tile.pace.finish([dO, dZ])
        let d = mamba.backward(
            xBC: consume xBC, dt: dt, dO: consume dO, records: records(dOut.dim(0)),
            tile: mamba.tile(length: dOut.dim(0), bytes: tile.bytes), pace: tile.pace)
        let dIn = concatenated([dZ, d.dXBC, d.dDt], axis: -1)
        tile.pace.finish([dIn])
        return [.in: dIn]
    }

    /// - Returns: the gradients of o and z, some tokens' after the other. Their inputs are released when the function returns.
    private func gatedOutput(
        _ mamba: Mamba2, _ forward: consuming Intermediates, dOut: MLXArray, _ gradients: inout LoRAGradients
    ) -> [(dO: MLXArray, dZ: MLXArray)] {
        let (z, o) = (forward.m1, forward.mixed)
        let dy = lastProjection(.out, mamba.output(o: o, z: z), dy: dOut, &gradients)
        return tiles(of: z.dim(0), size: tile.rows(of: z)).map {
            mamba.outputBackward(o: o[$0], z: z[$0], dy: dy[$0])
        }
    }
}
