import MLX
import MeSPBundle

/// The forward pass by MLX operations, without the bundle's block function. Generation uses it on every device, and training uses it on a CPU.
extension Block: BlockForward {
    private var inForwardPass: Block {
        var block = self
        block.machine = machine.forForwardPass
        return block
    }

    /// Returns y of some tokens, which may follow earlier tokens.
    ///
    /// - Parameters:
    ///   - x: the tokens of one or several sequences, concatenated, `[n, hidden]`
    func output(_ x: MLXArray, sequences: [Range<Int>], _ states: inout [MixerState]) -> MLXArray {
        let xMid = machine.part(sum(x, weights.mixerPostNorm, inForwardPass.mixer(x, sequences, &states).out))
        return addMLP(to: xMid, inForwardPass.mlp(weights.mlpNorm(xMid)), side.perLayer)
    }

    package func output(_ x: MLXArray) -> MLXArray {
        // `y` holds x_mid at first. The rows of y then replace the rows of x_mid, some tokens at a time.
        var y = {
            let x = x.squeezed(axis: 0)
            let cut = segments(x.dim(0))
            guard cut.isEmpty else { return bySegments(x, cut, keeps: false).xMid }
            var states = start(x)
            return machine.phase(sum(x, weights.mixerPostNorm, inForwardPass.mixer(x, records(x.dim(0)), &states).out))
        }()
        machine.replaceByTokens(&y) { tokens, xMid in
            let block = from(tokens.lowerBound)
            return block.addMLP(to: xMid, block.inForwardPass.mlp(weights.mlpNorm(xMid)), side.perLayer?[tokens])
        }
        return y.expandedDimensions(axis: 0)
    }

    package func intermediates(_ x: MLXArray) -> Intermediates {
        var intermediates = toXMid(x.squeezed(axis: 0))
        if weights.mlpPostNorm != nil {
            var mlpOut = intermediates.xMid
            machine.replaceByTokens(&mlpOut) { tokens, xMid in
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
        let y = machine.phase(addMLP(to: intermediates.xMid, mlpOut, side.perLayer).expandedDimensions(axis: 0))
        if weights.mlpPostNorm != nil { intermediates.mlpOut = machine.part(mlpOut.asType(x.dtype)) }
        return BlockOutputs(y: y, mixerIn: weights.mixerNorm(x).squeezed(axis: 0), intermediates: intermediates)
    }

    private func toXMid(_ x: MLXArray) -> Intermediates {
        let cut = segments(x.dim(0))
        guard cut.isEmpty else { return bySegments(x, cut, keeps: true) }
        // Without a post-norm, the mixer's output is freed as soon as x_mid is computed.
        return machine.phase(
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
            machine.part(states[0].arrays)
            replace(rows, of: &xMid, by: sum(x, weights.mixerPostNorm, mixer.out))
            Memory.clearCache()
            guard keeps else { continue }
            if weights.mixerPostNorm != nil { replace(rows, of: &mixerOut, by: mixer.out.asType(x.dtype)) }
            var attnOut: MLXArray?
            if case .attention(_, _, _, let out) = mixer.intermediates { attnOut = machine.part(out) }
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
        machine.part(recomputed)
        return Intermediates(mixer: recomputed, xMid: x, mixerOut: mixerOut, segment: segment)
    }

    private func start(_ x: MLXArray) -> [MixerState] {
        records(x.dim(0)).map { _ in MixerState(weights, dtype: x.dtype) }
    }

    private func addMLP(to xMid: MLXArray, _ mlpOut: MLXArray, _ p: MLXArray?) -> MLXArray {
        let h = sumInFloat32(xMid, weights.mlpPostNorm, mlpOut)
        return (p.map { perLayer(h, p: $0) } ?? h).asType(xMid.dtype)
    }

    private func sum(_ x: MLXArray, _ norm: RMSNorm?, _ output: MLXArray) -> MLXArray {
        sumInFloat32(x, norm, output).asType(x.dtype)
    }

    /// Returns x + norm(output), or x + output without a norm, in float32. The input of the norm is first rounded to x's dtype, because the backward
    /// pass reads it in that dtype.
    private func sumInFloat32(_ x: MLXArray, _ norm: RMSNorm?, _ output: MLXArray) -> MLXArray {
        x + (norm.map { $0(output.asType(x.dtype).asType(.float32)) } ?? output)
    }

    // MARK: - The mixer

    typealias MixerResult = (intermediates: MixerIntermediates, out: MLXArray)

    private func mixer(_ x: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]) -> MixerResult {
        let mixerIn = weights.mixerNorm(x)
        return switch weights.shape.mixer {
        case .attention(let mixer): attention(mixer, mixerIn, sequences, &states)
        case .gatedDeltaNet(let mixer): gatedDeltaNet(mixer, mixerIn, sequences, &states)
        case .shortConvolution: shortConvolution(mixerIn, sequences, &states)
        case .mamba2(let mixer): mamba2(mixer, mixerIn, sequences, &states)
        }
    }

    func project(_ name: Projection, _ mixerIn: MLXArray) -> MLXArray {
        machine.part(linear(name)(mixerIn, machine: machine).asType(mixerIn.dtype))
    }

    func eachSequence(
        _ sequences: [Range<Int>], _ states: inout [MixerState],
        formula: (_ rows: Range<Int>, _ state: inout MixerState) -> MLXArray
    ) -> MLXArray {
        concatenated(zip(sequences, states.indices).map { rows, index in formula(rows, &states[index]) })
    }

    // MARK: - The MLP

    /// Returns the output of the gated MLP or of the mixture of experts, in float32. If the block has both, returns their sum, in which the MLP's
    /// output may be multiplied by `factor`.
    private func mlp(_ mlpIn: MLXArray, _ inner: (gate: MLXArray, up: MLXArray)? = nil) -> MLXArray {
        let mixture = weights.shape.mlp.experts.map { mixtureOfExperts($0, mlpIn) }
        if let mixture, weights.shape.mlp.modules.isEmpty { return mixture }
        let mlp = gatedMLP
        func output(addedTo sum: MLXArray?) -> MLXArray {
            inner.map { mlp.applyDown($0.gate, $0.up, addedTo: sum) } ?? mlp(mlpIn, addedTo: sum, machine: machine)
        }
        guard let mixture, let g = weights.mlpGate else { return output(addedTo: mixture) }
        return mixture + factor(g, mlpIn) * output(addedTo: nil)
    }

    /// Returns the output of `mlp`, and the MLP's gate and up in the dtype of mlp_in. With DoRA, or if there is no MLP, gate and up are nil.
    private func mlpWithInner(_ mlpIn: MLXArray) -> (out: MLXArray, gate: MLXArray?, up: MLXArray?) {
        let shape = weights.shape.mlp
        let hasInner = !shape.modules.isEmpty && !layout.hasMagnitudes
        // With experts, `mixtureOfExperts` splits the tokens.
        let tokens = tiles(of: mlpIn.dim(0), size: shape.experts == nil ? machine.mlpTileTokens : .max)
        var inputs = [mlpIn]
        let parts = machine.reduce(tokens, [[MLXArray]](), reading: &inputs) { parts, tokens, inputs in
            let (x, block) = (inputs[0][tokens], from(tokens.lowerBound))
            let inner = hasInner ? block.gatedMLP.inner(x) : nil
            parts.append(
                [block.inForwardPass.mlp(x, inner)] + [inner?.gate, inner?.up].compactMap { $0?.asType(mlpIn.dtype) })
        }
        func whole(_ index: Int) -> MLXArray { concatenated(parts.map { $0[index] }) }
        return hasInner ? (whole(0), whole(1), whole(2)) : (whole(0), nil, nil)
    }

    var gatedMLP: GatedMLP {
        GatedMLP(
            gate: linear(.gate), up: linear(.up), down: linear(.down), names: (.gate, .up, .down),
            activation: weights.activation)
    }

    /// Returns w = σ(x gᵀ) `[n, 1]`, the factor of the MLP's output in a block that also has experts.
    func factor(_ g: QuantizedMatrix, _ mlpIn: MLXArray) -> MLXArray { sigmoid(g.apply(mlpIn.asType(.float32))) }
}
