import MLX

/// A block's frozen weights, and the formulas that they are part of.
struct BlockWeights {
    let shape: BlockShape
    let packed: PackedWeights

    private var architecture: Architecture { shape.architecture }
    var activation: Activation { architecture.hiddenAct }

    /// W `[out, in]`
    func matrix(_ projection: Projection) -> QuantizedMatrix {
        let (module, outputs) = shape.place(projection)
        return packed.matrix(module.name + ".", inputs: shape.dimensions(projection).inputs).rows(outputs)
    }

    /// `[out]`
    func bias(_ projection: Projection) -> MLXArray? {
        let (module, outputs) = shape.place(projection)
        return architecture.biases.contains(module.name) ? packed[module.name + ".bias"][outputs] : nil
    }

    /// Of the block's input.
    var mixerNorm: RMSNorm { norm("input_layernorm") }
    /// Of x_mid. Llama names it after its place, behind attention, which in a block with norms of the outputs is one of these's.
    var mlpNorm: RMSNorm { norm(architecture.postNorms ? "pre_feedforward_layernorm" : "post_attention_layernorm") }
    /// Of the mixer's and of the MLP's output.
    var mixerPostNorm: RMSNorm? { architecture.postNorms ? norm("post_attention_layernorm") : nil }
    var mlpPostNorm: RMSNorm? { architecture.postNorms ? norm("post_feedforward_layernorm") : nil }

    func attention(_ mixer: AttentionMixer) -> Attention {
        Attention(
            scale: mixer.attentionScale, softcap: mixer.attnLogitSoftcapping.map(SoftCap.init),
            window: mixer.slidingWindow,
            rope: RoPE(frequencies: mixer.frequencies, scale: mixer.ropeScale),
            qNorm: mixer.qkNorm ? norm("self_attn.q_norm") : nil, kNorm: mixer.qkNorm ? norm("self_attn.k_norm") : nil)
    }

    func gatedDeltaNet(_ mixer: GatedDeltaNetMixer) -> GatedDeltaNet {
        GatedDeltaNet(
            keyHeads: mixer.numKeyHeads, valueHeads: mixer.numValueHeads, keyDim: mixer.keyHeadDim,
            valueDim: mixer.valueHeadDim, convolution: CausalConvolution(weight: packed["linear_attn.conv1d.weight"]),
            aLog: packed["linear_attn.A_log"], dtBias: packed["linear_attn.dt_bias"], norm: norm("linear_attn.norm"))
    }

    var shortConvolution: ShortConvolution {
        ShortConvolution(convolution: CausalConvolution(weight: packed["conv.conv.weight"]))
    }

    private func norm(_ name: String) -> RMSNorm {
        RMSNorm(weight: packed[name + ".weight"], eps: architecture.rmsNormEps)
    }
}
