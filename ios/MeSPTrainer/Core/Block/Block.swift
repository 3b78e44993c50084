import MLX
import MeSPAdapters
import MeSPBundle

/// A transformer block with its weights and LoRA parameters:
///
///     mixer_in = RMSNorm(x)                     mlp_in = RMSNorm(x_mid)
///     x_mid = x + mixer(mixer_in)               y = x_mid + down(act(gate(mlp_in)) ∘ up(mlp_in))
///
/// A block may have a mixture of experts in place of the MLP or beside it. Each projection is a LoRA linear. In a block with post-norms
/// the outputs of the mixer and of the MLP go through an RMSNorm before they are added to x and x_mid. x, y and the arrays of
/// `Intermediates` have the bundle's dtype; everything between them is float32.
///
/// BlockForward.swift and BlockBackward.swift have the two passes; AttentionBlock.swift, GatedDeltaNetBlock.swift,
/// ShortConvolutionBlock.swift and Mamba2Block.swift have both passes of a mixer, ExpertsBlock.swift those of a mixture of experts, and
/// PerLayerBlock.swift those of the term that embeddings for each layer add to y.
package struct Block {
    let weights: BlockWeights
    /// The LoRA parameters `[P]`, or nil for the base model.
    let lora: MLXArray?
    let layout: LoRALayout
    /// The factor s of the adapters' output, which `BlockwiseModel.scale` says.
    let scale: Float
    var machine: Machine
    /// The linear layers, where a model that generates keeps them from token to token; nil elsewhere.
    var projections: [Projection: LoRALinear]?
    let beside: Beside
    /// The keys and values of another block, one for each sequence; used where `beside.shared` is nil.
    var sharedStates = [MixerState.KeyValues]()

    package init(
        weights: BlockWeights, lora: MLXArray?, layout: LoRALayout, scale: Float, machine: Machine,
        beside: Beside
    ) {
        (self.weights, self.lora, self.layout, self.scale, self.machine) = (weights, lora, layout, scale, machine)
        self.beside = beside
    }

    /// The rows of each record in a sequence of T tokens. The mixer, alone in a block, relates tokens to each other, so it takes each
    /// record by itself.
    func records(_ length: Int) -> [Range<Int>] { beside.records ?? [0..<length] }

    /// The segments that the mixer goes by, some thousand tokens each; none of a shorter sequence, nor of packed records.
    func segments(_ length: Int) -> [Range<Int>] {
        guard beside.records == nil, length > machine.mixerTokens, weights.shape.mixer.goesBySegments else { return [] }
        return tiles(of: length, size: machine.mixerTokens)
    }

    /// The matrices of a projection's adapter, nil where it has none.
    func matrices(_ projection: Projection) -> LoRAMatrices? {
        lora.flatMap { layout.matrices(projection, in: $0) }
    }

    func projection(_ projection: Projection) -> LoRALinear {
        projections?[projection]
            ?? LoRALinear(
                weight: weights.matrix(projection), bias: weights.bias(projection),
                lora: matrices(projection), scale: scale)
    }
}

extension Mixer {
    /// Whether a long sequence goes through it by segments. A short convolution's arrays are few.
    var goesBySegments: Bool {
        switch self {
        case .attention, .gatedDeltaNet: true
        case .shortConvolution, .mamba2: false
        }
    }
}

/// One call of a block for one sequence: all that its forward and its backward pass take besides x.
package struct BlockCall {
    package let index: Int
    /// Mapped.
    let weights: BlockWeights
    /// The LoRA parameters `[P]`.
    var lora: MLXArray
    package var beside: Beside

    package init(index: Int, weights: BlockWeights, lora: MLXArray, beside: Beside) {
        (self.index, self.weights, self.lora, self.beside) = (index, weights, lora, beside)
    }
}

/// The inputs of a block besides the output of the block before: all of them, so that none is left out where a block runs again.
package struct Beside {
    /// See `Example.records`; nil for one.
    var records: [Range<Int>]?
    /// Its layer's part of the tokens' embeddings `[T, size]`, where the model has such.
    var perLayer: MLXArray?
    /// The keys and values of another block, where this has none.
    var shared: MixerState.KeyValues?

    package init(records: [Range<Int>]?, perLayer: MLXArray?, shared: MixerState.KeyValues?) {
        (self.records, self.perLayer, self.shared) = (records, perLayer, shared)
    }

    /// In the order of the block function's arguments.
    var arrays: [MLXArray] {
        let starts = records.map { records in
            MLXArray(records.flatMap { Array(repeating: Int32($0.lowerBound), count: $0.count) })
        }
        return [perLayer, shared?.keys, shared?.values].compactMap { $0?.expandedDimensions(axis: 0) }
            + [starts].compactMap { $0 }
    }
}

/// A block's frozen weights, and the formulas that they are part of.
package struct BlockWeights {
    let shape: BlockShape
    var packed: PackedWeights

    /// The same weights for the formulas of a CPU.
    package var onCPU: BlockWeights { BlockWeights(shape: shape, packed: packed.onCPU) }

    private var architecture: Architecture { shape.architecture }
    var activation: Activation { architecture.hiddenAct }

    /// W `[out, in]`
    package func matrix(_ projection: Projection) -> QuantizedMatrix {
        let (module, outputs) = shape.place(projection)
        return packed.matrix(module.name + ".", inputs: shape.dimensions(projection).inputs).rows(outputs)
    }

    /// The matrices of an expert.
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

    /// R `[E, hidden]`
    func router(_ experts: Experts) -> QuantizedMatrix {
        packed.matrix(experts.router + ".", inputs: architecture.hiddenSize)
    }

    /// g `[1, hidden]`, by which σ(x gᵀ) is the factor of the MLP's output; nil where that is 1.
    var mlpGate: QuantizedMatrix? {
        shape.mlp.experts?.mlpGate.map { packed.matrix($0 + ".", inputs: architecture.hiddenSize) }
    }

    /// The experts of each token `[T, k]`, from what the router gives `[T, E]`.
    func chosen(_ experts: Experts, _ z: MLXArray) -> MLXArray {
        experts.chosen(z, bias: experts.bias.map { packed[$0] })
    }

    /// `[out]`
    func bias(_ projection: Projection) -> MLXArray? {
        let (module, outputs) = shape.place(projection)
        return architecture.biases.contains(module.name) ? packed[module.name + ".bias"][outputs] : nil
    }

    /// The norm of the block's input.
    var mixerNorm: RMSNorm { norm("input_layernorm") }
    /// The norm of x_mid. Llama names it after its place, behind attention, which in a block with post-norms is one of these's.
    var mlpNorm: RMSNorm { norm(architecture.postNorms ? "pre_feedforward_layernorm" : "post_attention_layernorm") }
    /// The norms of the mixer's and the MLP's outputs.
    var mixerPostNorm: RMSNorm? { architecture.postNorms ? norm("post_attention_layernorm") : nil }
    var mlpPostNorm: RMSNorm? { architecture.postNorms ? norm("post_feedforward_layernorm") : nil }

    func attention(_ mixer: AttentionMixer) -> Attention {
        Attention(
            mixer: mixer, qNorm: mixer.qkNorm ? norm("self_attn.q_norm") : nil,
            kNorm: mixer.qkNorm && mixer.keysOf == nil ? norm("self_attn.k_norm") : nil,
            vNorm: mixer.vNorm
                ? RMSNorm(weight: MLXArray.ones([mixer.headDim]), eps: architecture.rmsNormEps) : nil)
    }

    /// The factor of the output of a block with embeddings for each layer `[1]`, and the norm of what it makes of them.
    var layerScalar: MLXArray { packed["layer_scalar"].asType(.float32) }
    var perLayerNorm: RMSNorm { norm("post_per_layer_input_norm") }

    /// k̂ and v̂ of one record's intermediates, in float32.
    func keysAndValues(_ intermediates: Intermediates) -> MixerState.KeyValues {
        guard case .attention(let mixer) = shape.mixer else { preconditionFailure("no attention") }
        let attention = attention(mixer)
        return MixerState.KeyValues(
            keys: attention.key(intermediates.m2, at: .from(0)), values: attention.value(intermediates.m3))
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
    /// Calls `body` with the weights of block `index`, whose file is mapped at least as long as `body` runs. Arrays that `body` returns must be
    /// evaluated.
    package func withBlock<R>(_ index: Int, _ body: (BlockWeights) throws -> R) throws -> R {
        try withWeights(file(ofBlock: index)) {
            try body(BlockWeights(shape: architecture.block(index), packed: $0))
        }
    }
}

/// The forward pass of one block over a whole sequence x `[1, T, hidden]`, with the requested outputs. The caller
/// evaluates them.
package protocol BlockForward {
    /// y `[1, T, hidden]`.
    func output(_ x: MLXArray) throws -> MLXArray
    /// The arrays that the backward pass reads, without gate and up.
    func intermediates(_ x: MLXArray) throws -> Intermediates
    func outputs(_ x: MLXArray) throws -> BlockOutputs
}

/// Everything that the exported block function returns.
package struct BlockOutputs {
    /// `[1, T, hidden]`
    package let y: MLXArray
    /// RMSNorm(x) `[T, hidden]`; the backward pass makes it again from x.
    package let mixerIn: MLXArray
    package let intermediates: Intermediates

    /// The names of docs/method.md, in the function's order.
    package static func names(of mixer: Mixer) -> [String] {
        let ofMixer =
            switch mixer {
            case .attention: ["q", "k", "v", "attn_out"]
            case .gatedDeltaNet: ["qkv", "z", "ba", "o"]
            case .shortConvolution: ["b", "c", "u", "mixed"]
            case .mamba2: ["z", "xBC", "dt", "o"]
            }
        return ["y", "mixer_in"] + ofMixer + ["x_mid", "gate", "up", "mixer_out", "mlp_out"]
    }

    /// In the function's order; the last two only of a block with post-norms.
    package var list: [MLXArray] {
        let i = intermediates
        return [y, mixerIn, i.m1, i.m2, i.m3, i.mixed, i.xMid] + [i.gate, i.up, i.mixerOut, i.mlpOut].compactMap { $0 }
    }
}

/// The arrays between a block's input and its output that the backward pass reads, without the axis of the batch.
package struct Intermediates: Arrays {
    /// The outputs of the mixer's projections `[T, features]`, or `[heads, T, d]` of attention's:
    ///
    ///     attention            q, behind each head its gate if it has one;  k;  v
    ///     gated delta net      qkv, before its convolution;  z;  b and a behind it
    ///     short convolution    b;  c;  u
    ///     Mamba-2              z;  xBC, before its convolution;  dt
    let m1, m2, m3: MLXArray
    /// The result of the mixer's formula, before its output's gate or norm `[T, features]`.
    let mixed: MLXArray
    let xMid: MLXArray
    /// `[T, intermediate_size]`; nil where the backward pass makes them again, tile by tile.
    var gate, up: MLXArray?
    /// The outputs of the mixer and of the MLP before their norms, in a block with post-norms.
    var mixerOut, mlpOut: MLXArray?
    /// Of a long sequence, whose mixer goes by segments: m₁, m₂, m₃ and mixed are empty, and made again of each.
    var segments = [Segment]()
    /// Where these are of one of them.
    var segment: Segment?

    /// Some tokens of a sequence.
    struct Segment {
        let rows: Range<Int>
        /// The state before the segment. Of attention: the keys and values of the whole sequence.
        var state: MixerState
        /// attn_out, which would take longest to recompute; nil for other mixers.
        let mixed: MLXArray?
    }

    var arrays: [MLXArray] {
        [m1, m2, m3, mixed, xMid] + [gate, up, mixerOut, mlpOut].compactMap { $0 }
            + segments.flatMap { $0.state.arrays + [$0.mixed].compactMap { $0 } }
    }
}

/// The terms of the gradient that a sequence's later segments pass to those before.
struct Behind {
    /// The gradients of attention's k̂ and v, `[kv_heads, d, n]` of the last n positions before; nil where there is none.
    var keyValues: MixerState.KeyValues?
    /// nil where a gated delta net does not go by segments.
    var net: GatedDeltaNet.Behind?
}
