import MLX
import MeSPBundle

/// The forward pass by formulas: in training on a CPU, and of blocks without a function; in generation on every device.
extension Block: BlockForward {
    /// The block with the machine of a forward pass.
    private var forward: Block {
        var block = self
        block.machine = machine.forward
        return block
    }

    /// y of tokens that may follow others.
    ///
    /// - Parameters:
    ///   - x: `[n, hidden]`, the tokens of one or several sequences, one sequence below the other
    ///   - sequences: the rows of each
    ///   - states: for each the state after the tokens before, replaced by that after these
    /// - Returns: y `[n, hidden]`
    func output(_ x: MLXArray, sequences: [Range<Int>], _ states: inout [MixerState]) -> MLXArray {
        let xMid = machine.part(sum(x, weights.mixerPostNorm, forward.mixer(x, sequences, &states).out))
        return y(xMid, forward.mlp(weights.mlpNorm(xMid)), beside.perLayer)
    }

    package func output(_ x: MLXArray) -> MLXArray {
        // x_mid, and then y of some tokens after the other.
        var y = {
            let x = x.squeezed(axis: 0)
            let segments = segments(x.dim(0))
            guard segments.isEmpty else { return bySegments(x, segments, keeps: false).xMid }
            var states = start(x)
            return machine.phase(sum(x, weights.mixerPostNorm, forward.mixer(x, records(x.dim(0)), &states).out))
        }()
        machine.replaceByTokens(&y) { tokens, xMid in
            self.y(xMid, forward.mlp(weights.mlpNorm(xMid)), beside.perLayer?[tokens])
        }
        return y.expandedDimensions(axis: 0)
    }

    package func intermediates(_ x: MLXArray) -> Intermediates {
        var intermediates = toXMid(x.squeezed(axis: 0))
        if weights.mlpPostNorm != nil {
            var mlpOut = intermediates.xMid
            machine.replaceByTokens(&mlpOut) { _, xMid in forward.mlp(weights.mlpNorm(xMid)).asType(x.dtype) }
            intermediates.mlpOut = mlpOut
        }
        return intermediates
    }

    package func outputs(_ x: MLXArray) -> BlockOutputs {
        var intermediates = toXMid(x.squeezed(axis: 0))
        let mlpIn = weights.mlpNorm(intermediates.xMid)
        let mlpOut: MLXArray
        (mlpOut, intermediates.gate, intermediates.up) = {
            let inner = weights.shape.mlp.modules.isEmpty ? nil : gatedMLP.inner(mlpIn)
            return machine.part(forward.mlp(mlpIn, inner), inner?.gate.asType(x.dtype), inner?.up.asType(x.dtype))
        }()
        let y = machine.phase(y(intermediates.xMid, mlpOut, beside.perLayer).expandedDimensions(axis: 0))
        if weights.mlpPostNorm != nil { intermediates.mlpOut = machine.part(mlpOut.asType(x.dtype)) }
        return BlockOutputs(y: y, mixerIn: weights.mixerNorm(x).squeezed(axis: 0), intermediates: intermediates)
    }

    /// The first half of the block; x `[T, hidden]`.
    private func toXMid(_ x: MLXArray) -> Intermediates {
        let segments = segments(x.dim(0))
        guard segments.isEmpty else { return bySegments(x, segments, keeps: true) }
        // The mixer's output goes as soon as x_mid is there.
        return machine.phase(
            {
                var states = start(x)
                let mixed = forward.mixer(x, records(x.dim(0)), &states)
                return Intermediates(
                    m1: mixed.m1, m2: mixed.m2, m3: mixed.m3, mixed: mixed.mixed,
                    xMid: sum(x, weights.mixerPostNorm, mixed.out),
                    mixerOut: weights.mixerPostNorm == nil ? nil : mixed.out.asType(x.dtype))
            }())
    }

    /// The first half of the block by segments of a long sequence, so that no array of the mixer's own features is as long as the sequence
    /// but keys, values and mixed of attention.
    ///
    /// - Parameter keeps: whether what the backward pass reads is kept.
    private func bySegments(_ x: MLXArray, _ rows: [Range<Int>], keeps: Bool) -> Intermediates {
        let start = MixerState(weights, dtype: x.dtype)
        var states = [start]
        var segments = [Intermediates.Segment]()
        var (xMid, mixerOut) = (MLXArray.zeros(x.shape, dtype: x.dtype), MLXArray.zeros(x.shape, dtype: x.dtype))
        for rows in rows {
            // Attention's, which holds all keys so far, is the same for all segments: that after the last.
            let before = start.isRecurrent ? states[0] : start
            let x = x[rows]
            let mixed = forward.mixer(x, [0..<rows.count], &states)
            machine.part(states[0].arrays)
            replace(rows, of: &xMid, by: sum(x, weights.mixerPostNorm, mixed.out))
            Memory.clearCache()
            guard keeps else { continue }
            if weights.mixerPostNorm != nil { replace(rows, of: &mixerOut, by: mixed.out.asType(x.dtype)) }
            let kept = before.isRecurrent ? nil : machine.part(mixed.mixed)
            segments.append(.init(rows: rows, state: before, mixed: kept))
        }
        if !states[0].isRecurrent { for i in segments.indices { segments[i].state = states[0] } }
        let none = MLXArray.zeros([0])
        return Intermediates(
            m1: none, m2: none, m3: none, mixed: none, xMid: xMid,
            mixerOut: weights.mixerPostNorm == nil ? nil : mixerOut, segments: segments)
    }

    /// A segment's intermediates again, from its rows of x.
    func again(_ segment: Intermediates.Segment, _ x: MLXArray, mixerOut: MLXArray?) -> Intermediates {
        var again: Intermediates
        if case .attention(let mixer) = weights.shape.mixer, let kept = segment.mixed {
            let (m1, k, v) = forward.projections(mixer, weights.mixerNorm(x))
            again = Intermediates(m1: m1, m2: k, m3: v, mixed: kept, xMid: x)
        } else {
            var states = [segment.state]
            let mixed = forward.mixer(x, [0..<x.dim(0)], &states)
            again = Intermediates(m1: mixed.m1, m2: mixed.m2, m3: mixed.m3, mixed: mixed.mixed, xMid: x)
        }
        (again.segment, again.mixerOut) = (segment, mixerOut)
        machine.part(again.m1, again.m2, again.m3, again.mixed)
        return again
    }

    /// The states before each record of a whole sequence x `[T, hidden]`, which has a start of its own.
    private func start(_ x: MLXArray) -> [MixerState] {
        records(x.dim(0)).map { _ in MixerState(weights, dtype: x.dtype) }
    }

    /// The block's output from the MLP's; in x_mid's dtype.
    private func y(_ xMid: MLXArray, _ mlpOut: MLXArray, _ p: MLXArray?) -> MLXArray {
        let h = wideSum(xMid, weights.mlpPostNorm, mlpOut)
        return (p.map { perLayer(h, p: $0) } ?? h).asType(xMid.dtype)
    }

    /// x + norm(output), where there is a norm of the output as it would be stored; in x's dtype.
    private func sum(_ x: MLXArray, _ norm: RMSNorm?, _ output: MLXArray) -> MLXArray {
        wideSum(x, norm, output).asType(x.dtype)
    }

    /// The same in float32.
    private func wideSum(_ x: MLXArray, _ norm: RMSNorm?, _ output: MLXArray) -> MLXArray {
        x + (norm.map { $0(output.asType(x.dtype).asType(.float32)) } ?? output)
    }

    // MARK: - The mixer

    struct Mixed {
        /// As `Intermediates` has them.
        let m1, m2, m3, mixed: MLXArray
        /// The mixer's output `[n, hidden]`, in float32.
        let out: MLXArray
    }

    /// The mixer of RMSNorm(x); the parameters as those of `output`.
    private func mixer(_ x: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]) -> Mixed {
        let mixerIn = weights.mixerNorm(x)
        return switch weights.shape.mixer {
        case .attention(let mixer): attention(mixer, mixerIn, sequences, &states)
        case .gatedDeltaNet(let mixer): gatedDeltaNet(mixer, mixerIn, sequences, &states)
        case .shortConvolution: shortConvolution(mixerIn, sequences, &states)
        case .mamba2(let mixer): mamba2(mixer, mixerIn, sequences, &states)
        }
    }

    /// A projection of mixer_in as it would be stored.
    func projected(_ name: Projection, _ mixerIn: MLXArray) -> MLXArray {
        machine.part(projection(name)(mixerIn, machine: machine).asType(mixerIn.dtype))
    }

    /// The results of `mixed` for each sequence's rows and state, one below the other.
    func eachSequence(
        _ sequences: [Range<Int>], _ states: inout [MixerState],
        mixed: (_ rows: Range<Int>, _ state: inout MixerState) -> MLXArray
    ) -> MLXArray {
        concatenated(zip(sequences, states.indices).map { rows, index in mixed(rows, &states[index]) })
    }

    // MARK: - The MLP

    /// The gated MLP and the mixture of experts, or the one that there is, in float32.
    ///
    /// - Parameter inner: gate and up of the MLP, where they are there.
    private func mlp(_ mlpIn: MLXArray, _ inner: (gate: MLXArray, up: MLXArray)? = nil) -> MLXArray {
        let mixed = weights.shape.mlp.experts.map { mixture($0, mlpIn) }
        if let mixed, weights.shape.mlp.modules.isEmpty { return mixed }
        let mlp = gatedMLP
        func output(addedTo sum: MLXArray?) -> MLXArray {
            inner.map { mlp.output($0.gate, $0.up, addedTo: sum) } ?? mlp(mlpIn, addedTo: sum, machine: machine)
        }
        guard let mixed, let g = weights.mlpGate else { return output(addedTo: mixed) }
        return mixed + factor(g, mlpIn) * output(addedTo: nil)
    }

    /// The gated MLP, where there is one.
    var gatedMLP: GatedMLP {
        GatedMLP(
            gate: projection(.gate), up: projection(.up), down: projection(.down), names: (.gate, .up, .down),
            activation: weights.activation)
    }

    /// w = σ(x gᵀ) `[n, 1]`, by which the output of the MLP beside the experts is multiplied.
    func factor(_ g: QuantizedMatrix, _ mlpIn: MLXArray) -> MLXArray { sigmoid(g.apply(mlpIn.asType(.float32))) }
}
