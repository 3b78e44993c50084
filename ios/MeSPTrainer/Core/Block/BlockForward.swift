import MLX
import MeSPBundle

/// The forward pass, as a CPU trains with it and every device generates.
extension Block: BlockForward {
    /// y of tokens that may follow others.
    ///
    /// - Parameters:
    ///   - x: `[n, hidden]`, the tokens of one or several sequences, one sequence below the other
    ///   - sequences: the rows of each
    ///   - states: for each the state after the tokens before, replaced by that after these
    ///   - keepsStates: whether that is asked for; otherwise it is not evaluated
    ///   - evaluation: of y and the states
    /// - Returns: y `[n, hidden]`
    func output(
        _ x: MLXArray, sequences: [Range<Int>], _ states: inout [MixerState], keepsStates: Bool,
        _ evaluation: Evaluation = .now
    ) -> MLXArray {
        let mixerOut = mixer(weights.mixerNorm(x), sequences, &states).out
        let xMid = sum(x, weights.mixerPostNorm, mixerOut)
        tile.pace.rest([xMid])
        let y = y(xMid, mlp(weights.mlpNorm(xMid)), beside.perLayer)
        // y needs the keys and values of attention.
        let kept = keepsStates ? states.filter { $0.isRecurrent }.flatMap(\.arrays) : []
        let results = [y] + kept
        switch evaluation {
        case .now: eval(results)
        case .begun: asyncEval(results)
        case .later: break
        }
        tile.pace.rest(results)
        return y
    }

    /// The time at which a block's results are evaluated: before it returns, while the next block is called, or when they are read.
    enum Evaluation { case now, begun, later }

    package func output(_ x: MLXArray) -> MLXArray {
        // x_mid, and then y of some tokens after the other.
        var y = {
            let x = x.squeezed(axis: 0)
            let segments = segments(x.dim(0))
            guard segments.isEmpty else { return bySegments(x, segments, keeps: false).xMid }
            let xMid = sum(x, weights.mixerPostNorm, mixed(x).out)
            submit([xMid])
            return xMid
        }()
        for rows in tiles(of: y.dim(0), size: tile.mlpTokens) {
            replace(rows, of: &y, by: output(xMid: y[rows], beside.perLayer?[rows]))
            if rows.count < y.dim(0) { Memory.clearCache() }
        }
        return y.expandedDimensions(axis: 0)
    }

    /// y of some tokens, evaluated, from x_mid and what is beside it.
    private func output(xMid: MLXArray, _ perLayer: MLXArray?) -> MLXArray {
        let y = y(xMid, mlp(weights.mlpNorm(xMid)), perLayer)
        eval(y)
        return y
    }

    /// Evaluated.
    package func intermediates(_ x: MLXArray) -> Intermediates {
        var intermediates = toXMid(x.squeezed(axis: 0))
        if weights.mlpPostNorm != nil {
            let xMid = intermediates.xMid
            var mlpOut = MLXArray.zeros(xMid.shape, dtype: x.dtype)
            for rows in tiles(of: xMid.dim(0), size: tile.mlpTokens) {
                replace(rows, of: &mlpOut, by: stored(mlp(weights.mlpNorm(xMid[rows])), as: x.dtype))
            }
            intermediates.mlpOut = mlpOut
        }
        return intermediates
    }

    /// Evaluated, but for mixer_in.
    package func outputs(_ x: MLXArray) -> BlockOutputs {
        var intermediates = toXMid(x.squeezed(axis: 0))
        let xMid = intermediates.xMid
        let (mlpOut, kept) = mlp(weights.mlpNorm(xMid), keeps: true)
        let y = stored(y(xMid, mlpOut, beside.perLayer).expandedDimensions(axis: 0), as: x.dtype)
        (intermediates.gate, intermediates.up) = (kept?.gate, kept?.up)
        if weights.mlpPostNorm != nil { intermediates.mlpOut = stored(mlpOut, as: x.dtype) }
        return BlockOutputs(y: y, mixerIn: weights.mixerNorm(x).squeezed(axis: 0), intermediates: intermediates)
    }

    /// The first half of the block, evaluated; x `[T, hidden]`.
    private func toXMid(_ x: MLXArray) -> Intermediates {
        let segments = segments(x.dim(0))
        guard segments.isEmpty else { return bySegments(x, segments, keeps: true) }
        // The mixer's output goes as soon as x_mid is there.
        let intermediates = {
            let mixed = mixed(x)
            return Intermediates(
                m1: mixed.m1, m2: mixed.m2, m3: mixed.m3, mixed: mixed.mixed,
                xMid: sum(x, weights.mixerPostNorm, mixed.out),
                mixerOut: weights.mixerPostNorm == nil ? nil : mixed.out.asType(x.dtype))
        }()
        submit(intermediates.arrays)
        return intermediates
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
            let mixed = mixer(weights.mixerNorm(x), [0..<rows.count], &states)
            eval(states[0].arrays)
            replace(rows, of: &xMid, by: sum(x, weights.mixerPostNorm, mixed.out))
            Memory.clearCache()
            guard keeps else { continue }
            if weights.mixerPostNorm != nil { replace(rows, of: &mixerOut, by: stored(mixed.out, as: x.dtype)) }
            let kept = before.isRecurrent ? nil : stored(mixed.mixed, as: x.dtype)
            segments.append(.init(rows: rows, state: before, mixed: kept))
        }
        if !states[0].isRecurrent { for i in segments.indices { segments[i].state = states[0] } }
        let none = MLXArray.zeros([0])
        return Intermediates(
            m1: none, m2: none, m3: none, mixed: none, xMid: xMid,
            mixerOut: weights.mixerPostNorm == nil ? nil : mixerOut, segments: segments)
    }

    /// A segment's intermediates again, evaluated, from its rows of x.
    func again(_ segment: Intermediates.Segment, _ x: MLXArray, mixerOut: MLXArray?) -> Intermediates {
        let mixerIn = weights.mixerNorm(x)
        var again: Intermediates
        if case .attention(let mixer) = weights.shape.mixer, let kept = segment.mixed {
            let (m1, k, v) = projections(mixer, mixerIn)
            again = Intermediates(m1: m1, m2: k, m3: v, mixed: kept, xMid: x)
        } else {
            var states = [segment.state]
            let mixed = mixer(mixerIn, [0..<x.dim(0)], &states)
            again = Intermediates(m1: mixed.m1, m2: mixed.m2, m3: mixed.m3, mixed: mixed.mixed, xMid: x)
        }
        (again.segment, again.mixerOut) = (segment, mixerOut)
        eval([again.m1, again.m2, again.m3, again.mixed])
        return again
    }

    /// The mixer over a whole sequence x `[T, hidden]`, each record of it from its own start.
    private func mixed(_ x: MLXArray) -> Mixed {
        let records = records(x.dim(0))
        var states = records.map { _ in MixerState(weights, dtype: x.dtype) }
        return mixer(weights.mixerNorm(x), records, &states)
    }

    private func stored(_ array: MLXArray, as dtype: DType) -> MLXArray {
        let stored = array.asType(dtype)
        eval(stored)
        return stored
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

    /// - Parameter mixerIn: `[n, hidden]`; the others as those of `output`
    private func mixer(_ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]) -> Mixed {
        switch weights.shape.mixer {
        case .attention(let mixer): attention(mixer, mixerIn, sequences, &states)
        case .gatedDeltaNet(let mixer): gatedDeltaNet(mixer, mixerIn, sequences, &states)
        case .shortConvolution: shortConvolution(mixerIn, sequences, &states)
        case .mamba2(let mixer): mamba2(mixer, mixerIn, sequences, &states)
        }
    }

    /// A projection of mixer_in as it would be stored.
    func projected(_ name: Projection, _ mixerIn: MLXArray) -> MLXArray {
        let result = projection(name)(mixerIn, tile: tile.projection).asType(mixerIn.dtype)
        tile.pace.rest([result])
        return result
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
    private func mlp(_ mlpIn: MLXArray) -> MLXArray { mlp(mlpIn, keeps: false).out }

    /// - Parameter keeps: as that of `gatedMLP`
    private func mlp(_ mlpIn: MLXArray, keeps: Bool) -> GatedMLP {
        guard let experts = weights.shape.mlp.experts else { return gatedMLP(mlpIn, addedTo: nil, keeps: keeps) }
        let mixed = mixture(experts, mlpIn)
        if weights.shape.mlp.modules.isEmpty { return (mixed, nil) }
        guard let g = weights.mlpGate else { return gatedMLP(mlpIn, addedTo: mixed, keeps: keeps) }
        let (out, kept) = gatedMLP(mlpIn, addedTo: nil, keeps: keeps)
        return (mixed + factor(g, mlpIn) * out, kept)
    }

    /// The output, in float32, and what the backward pass reads, in mlp_in's dtype.
    typealias GatedMLP = (out: MLXArray, kept: (gate: MLXArray, up: MLXArray)?)

    /// down(act(gate) ∘ up)
    ///
    /// - Parameter keeps: whether gate and up are kept. Then nothing is gained by tiles of their features.
    func gatedMLP(_ mlpIn: MLXArray, addedTo mixed: MLXArray?, keeps: Bool = false) -> GatedMLP {
        let (gate, up, down) = (projection(.gate), projection(.up), projection(.down))
        let features = tiles(of: gate.weight.rows, size: keeps ? gate.weight.rows : tile.mlp)
        var (sum, kept): (MLXArray?, (gate: MLXArray, up: MLXArray)?) = (mixed, nil)
        for f in features {
            let (gateF, upF) = (gate.outputs(f)(mlpIn), up.outputs(f)(mlpIn))
            tile.pace.rest([gateF, upF])
            let part = down.inputs(f)(weights.activation.gated(gate: gateF, up: upF))
            let next = sum.map { $0 + part } ?? part
            if keeps { kept = (gateF.asType(mlpIn.dtype), upF.asType(mlpIn.dtype)) }
            if keeps || features.count > 1 { submit([next] + (kept.map { [$0.gate, $0.up] } ?? [])) }
            sum = next
        }
        guard let sum else { preconditionFailure("an MLP without features") }
        return (down.bias.map { sum + $0 } ?? sum, kept)
    }
}
