import MLX

/// x_mid − x = o(attention(q, k, v)), or o(attention(q, k, v) ∘ σ(g)).
extension Block {
    func attention(
        _ mixer: AttentionMixer, _ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]
    ) -> Mixed {
        let (attention, d, dtype) = (weights.attention(mixer), mixer.headDim, mixerIn.dtype)
        func heads(_ p: Projection, _ count: Int) -> MLXArray {
            projected(p, mixerIn).reshaped([mixerIn.dim(0), count, -1]).swappedAxes(0, 1)
        }
        let (queries, k, v) = (
            heads(.q, mixer.numAttentionHeads), heads(.k, mixer.numKeyValueHeads), heads(.v, mixer.numKeyValueHeads)
        )
        let q = mixer.outputGate ? queries[.ellipsis, ..<d] : queries
        let attnOut = eachSequence(sequences, &states) { rows, state in
            guard case .attention(var cache) = state else { preconditionFailure("another mixer's state") }
            let start = state.count
            let kHat = attention.key(k[0..., rows], start: start).asType(dtype)
            cache.keys = concatenated([cache.keys, kHat], axis: 1)
            cache.values = concatenated([cache.values, v[0..., rows]], axis: 1)
            state = .attention(cache)
            return attention(
                q: attention.query(q[0..., rows], start: start), k: cache.keys, v: cache.values, tile: tile.attention
            ).asType(dtype)
        }
        var taken = attnOut
        if mixer.outputGate {
            let g = queries[.ellipsis, d...].swappedAxes(0, 1).reshaped(attnOut.shape)
            taken = OutputGate(g: g)(attnOut)
        }
        return Mixed(
            m1: queries, m2: k, m3: v, mixed: attnOut, out: projection(.o)(taken, tile: tile.projection))
    }

    /// The derivative of o(attention(q, k, v)), or of o(attention(q, k, v) ∘ σ(g)), from that of its output `[T, hidden]`.
    func attentionBackward(
        _ mixer: AttentionMixer, _ forward: consuming Intermediates, dOut: MLXArray,
        _ gradients: inout LoRAGradients
    ) -> Projected {
        let (length, heads, d) = (dOut.dim(0), mixer.numAttentionHeads, mixer.headDim)
        func byHead(_ x: MLXArray) -> MLXArray { x.reshaped([length, heads, d]).swappedAxes(0, 1) }
        func byToken(_ x: MLXArray) -> MLXArray { x.swappedAxes(0, 1).reshaped([length, heads * d]) }
        let attnOut = forward.mixed.asType(.float32)
        let attention = weights.attention(mixer)

        func attentionBackward(q: MLXArray, dAttnOut: MLXArray) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
            let (k, v, dAttnOut) = (forward.m2, forward.m3, byHead(dAttnOut))
            let d = eachRecord(records(length)) { rows in
                let d = attention.backward(
                    q: q[0..., rows], k: k[0..., rows], v: v[0..., rows], dOut: dAttnOut[0..., rows], tile: tile)
                return [d.dq, d.dk, d.dv]
            }
            return (d[0], d[1], d[2])
        }

        guard mixer.outputGate else {
            let dAttnOut = lastProjection(.o, attnOut, dy: dOut, &gradients)
            let (dq, dk, dv) = attentionBackward(q: forward.m1, dAttnOut: dAttnOut)
            return [.q: dq, .k: dk, .v: dv]
        }
        let gate = OutputGate(g: byToken(forward.m1[.ellipsis, d...]))
        let (dAttnOut, dg) = gate.backward(attnOut, dy: lastProjection(.o, gate(attnOut), dy: dOut, &gradients))
        tile.pace.finish([dAttnOut, dg])
        let (dq, dk, dv) = attentionBackward(q: forward.m1[.ellipsis, ..<d], dAttnOut: dAttnOut)
        let dqg = concatenated([dq, dg].map { $0.reshaped([length, heads, d]) }, axis: -1)
            .reshaped([length, 2 * heads * d])
        tile.pace.finish([dqg])
        return [.q: dqg, .k: dk, .v: dv]
    }
}
