import MLX
import MeSPAdapters
import MeSPBundle

/// The attention mixer:  x_mid − x = o(attention(q, k, v)), or o(attention(q, k, v) ∘ σ(g)) with gates g. In q, the gate of each head follows the
/// head's query.
extension Block {
    func attention(
        _ mixer: AttentionMixer, _ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]
    ) -> MixerResult {
        let (attention, d, dtype) = (weights.attention(mixer), mixer.headDim, mixerIn.dtype)
        if mixer.keysOf != nil { return attentionOverShared(mixer, mixerIn, sequences, &states) }
        if sequences.allSatisfy({ $0.count == 1 }), states.allSatisfy({ $0.count > 0 }) {
            return attentionOfOne(mixer, attention, mixerIn, &states)
        }
        let (qAndGate, k, v) = projectQKV(mixer, mixerIn)
        let gate = mixer.gateDim > 0 ? qAndGate[.ellipsis, d...] : nil
        let q = mixer.gateDim > 0 ? qAndGate[.ellipsis, ..<d] : qAndGate
        let attnOut = eachSequence(sequences, &states) { rows, state in
            let place = Positions.from(state.count)
            let cache = state.append(
                keys: attention.key(k[0..., rows], at: place).asType(dtype),
                values: attention.value(v[0..., rows]).asType(dtype))
            return tiled(attention)(
                q: attention.query(q[0..., rows], at: place), k: cache.keys[0..., 0..<cache.count],
                v: cache.values[0..., 0..<cache.count]
            ).asType(dtype)
        }
        let gated = gate.map { OutputGate(g: $0.swappedAxes(0, 1))(attnOut) } ?? attnOut
        return (.attention(q: qAndGate, k: k, v: v, attnOut: attnOut), linear(.o)(gated))
    }

    func projectQKV(_ mixer: AttentionMixer, _ mixerIn: MLXArray) -> (q: MLXArray, k: MLXArray, v: MLXArray) {
        let (heads, keyHeads) = (mixer.numAttentionHeads, mixer.numKeyValueHeads)
        let q = project(.q, mixerIn).byHead(heads)
        return (
            mixer.headGate ? concatenated([q, project(.g, mixerIn).byHead(heads)], axis: -1) : q,
            project(.k, mixerIn).byHead(keyHeads), project(.v, mixerIn).byHead(keyHeads)
        )
    }

    private func attentionOfOne(
        _ mixer: AttentionMixer, _ attention: Attention, _ mixerIn: MLXArray, _ states: inout [MixerState]
    ) -> MixerResult {
        let (n, d, dtype) = (mixerIn.dim(0), mixer.headDim, mixerIn.dtype)
        func heads(_ p: Projection, _ count: Int) -> MLXArray { project(p, mixerIn).reshaped([n, count, 1, -1]) }
        let (qAndGate, k, v) = (
            heads(.q, mixer.numAttentionHeads), heads(.k, mixer.numKeyValueHeads), heads(.v, mixer.numKeyValueHeads)
        )
        let place = Positions.each(.of(states.map { Int32($0.count) }))
        let q = attention.query(mixer.outputGate ? qAndGate[.ellipsis, ..<d] : qAndGate, at: place)
        let (kHat, vHat) = (attention.key(k, at: place).asType(dtype), attention.value(v).asType(dtype))
        let parts = states.indices.map { i in
            func own(_ x: MLXArray) -> MLXArray { (n == 1 ? x : x[i..<i + 1]).squeezed(axis: 0) }
            return tiled(attention)(q: own(q), states[i].append(keys: own(kHat), values: own(vHat)))
        }
        let attnOut = concatenated(parts).asType(dtype)
        let gate: MLXArray? =
            mixer.outputGate
            ? qAndGate[.ellipsis, d...].squeezed(axis: 2)
            : mixer.headGate ? heads(.g, mixer.numAttentionHeads).squeezed(axis: 2) : nil
        let gated = gate.map { OutputGate(g: $0)(attnOut) } ?? attnOut
        return (.attention(q: qAndGate, k: k, v: v, attnOut: attnOut), linear(.o)(gated))
    }

    private func attentionOverShared(
        _ mixer: AttentionMixer, _ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]
    ) -> MixerResult {
        let attention = weights.attention(mixer)
        let q = project(.q, mixerIn).byHead(mixer.numAttentionHeads)
        let caches = shared.map { shared in sequences.map { shared[$0] } } ?? sharedStates
        precondition(caches.count == sequences.count, "the keys of another block are missing")
        let parts = zip(sequences, caches).map { rows, cache in
            let start = shared == nil ? cache.count - rows.count : rows.lowerBound
            return tiled(attention)(
                q: attention.query(q[0..., rows], at: .from(start)), k: cache.keys[0..., 0..<cache.count],
                v: cache.values[0..., 0..<cache.count]
            ).asType(q.dtype)
        }
        for (index, cache) in caches.enumerated() { states[index] = .shared(count: cache.count) }
        let attnOut = concatenated(parts)
        let keys = shared ?? caches[0]
        return (
            .attention(q: q, k: keys.keys, v: keys.values, attnOut: attnOut),
            linear(.o)(attnOut)
        )
    }

    /// Returns the keys and values of a whole sequence x `[1, T, hidden]` in the bundle's dtype, for other blocks that attend to them. In a sequence
    /// of packed records, positions count from the start of the sequence, not of the record. This does not change the scores, which depend only on
    /// differences of positions.
    func keysAndValues(_ x: MLXArray) -> MixerState.KeyValues {
        guard case .attention(let mixer) = weights.shape.mixer else { preconditionFailure("no attention") }
        let (attention, x) = (weights.attention(mixer), x.squeezed(axis: 0))
        let mixerIn = weights.mixerNorm(x)
        return MixerState.KeyValues(
            keys: attention.key(project(.k, mixerIn).byHead(mixer.numKeyValueHeads), at: .from(0)).asType(x.dtype),
            values: attention.value(project(.v, mixerIn).byHead(mixer.numKeyValueHeads)).asType(x.dtype))
    }

    func attentionBackward(
        _ mixer: AttentionMixer, _ intermediates: consuming Intermediates, dOut: MLXArray,
        _ carried: inout CarriedGradients,
        _ gradients: inout LoRAGradients, dShared: inout MixerState.KeyValues?
    ) -> ProjectionGradients {
        let segment = intermediates.segment
        let (length, heads, headDim) = (dOut.dim(0), mixer.numAttentionHeads, mixer.headDim)
        let (qAndGate, k, v, _) = intermediates.attention
        // attn_out is freed here, as attention's derivative does not read it.
        let (dAttnOut, dg) = attentionOutput(mixer, consume intermediates, dOut: dOut, &gradients)
        let (q, dO) = (
            mixer.gateDim > 0 ? qAndGate[.ellipsis, ..<headDim] : qAndGate,
            dAttnOut.reshaped([length, heads, headDim]).swappedAxes(0, 1)
        )
        let (attention, sum) = (tiled(weights.attention(mixer)), dShared)
        func backward(_ rows: Range<Int>) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
            var carried: MixerState.KeyValues?
            return attention.backward(
                q: q[0..., rows], k: k[0..., rows], v: v[0..., rows], dOut: dO[0..., rows],
                start: rows.lowerBound, addedTo: sum?[rows], carried: &carried)
        }
        if mixer.keysOf != nil {
            let parts = records(length).map(backward)
            let d = MixerState.KeyValues(
                keys: concatenated(parts.map(\.dk), axis: 1), values: concatenated(parts.map(\.dv), axis: 1))
            dShared = d
            return [.q: concatenated(parts.map(\.dq))]
        }
        dShared = nil
        var d: (dq: MLXArray, dk: MLXArray, dv: MLXArray)
        if let segment, case .attention(let cache) = segment.state {
            d = attention.backward(
                q: q, k: k, v: v, dOut: dO, start: segment.rows.lowerBound,
                seen: cache[0..<segment.rows.upperBound], carried: &carried.keyValues)
        } else {
            let parts = eachRecord(records(length)) { rows in
                let d = backward(rows)
                return [d.dq, d.dk, d.dv]
            }
            d = (parts[0], parts[1], parts[2])
        }
        guard let dg else { return [.q: d.dq, .k: d.dk, .v: d.dv] }
        guard mixer.outputGate else { return [.q: d.dq, .k: d.dk, .v: d.dv, .g: dg.squeezed(axis: -1)] }
        let dqg = concatenated([d.dq.reshaped(dg.shape), dg], axis: -1).reshaped([length, -1])
        return [.q: dqg, .k: d.dk, .v: d.dv]
    }

    private func attentionOutput(
        _ mixer: AttentionMixer, _ intermediates: consuming Intermediates, dOut: MLXArray,
        _ gradients: inout LoRAGradients
    ) -> (MLXArray, MLXArray?) {
        let attnOut = intermediates.attention.attnOut.asType(.float32)
        guard mixer.gateDim > 0 else { return (outputProjectionBackward(.o, attnOut, dy: dOut, &gradients), nil) }
        let gate = OutputGate(g: intermediates.attention.q[.ellipsis, mixer.headDim...].swappedAxes(0, 1))
        return tiled(gate).backward(
            attnOut, dy: outputProjectionBackward(.o, gate(attnOut), dy: dOut, &gradients))
    }
}

extension MLXArray {
    fileprivate func byHead(_ heads: Int) -> MLXArray { reshaped([dim(0), heads, -1]).swappedAxes(0, 1) }
}
