import MLX

/// Keys after RoPE, and values, of the tokens that a block has seen: `[kv_heads, n, head_dim]` each.
struct KeyValues {
    var keys: MLXArray
    var values: MLXArray
    var count: Int { keys.dim(1) }

    init(_ a: Architecture, dtype: DType) {
        keys = MLXArray.zeros([a.numKeyValueHeads, 0, a.headDim], dtype: dtype)
        values = keys
    }

    /// Keeps the first tokens. Copies, as a view would keep all.
    mutating func cut(to count: Int) {
        (keys, values) = (contiguous(keys[0..., 0..<count]), contiguous(values[0..., 0..<count]))
        eval(keys, values)
    }
}

/// The forward pass of one transformer block for tokens that follow others: the block function's arithmetic, without its fixed
/// length.
///
///     attn_in = RMSNorm(x)                      x_mid = x + o(attn_out)
///     q, k, v = q(attn_in), …                   mlp_in = RMSNorm(x_mid)
///     attn_out = attention(q, k, v)             y = x_mid + down(act(gate(mlp_in)) ∘ up(mlp_in))
///
/// Each projection is a LoRA linear, and what is added to x and x_mid may go through an RMSNorm before. Between these arrays arithmetic is
/// float32, and they have the bundle's dtype.
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
    ///   - caches: for each the tokens before; these are added
    /// - Returns: y `[n, hidden]`. It and the caches are evaluated.
    func callAsFunction(_ x: MLXArray, sequences: [Range<Int>], _ caches: inout [KeyValues]) -> MLXArray {
        let xMid = (x + normed(weights.attentionPostNorm, attention(x, sequences, &caches), x.dtype)).asType(x.dtype)
        let y = (xMid + normed(weights.mlpPostNorm, mlp(weights.mlpNorm(xMid)), x.dtype)).asType(x.dtype)
        eval([y] + caches.flatMap { [$0.keys, $0.values] })
        return y
    }

    /// What is added to x: the output, in float32, or its norm, of the output as it would be stored.
    private func normed(_ norm: RMSNorm?, _ output: MLXArray, _ dtype: DType) -> MLXArray {
        norm.map { $0(output.asType(dtype).asType(.float32)) } ?? output
    }

    /// o(attn_out), in float32.
    private func attention(_ x: MLXArray, _ sequences: [Range<Int>], _ caches: inout [KeyValues]) -> MLXArray {
        let (attention, attnIn) = (weights.attention, weights.attentionNorm(x))
        func heads(_ p: Projection) -> MLXArray {
            projection(p)(attnIn, tile: tile.projection).asType(x.dtype)
                .reshaped([x.dim(0), -1, weights.architecture.headDim]).swappedAxes(0, 1)
        }
        let (q, k, v) = (heads(.q), heads(.k), heads(.v))
        let parts = zip(sequences, caches.indices).map { rows, index in
            let start = caches[index].count
            let kHat = attention.key(k[0..., rows], start: start).asType(x.dtype)
            caches[index].keys = concatenated([caches[index].keys, kHat], axis: 1)
            caches[index].values = concatenated([caches[index].values, v[0..., rows]], axis: 1)
            return attention(
                q: attention.query(q[0..., rows], start: start), k: caches[index].keys, v: caches[index].values,
                tile: tile.attention
            ).asType(x.dtype)
        }
        return projection(.o)(concatenated(parts), tile: tile.projection)
    }

    /// down(act(gate) ∘ up), in float32.
    private func mlp(_ mlpIn: MLXArray) -> MLXArray {
        let (gate, up, down) = (projection(.gate), projection(.up), projection(.down))
        let features = tiles(of: gate.weight.rows, size: tile.mlp)
        let sum = features.reduce(MLXArray.zeros(mlpIn.shape)) { sum, f in
            let act = weights.architecture.hiddenAct.gated(gate: gate.outputs(f)(mlpIn), up: up.outputs(f)(mlpIn))
            let y = sum + down.inputs(f)(act)
            if features.count > 1 { eval(y) }
            return y
        }
        return down.bias.map { sum + $0 } ?? sum
    }

    private func projection(_ projection: Projection) -> LoRALinear {
        LoRALinear(
            weight: weights.matrix(projection), bias: weights.bias(projection),
            lora: lora.map { layout.matrices(projection, in: $0) }, scale: scale)
    }
}
