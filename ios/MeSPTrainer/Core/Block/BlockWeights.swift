import MLX
import MeSPAdapters
import MeSPBundle

package struct BlockWeights {
    let shape: BlockShape
    var packed: PackedWeights

    package var onCPU: BlockWeights { BlockWeights(shape: shape, packed: packed.onCPU) }

    private var architecture: Architecture { shape.architecture }
    var activation: Activation { architecture.hiddenAct }

    package func matrix(_ projection: Projection) -> QuantizedMatrix {
        let (module, outputs) = shape.place(projection)
        return matrix(module).rows(outputs)
    }

    func matrix(_ module: Module) -> QuantizedMatrix {
        packed.matrix(module.name + ".", inputs: shape.dimensions(module).inputs)
    }

    func expert(
        _ experts: Experts, _ number: Int
    ) -> (gate: QuantizedMatrix, up: QuantizedMatrix, down: QuantizedMatrix) {
        let hidden = architecture.hiddenSize
        return (
            packed.matrix(experts.gate + ".", number, inputs: hidden),
            packed.matrix(experts.up + ".", number, inputs: hidden),
            packed.matrix(experts.down + ".", number, inputs: experts.intermediateSize)
        )
    }

    func router(_ experts: Experts) -> QuantizedMatrix {
        packed.matrix(experts.router + ".", inputs: architecture.hiddenSize)
    }

    /// g `[1, hidden]` in the factor σ(x gᵀ) of the MLP's output; nil if the factor is 1.
    var mlpGate: QuantizedMatrix? {
        shape.mlp.experts?.mlpGate.map { packed.matrix($0 + ".", inputs: architecture.hiddenSize) }
    }

    func chosen(_ experts: Experts, _ z: MLXArray) -> MLXArray {
        experts.chosen(z, bias: experts.bias.map { packed[$0] })
    }

    func bias(_ projection: Projection) -> MLXArray? {
        let (module, outputs) = shape.place(projection)
        return architecture.biases.contains(module.name) ? packed[module.name + ".bias"][outputs] : nil
    }

    var mixerNorm: RMSNorm { norm("input_layernorm") }
    /// The norm of x_mid. In a block with post-norms, the name `post_attention_layernorm` belongs to the mixer's post-norm.
    var mlpNorm: RMSNorm { norm(architecture.postNorms ? "pre_feedforward_layernorm" : "post_attention_layernorm") }
    var mixerPostNorm: RMSNorm? { architecture.postNorms ? norm("post_attention_layernorm") : nil }
    var mlpPostNorm: RMSNorm? { architecture.postNorms ? norm("post_feedforward_layernorm") : nil }

    func attention(_ mixer: AttentionMixer) -> Attention {
        Attention(
            mixer: mixer, qNorm: mixer.qkNorm ? norm("self_attn.q_norm") : nil,
            kNorm: mixer.qkNorm && mixer.keysOf == nil ? norm("self_attn.k_norm") : nil,
            vNorm: mixer.vNorm
                ? RMSNorm(weight: MLXArray.ones([mixer.headDim]), eps: architecture.rmsNormEps) : nil)
    }

    var layerScalar: MLXArray { packed["layer_scalar"].asType(.float32) }
    var perLayerNorm: RMSNorm { norm("post_per_layer_input_norm") }

    func keysAndValues(_ intermediates: Intermediates) -> MixerState.KeyValues {
        guard case .attention(let mixer) = shape.mixer else { preconditionFailure("no attention") }
        let formula = attention(mixer)
        return MixerState.KeyValues(
            keys: formula.key(intermediates.attention.k, at: .from(0)),
            values: formula.value(intermediates.attention.v))
    }

    func gatedDeltaNet(_ mixer: GatedDeltaNetMixer) -> GatedDeltaNet {
        GatedDeltaNet(
            keyHeads: mixer.numKeyHeads, valueHeads: mixer.numValueHeads, keyDim: mixer.keyHeadDim,
            valueDim: mixer.valueHeadDim, convolution: CausalConvolution(weight: packed["linear_attn.conv1d.weight"]),
            aLog: packed["linear_attn.A_log"], dtBias: packed["linear_attn.dt_bias"], norm: norm("linear_attn.norm"))
    }

    var shortConvolution: CausalConvolution { CausalConvolution(weight: packed["conv.conv.weight"]) }

    func mamba2(_ mixer: Mamba2Mixer) -> Mamba2 {
        Mamba2(
            heads: mixer.numHeads, groups: mixer.numGroups, headDim: mixer.headDim, stateSize: mixer.stateSize,
            convolution: CausalConvolution(weight: packed["mamba.conv1d.weight"]), bias: packed["mamba.conv1d.bias"],
            dtBias: packed["mamba.dt_bias"], aLog: packed["mamba.A_log"], d: packed["mamba.D"],
            norm: RMSNorm(weight: packed["mamba.norm.weight"], eps: mixer.normEps))
    }

    private func norm(_ name: String) -> RMSNorm {
        RMSNorm(weight: packed[name + ".weight"], eps: architecture.rmsNormEps)
    }
}

extension ModelBundle {
    /// Maps a block's weights, at least until they are closed.
    func openBlock(_ index: Int) throws -> BlockWeights {
        BlockWeights(shape: architecture.block(index), packed: try open(file(ofBlock: index)))
    }

    /// The weights' file stays mapped while `body` runs. Arrays that `body` returns must be evaluated.
    package func withBlock<R>(_ index: Int, _ body: (BlockWeights) throws -> R) throws -> R {
        try withWeights(file(ofBlock: index)) {
            try body(BlockWeights(shape: architecture.block(index), packed: $0))
        }
    }
}
