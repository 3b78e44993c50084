import MLX

/// Typed views into a file of words, by name. No view copies.
struct PackedWeights {
    let words: MLXArray
    let arrays: [Manifest.PackedArray]
    let products: QuantizedMatrix.Products
    let onCPU: Bool

    /// The array called `name`, in its shape and dtype, or nil where there is none.
    func array(_ name: String) -> MLXArray? {
        guard let array = arrays.first(where: { $0.name == name }) else { return nil }
        let flat = words[array.offset..<(array.offset + array.words)]
        let count = array.shape.reduce(1, *)
        switch array.dtype {
        case "uint32": return flat.reshaped(array.shape)
        case "float32": return flat.view(dtype: .float32).reshaped(array.shape)
        case "uint8": return flat.view(dtype: .uint8)[0..<count].reshaped(array.shape)
        default: return flat.view(dtype: .bfloat16)[0..<count].reshaped(array.shape)
        }
    }

    /// The array called `name`. `ModelBundle` has checked that it is there.
    subscript(name: String) -> MLXArray {
        guard let array = array(name) else { preconditionFailure("no array \(name) in the layout") }
        return array
    }

    /// The quantized matrix `[rows, inputs]` whose arrays' names start with `prefix`.
    func matrix(_ prefix: String, inputs: Int) -> QuantizedMatrix {
        let (weight, scales, biases) = (self[prefix + "weight"], self[prefix + "scales"], array(prefix + "biases"))
        guard
            let format = QuantizationFormat(
                inputs: inputs, words: weight.dim(1), groups: scales.dim(1), hasBiases: biases != nil)
        else { preconditionFailure("no format for \(prefix)") }
        return QuantizedMatrix(
            weight: weight, scales: scales, biases: biases, format: format, products: products, onCPU: onCPU)
    }
}

/// A block's frozen weights, and the formulas that they are part of.
struct BlockWeights {
    let architecture: Architecture
    let kind: AttentionKind
    let packed: PackedWeights

    /// W `[out, in]`
    func matrix(_ projection: Projection) -> QuantizedMatrix {
        let (module, outputs) = architecture.place(projection)
        return packed.matrix(module.name + ".", inputs: architecture.inputs(projection)).rows(outputs)
    }

    /// `[out]`
    func bias(_ projection: Projection) -> MLXArray? {
        let (module, outputs) = architecture.place(projection)
        return architecture.biases.contains(module.name) ? packed[module.name + ".bias"][outputs] : nil
    }

    /// Of the block's input.
    var attentionNorm: RMSNorm { norm("input_layernorm") }
    /// Of x_mid. Llama names it after its place, behind attention, which in a block with norms of the outputs is one of these's.
    var mlpNorm: RMSNorm { norm(architecture.postNorms ? "pre_feedforward_layernorm" : "post_attention_layernorm") }
    /// Of attention's and of the MLP's output.
    var attentionPostNorm: RMSNorm? { architecture.postNorms ? norm("post_attention_layernorm") : nil }
    var mlpPostNorm: RMSNorm? { architecture.postNorms ? norm("post_feedforward_layernorm") : nil }

    var attention: Attention {
        Attention(
            scale: architecture.attentionScale, softcap: architecture.attnLogitSoftcapping.map(SoftCap.init),
            window: kind.slidingWindow,
            rope: RoPE(frequencies: kind.frequencies, scale: kind.ropeScale),
            qNorm: architecture.qkNorm ? norm("self_attn.q_norm") : nil,
            kNorm: architecture.qkNorm ? norm("self_attn.k_norm") : nil)
    }

    private func norm(_ name: String) -> RMSNorm {
        RMSNorm(weight: packed[name + ".weight"], eps: architecture.rmsNormEps)
    }
}
