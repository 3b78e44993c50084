import MLX

/// A transformer block with its weights and LoRA parameters:
///
///     mixer_in = RMSNorm(x)                     mlp_in = RMSNorm(x_mid)
///     x_mid = x + mixer(mixer_in)               y = x_mid + down(act(gate(mlp_in)) ∘ up(mlp_in))
///
/// Each projection is a LoRA linear. In a block with post-norms the outputs of the mixer and of the MLP go through an RMSNorm before they
/// are added to x and x_mid. x, y and the arrays of `Intermediates` have the bundle's dtype; everything between them is float32.
///
/// BlockForward.swift and BlockBackward.swift have the two passes, AttentionBlock.swift, GatedDeltaNetBlock.swift and
/// ShortConvolutionBlock.swift both passes of a mixer.
struct Block {
    let weights: BlockWeights
    /// The LoRA parameters `[P]`, or nil for the base model.
    let lora: MLXArray?
    let layout: LoRALayout
    /// α / rank
    let scale: Float
    let tile: TileSizes

    /// The matrices of a projection's adapter, nil where it has none.
    func matrices(_ projection: Projection) -> LoRAMatrices? {
        lora.flatMap { layout.matrices(projection, in: $0) }
    }

    func projection(_ projection: Projection) -> LoRALinear {
        LoRALinear(
            weight: weights.matrix(projection), bias: weights.bias(projection),
            lora: matrices(projection), scale: scale)
    }
}
