import MLX

extension BlockForward {
    /// What a mixer makes of mixer_in.
    struct Mixed {
        /// m₁, m₂, m₃ and mixed, as `Intermediates` has them, but for the first axis.
        let intermediates: [MLXArray]
        /// What is added to x, `[n, hidden]` in float32.
        let out: MLXArray
    }

    /// The mixer's forward pass; parameters as those of `callAsFunction`.
    func mixer(_ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]) -> Mixed {
        switch weights.shape.mixer {
        case .attention(let mixer): attention(mixer, mixerIn, sequences, &states)
        case .gatedDeltaNet(let mixer): gatedDeltaNet(mixer, mixerIn, sequences, &states)
        case .shortConvolution: shortConvolution(mixerIn, sequences, &states)
        }
    }

    private func attention(
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
            intermediates: [queries, k, v, attnOut], out: projection(.o)(taken, tile: tile.projection))
    }

    private func gatedDeltaNet(
        _ mixer: GatedDeltaNetMixer, _ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]
    ) -> Mixed {
        let net = weights.gatedDeltaNet(mixer)
        let (qkv, z, b, a) = (
            projected(.qkv, mixerIn), projected(.z, mixerIn), projected(.b, mixerIn), projected(.a, mixerIn)
        )
        let o = eachSequence(sequences, &states) { rows, state in
            guard case .gatedDeltaNet(var memory, let count) = state else {
                preconditionFailure("another mixer's state")
            }
            let o = net(
                qkv: qkv[rows], b: b[rows], a: a[rows], state: &memory,
                tile: net.tile(length: rows.count, bytes: tile.bytes))
            state = .gatedDeltaNet(memory, count: count + rows.count)
            return o.asType(mixerIn.dtype)
        }
        return Mixed(
            intermediates: [qkv, z, concatenated([b, a], axis: -1), o],
            out: projection(.out)(net.output(o: o, z: z), tile: tile.projection))
    }

    private func shortConvolution(
        _ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]
    ) -> Mixed {
        let convolution = weights.shortConvolution
        let thirds = projected(.in, mixerIn).split(parts: 3, axis: -1)
        let (b, c, u) = (thirds[0], thirds[1], thirds[2])
        let mixed = eachSequence(sequences, &states) { rows, state in
            guard case .shortConvolution(var tail, let count) = state else {
                preconditionFailure("another mixer's state")
            }
            let mixed = convolution(b: b[rows], u: u[rows], tail: &tail)
            state = .shortConvolution(tail: tail, count: count + rows.count)
            return mixed.asType(mixerIn.dtype)
        }
        return Mixed(
            intermediates: [b, c, u, mixed],
            out: projection(.out)(convolution.output(mixed: mixed, c: c), tile: tile.projection))
    }

    /// A projection of mixer_in as it would be stored.
    private func projected(_ name: Projection, _ mixerIn: MLXArray) -> MLXArray {
        projection(name)(mixerIn, tile: tile.projection).asType(mixerIn.dtype)
    }

    /// What `mixed` makes of each sequence's rows with its state, one below the other.
    private func eachSequence(
        _ sequences: [Range<Int>], _ states: inout [MixerState],
        mixed: (_ rows: Range<Int>, _ state: inout MixerState) -> MLXArray
    ) -> MLXArray {
        concatenated(zip(sequences, states.indices).map { rows, index in mixed(rows, &states[index]) })
    }
}
