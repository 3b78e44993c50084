import MLX

/// x_mid − x = o(attention(q, k, v)), or o(attention(q, k, v) ∘ σ(g)) with gates g, which lie behind the queries in m₁.
extension Block {
    func attention(
        _ mixer: AttentionMixer, _ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]
    ) -> Mixed {
        let (attention, d, dtype) = (weights.attention(mixer), mixer.headDim, mixerIn.dtype)
        if attention.servesOne, sequences.allSatisfy({ $0.count == 1 }) {
            return attentionOfOne(mixer, attention, mixerIn, &states)
        }
        let (m1, k, v) = projections(mixer, mixerIn)
        let (ofQ, gates): (MLXArray, MLXArray?) = mixer.gateDim > 0 ? (m1, m1[.ellipsis, d...]) : (m1, nil)
        let q = mixer.gateDim > 0 ? ofQ[.ellipsis, ..<d] : ofQ
        let attnOut = eachSequence(sequences, &states) { rows, state in
            guard case .attention(var cache) = state else { preconditionFailure("another mixer's state") }
            let start = state.count
            cache.append(attention.key(k[0..., rows], start: start).asType(dtype), v[0..., rows])
            state = .attention(cache)
            return attention(
                q: attention.query(q[0..., rows], start: start), k: cache.keys[0..., 0..<cache.count],
                v: cache.values[0..., 0..<cache.count], tile: tile.attention
            ).asType(dtype)
        }
        let taken = gates.map { OutputGate(g: $0.swappedAxes(0, 1))(attnOut) } ?? attnOut
        return Mixed(m1: m1, m2: k, m3: v, mixed: attnOut, out: projection(.o)(taken, tile: tile.projection))
    }

    /// m₁ (q, behind each head its gate if it has one), k and v, `[heads, n, …]`.
    func projections(_ mixer: AttentionMixer, _ mixerIn: MLXArray) -> (m1: MLXArray, k: MLXArray, v: MLXArray) {
        func heads(_ p: Projection, _ count: Int) -> MLXArray {
            projected(p, mixerIn).reshaped([mixerIn.dim(0), count, -1]).swappedAxes(0, 1)
        }
        let q = heads(.q, mixer.numAttentionHeads)
        let m1 = mixer.headGate ? concatenated([q, heads(.g, mixer.numAttentionHeads)], axis: -1) : q
        return (m1, heads(.k, mixer.numKeyValueHeads), heads(.v, mixer.numKeyValueHeads))
    }

    /// The same for one token of each sequence, in fewer operations, which are most of the time of so few tokens.
    private func attentionOfOne(
        _ mixer: AttentionMixer, _ attention: Attention, _ mixerIn: MLXArray, _ states: inout [MixerState]
    ) -> Mixed {
        let (n, d, dtype) = (mixerIn.dim(0), mixer.headDim, mixerIn.dtype)
        func heads(_ p: Projection, _ count: Int) -> MLXArray { projected(p, mixerIn).reshaped([n, count, 1, -1]) }
        let (ofQ, k, v) = (
            heads(.q, mixer.numAttentionHeads), heads(.k, mixer.numKeyValueHeads), heads(.v, mixer.numKeyValueHeads)
        )
        let positions = MLXArray(states.map { Int32($0.count) })
        let q = attention.query(mixer.outputGate ? ofQ[.ellipsis, ..<d] : ofQ, positions: positions)
        let kHat = attention.key(k, positions: positions).asType(dtype)
        let parts = states.indices.map { i in
            guard case .attention(var cache) = states[i] else { preconditionFailure("another mixer's state") }
            cache.append(kHat[i..<i + 1].squeezed(axis: 0), v[i..<i + 1].squeezed(axis: 0))
            states[i] = .attention(cache)
            return attention.ofOne(q: q[i..<i + 1], cache)
        }
        let attnOut = concatenated(parts).reshaped([n, -1]).asType(dtype)
        let gates: MLXArray? =
            mixer.outputGate
            ? ofQ[.ellipsis, d...].squeezed(axis: 2)
            : mixer.headGate ? heads(.g, mixer.numAttentionHeads).squeezed(axis: 2) : nil
        let taken = gates.map { OutputGate(g: $0)(attnOut) } ?? attnOut
        return Mixed(m1: ofQ, m2: k, m3: v, mixed: attnOut, out: projection(.o)(taken, tile: tile.projection))
    }

    /// The derivative of o(attention(q, k, v)), or of o(attention(q, k, v) ∘ σ(g)), from that of its output `[T, hidden]`.
    func attentionBackward(
        _ mixer: AttentionMixer, _ forward: consuming Intermediates, dOut: MLXArray, _ behind: inout Behind,
        _ gradients: inout LoRAGradients
    ) -> Projected {
        let forwardSegment = forward.segment
        let (length, heads, d) = (dOut.dim(0), mixer.numAttentionHeads, mixer.headDim)
        let (ofQ, k, v) = (forward.m1, forward.m2, forward.m3)
        // attn_out goes here: attention's derivative does not read it.
        let (dAttnOut, dg) = attentionOutput(mixer, consume forward, dOut: dOut, &gradients)
        let (q, dO) = (
            mixer.gateDim > 0 ? ofQ[.ellipsis, ..<d] : ofQ, dAttnOut.reshaped([length, heads, d]).swappedAxes(0, 1)
        )
        let attention = weights.attention(mixer)
        let parts: [MLXArray]
        if let segment = forwardSegment, case .attention(let cache) = segment.state {
            let d = attention.backward(
                q: q, k: k, cache.keys[0..., 0..<segment.rows.upperBound],
                cache.values[0..., 0..<segment.rows.upperBound],
                start: segment.rows.lowerBound, dOut: dO, behind: &behind.keyValues, tile: tile)
            parts = [d.dq, d.dk, d.dv]
        } else {
            parts = eachRecord(records(length)) { rows in
                let d = attention.backward(
                    q: q[0..., rows], k: k[0..., rows], v: v[0..., rows], dOut: dO[0..., rows], tile: tile)
                return [d.dq, d.dk, d.dv]
            }
        }
        let (dq, dk, dv) = (parts[0], parts[1], parts[2])
        guard let dg else { return [.q: dq, .k: dk, .v: dv] }
        guard mixer.outputGate else { return [.q: dq, .k: dk, .v: dv, .g: dg.squeezed(axis: -1)] }
        let dqg = concatenated([dq.reshaped(dg.shape), dg], axis: -1).reshaped([length, 2 * heads * d])
        tile.pace.finish([dqg])
        return [.q: dqg, .k: dk, .v: dv]
    }

    /// The derivative of o(attn_out), or of o(attn_out ∘ σ(g)).
    ///
    /// - Returns: the gradients of attn_out `[T, heads·d]` and of g, as it is; of the latter nil where there is no gate.
    private func attentionOutput(
        _ mixer: AttentionMixer, _ forward: consuming Intermediates, dOut: MLXArray, _ gradients: inout LoRAGradients
    ) -> (MLXArray, MLXArray?) {
        let attnOut = forward.mixed.asType(.float32)
        guard mixer.gateDim > 0 else { return (lastProjection(.o, attnOut, dy: dOut, &gradients), nil) }
        let gate = OutputGate(g: forward.m1[.ellipsis, mixer.headDim...].swappedAxes(0, 1))
        let (dAttnOut, dg) = gate.backward(attnOut, dy: lastProjection(.o, gate(attnOut), dy: dOut, &gradients))
        tile.pace.finish([dAttnOut, dg])
        return (dAttnOut, dg)
    }
}
