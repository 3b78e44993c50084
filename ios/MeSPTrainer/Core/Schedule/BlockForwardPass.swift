import MLX
import MeSPBundle

/// The forward pass over some tokens, or some segments of a sequence, at a time.
extension Block: BlockForward {
    var inForwardPass: Block {
        var block = self
        block.schedule = schedule.forForwardPass
        return block
    }

    /// Returns y of some tokens, which may follow earlier tokens.
    ///
    /// - Parameters:
    ///   - x: the tokens of one or several sequences, concatenated, `[n, hidden]`
    func output(_ x: MLXArray, sequences: [Range<Int>], _ states: inout [MixerState]) -> MLXArray {
        let xMid = schedule.part(sum(x, weights.mixerPostNorm, inForwardPass.mixer(x, sequences, &states).out))
        return addMLP(to: xMid, inForwardPass.mlp(weights.mlpNorm(xMid)), perLayerEmbeddings)
    }

    package func output(_ x: MLXArray) -> MLXArray {
        // `y` holds x_mid at first. The rows of y then replace the rows of x_mid, some tokens at a time.
        var y = x.squeezed(axis: 0)
        let cut = segments(y.dim(0))
        if cut.isEmpty {
            var states = start(y)
            y = schedule.phase(sum(y, weights.mixerPostNorm, inForwardPass.mixer(y, records(y.dim(0)), &states).out))
        } else {
            y = bySegments(y, cut, keeps: false).xMid
        }
        schedule.replaceByTokens(&y) { tokens, xMid in
            let block = from(tokens.lowerBound)
            return block.addMLP(to: xMid, block.inForwardPass.mlp(weights.mlpNorm(xMid)), perLayerEmbeddings?[tokens])
        }
        return y.expandedDimensions(axis: 0)
    }

    package func intermediates(_ x: MLXArray) -> Intermediates {
        var intermediates = toXMid(x.squeezed(axis: 0))
        if weights.mlpPostNorm != nil {
            var mlpOut = intermediates.xMid
            schedule.replaceByTokens(&mlpOut) { tokens, xMid in
                from(tokens.lowerBound).inForwardPass.mlp(weights.mlpNorm(xMid)).asType(x.dtype)
            }
            intermediates.mlpOut = mlpOut
        }
        return intermediates
    }

    package func outputs(_ x: MLXArray) -> BlockOutputs {
        var intermediates = toXMid(x.squeezed(axis: 0))
        let mlpOut: MLXArray
        (mlpOut, intermediates.gate, intermediates.up) = mlpWithInner(weights.mlpNorm(intermediates.xMid))
        let y = schedule.phase(addMLP(to: intermediates.xMid, mlpOut, perLayerEmbeddings).expandedDimensions(axis: 0))
        if weights.mlpPostNorm != nil { intermediates.mlpOut = schedule.part(mlpOut.asType(x.dtype)) }
        return BlockOutputs(y: y, mixerIn: weights.mixerNorm(x).squeezed(axis: 0), intermediates: intermediates)
    }

    private func toXMid(_ x: MLXArray) -> Intermediates {
        let cut = segments(x.dim(0))
        guard cut.isEmpty else { return bySegments(x, cut, keeps: true) }
        // Without a post-norm, the mixer's output is freed as soon as x_mid is computed.
        return schedule.phase(
            {
                var states = start(x)
                let mixer = inForwardPass.mixer(x, records(x.dim(0)), &states)
                return Intermediates(
                    mixer: mixer.intermediates, xMid: sum(x, weights.mixerPostNorm, mixer.out),
                    mixerOut: weights.mixerPostNorm == nil ? nil : mixer.out.asType(x.dtype))
            }())
    }

    private func bySegments(_ x: MLXArray, _ rows: [Range<Int>], keeps: Bool) -> Intermediates {
        let start = MixerState(weights, dtype: x.dtype)
        var states = [start]
        var segments = [Intermediates.Segment]()
        var (xMid, mixerOut) = (MLXArray.zeros(x.shape, dtype: x.dtype), MLXArray.zeros(x.shape, dtype: x.dtype))
        for rows in rows {
            // A recurrent mixer's segment keeps the state before the segment. Attention's segments get the state after the last segment, with the
            // keys of all positions.
            let before = start.isRecurrent ? states[0] : start
            let x = x[rows]
            let mixer = from(rows.lowerBound).inForwardPass.mixer(x, [0..<rows.count], &states)
            schedule.part(states[0].arrays)
            replace(rows, of: &xMid, by: sum(x, weights.mixerPostNorm, mixer.out))
            Memory.clearCache()
            guard keeps else { continue }
            if weights.mixerPostNorm != nil { replace(rows, of: &mixerOut, by: mixer.out.asType(x.dtype)) }
            var attnOut: MLXArray?
            if case .attention(_, _, _, let out) = mixer.intermediates { attnOut = schedule.part(out) }
            segments.append(.init(rows: rows, state: before, attnOut: attnOut))
        }
        if !states[0].isRecurrent { for i in segments.indices { segments[i].state = states[0] } }
        return Intermediates(
            xMid: xMid,
            mixerOut: weights.mixerPostNorm == nil ? nil : mixerOut, segments: segments)
    }

    /// Recomputes a segment's intermediates from its rows of x, except attention's output, which the segment keeps.
    func recompute(_ segment: Intermediates.Segment, _ x: MLXArray, mixerOut: MLXArray?) -> Intermediates {
        let recomputed: MixerIntermediates
        let block = from(segment.rows.lowerBound).inForwardPass
        if case .attention(let mixer) = weights.shape.mixer, let attnOut = segment.attnOut {
            let (q, k, v) = block.projectQKV(mixer, weights.mixerNorm(x))
            recomputed = .attention(q: q, k: k, v: v, attnOut: attnOut)
        } else {
            var states = [segment.state]
            recomputed = block.mixer(x, [0..<x.dim(0)], &states).intermediates
        }
        schedule.part(recomputed)
        return Intermediates(mixer: recomputed, xMid: x, mixerOut: mixerOut, segment: segment)
    }

    private func start(_ x: MLXArray) -> [MixerState] {
        records(x.dim(0)).map { _ in MixerState(weights, dtype: x.dtype) }
    }

    /// Returns the output of `mlp`, and the MLP's gate and up in the dtype of mlp_in. With DoRA, or if there is no MLP, gate and up are nil.
    private func mlpWithInner(_ mlpIn: MLXArray) -> (out: MLXArray, gate: MLXArray?, up: MLXArray?) {
        let shape = weights.shape.mlp
        let hasInner = !shape.modules.isEmpty && !layout.hasMagnitudes
        // With experts, `mixtureOfExperts` splits the tokens.
        let tokens = tiles(of: mlpIn.dim(0), size: shape.experts == nil ? schedule.mlpTileTokens : .max)
        var inputs = [mlpIn]
        let parts = schedule.reduce(tokens, [[MLXArray]](), reading: &inputs) { parts, tokens, inputs in
            let (x, block) = (inputs[0][tokens], from(tokens.lowerBound))
            let inner = hasInner ? block.gatedMLP.inner(x) : nil
            parts.append(
                [block.inForwardPass.mlp(x, inner)] + [inner?.gate, inner?.up].compactMap { $0?.asType(mlpIn.dtype) })
        }
        func whole(_ index: Int) -> MLXArray { concatenated(parts.map { $0[index] }) }
        return hasInner ? (whole(0), whole(1), whole(2)) : (whole(0), nil, nil)
    }

    /// Returns the segments of a long sequence, which the mixer processes one at a time. Returns an empty list if the mixer processes the sequence at
    /// once.
    private func segments(_ length: Int) -> [Range<Int>] {
        guard records == nil, length > schedule.mixerTokens, weights.shape.mixer.goesBySegments else { return [] }
        return tiles(of: length, size: schedule.mixerTokens)
    }
}

extension Mixer {
    var goesBySegments: Bool {
        switch self {
        case .attention, .gatedDeltaNet: true
        case .shortConvolution, .mamba2: false
        }
    }
}
