import MLX

/// The forward pass of one transformer block for tokens that follow others: the block function's arithmetic, without its fixed
/// length.
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
        let xMid = (x + normed(weights.mixerPostNorm, mixerOut, x.dtype)).asType(x.dtype)
        let y = (xMid + normed(weights.mlpPostNorm, mlp(weights.mlpNorm(xMid)), x.dtype)).asType(x.dtype)
        eval([y] + (keepsStates ? states.flatMap(\.arrays) : []))
        return y
    }

    /// What is added to x: the output, in float32, or its norm, of the output as it would be stored.
    private func normed(_ norm: RMSNorm?, _ output: MLXArray, _ dtype: DType) -> MLXArray {
        norm.map { $0(output.asType(dtype).asType(.float32)) } ?? output
    }

    /// down(act(gate) ∘ up), in float32.
    private func mlp(_ mlpIn: MLXArray) -> MLXArray {
        let (gate, up, down) = (projection(.gate), projection(.up), projection(.down))
        let features = tiles(of: gate.weight.rows, size: tile.mlp)
        let sum = features.reduce(MLXArray.zeros(mlpIn.shape)) { sum, f in
            let act = weights.activation.gated(gate: gate.outputs(f)(mlpIn), up: up.outputs(f)(mlpIn))
            let y = sum + down.inputs(f)(act)
            if features.count > 1 { eval(y) }
            return y
        }
        return down.bias.map { sum + $0 } ?? sum
    }

    func projection(_ projection: Projection) -> LoRALinear {
        LoRALinear(
            weight: weights.matrix(projection), bias: weights.bias(projection),
            lora: lora.map { layout.matrices(projection, in: $0) }, scale: scale)
    }
}
