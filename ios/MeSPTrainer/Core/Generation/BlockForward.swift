import MLX

/// The forward pass of one transformer block, as a CPU trains with it and both devices generate, for tokens that may follow others: the
/// block function's arithmetic, without its fixed length.
///
///     mixer_in = RMSNorm(x)                     mlp_in = RMSNorm(x_mid)
///     x_mid = x + mixer(mixer_in)               y = x_mid + down(act(gate(mlp_in)) ∘ up(mlp_in))
///
/// Each projection is a LoRA linear, and what is added to x and x_mid may go through an RMSNorm before. Between these arrays, and those
/// that `Intermediates` names, arithmetic is float32, and they have the bundle's dtype.
struct BlockForward {
    let weights: BlockWeights
    /// The block's LoRA parameters `[P]`, or nil for the base model.
    let lora: MLXArray?
    let layout: LoRALayout
    /// α / rank
    let scale: Float
    let tile: TileSizes

    /// - Parameters:
    ///   - x: `[n, hidden]`, the tokens of one or several sequences, one sequence below the other
    ///   - sequences: the rows of each
    ///   - states: for each what the tokens before left; becomes what these leave
    ///   - keepsStates: whether that is asked for; otherwise it is not evaluated
    /// - Returns: y `[n, hidden]`, evaluated.
    func callAsFunction(
        _ x: MLXArray, sequences: [Range<Int>], _ states: inout [MixerState], keepsStates: Bool
    ) -> MLXArray {
        let mixerOut = mixer(weights.mixerNorm(x), sequences, &states).out
        let xMid = sum(x, weights.mixerPostNorm, mixerOut)
        let y = sum(xMid, weights.mlpPostNorm, mlp(weights.mlpNorm(xMid)))
        eval([y] + (keepsStates ? states.flatMap(\.arrays) : []))
        return y
    }

    /// What the block function returns, of a whole sequence.
    ///
    /// - Parameter x: `[1, T, hidden]`
    /// - Returns: the outputs asked for as `BlockFunction` has them, evaluated.
    func callAsFunction(_ outputs: BlockFunction.Outputs, _ x: MLXArray) -> [MLXArray] {
        let x = x.squeezed(axis: 0)
        func stored(_ arrays: [MLXArray]) -> [MLXArray] {
            let stored = arrays.map { $0.asType(x.dtype).expandedDimensions(axis: 0) }
            eval(stored)
            return stored
        }
        /// mixer_in, m₁, m₂, m₃, mixed, x_mid and, with post-norms, mixer_out; x_mid alone where no more is asked for.
        func firstHalf() -> [MLXArray] {
            var states = [MixerState(weights, dtype: x.dtype)]
            let mixerIn = weights.mixerNorm(x)
            let mixed = mixer(mixerIn, [0..<x.dim(0)], &states)
            let xMid = sum(x, weights.mixerPostNorm, mixed.out)
            if outputs == .y { return stored([xMid]) }
            return stored([mixerIn] + mixed.intermediates + [xMid] + (isPostNormed ? [mixed.out] : []))
        }
        let first = firstHalf()
        if outputs == .intermediates, !isPostNormed { return Array(first[1...5]) }

        let xMid = first[outputs == .y ? 0 : 5].squeezed(axis: 0)
        var kept: [(gate: MLXArray, up: MLXArray)]? = outputs == .all ? [] : nil
        let mlpOut = mlp(weights.mlpNorm(xMid), keeping: &kept)
        if outputs == .intermediates { return first[1...] + stored([mlpOut]) }
        let y = stored([sum(xMid, weights.mlpPostNorm, mlpOut)])
        guard let kept else { return y }
        let gateAndUp = [kept.map(\.gate), kept.map(\.up)].map { concatenated($0, axis: -1) }
        return y + first[...5] + stored(gateAndUp) + first[6...] + (isPostNormed ? stored([mlpOut]) : [])
    }

    private var isPostNormed: Bool { weights.mlpPostNorm != nil }

    /// x + norm(output), where there is a norm of the output as it would be stored; in x's dtype.
    private func sum(_ x: MLXArray, _ norm: RMSNorm?, _ output: MLXArray) -> MLXArray {
        (x + (norm.map { $0(output.asType(x.dtype).asType(.float32)) } ?? output)).asType(x.dtype)
    }

    /// down(act(gate) ∘ up), in float32.
    private func mlp(_ mlpIn: MLXArray) -> MLXArray {
        var kept: [(gate: MLXArray, up: MLXArray)]?
        return mlp(mlpIn, keeping: &kept)
    }

    /// - Parameter kept: gets gate and up by tiles of their features, unless it is nil.
    private func mlp(_ mlpIn: MLXArray, keeping kept: inout [(gate: MLXArray, up: MLXArray)]?) -> MLXArray {
        let (gate, up, down) = (projection(.gate), projection(.up), projection(.down))
        let features = tiles(of: gate.weight.rows, size: tile.mlp)
        var sum = MLXArray.zeros(mlpIn.shape)
        for f in features {
            let (gateF, upF) = (gate.outputs(f)(mlpIn), up.outputs(f)(mlpIn))
            sum = sum + down.inputs(f)(weights.activation.gated(gate: gateF, up: upF))
            kept?.append((gateF.asType(mlpIn.dtype), upF.asType(mlpIn.dtype)))
            if features.count > 1 { eval([sum] + (kept?.suffix(1).flatMap { [$0.gate, $0.up] } ?? [])) }
        }
        return down.bias.map { sum + $0 } ?? sum
    }

    func projection(_ projection: Projection) -> LoRALinear {
        LoRALinear(
            weight: weights.matrix(projection), bias: weights.bias(projection),
            lora: lora.map { layout.matrices(projection, in: $0) }, scale: scale)
    }
}
