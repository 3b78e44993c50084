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
}

/// The forward pass of one transformer block for tokens that follow others: the block function's arithmetic, without its fixed
/// length.
///
///     attn_in = RMSNorm(x)                      x_mid = x + o(attn_out)
///     q, k, v = RoPE(q(attn_in)), …             mlp_in = RMSNorm(x_mid)
///     attn_out = attention(q, k, v)             y = x_mid + down(silu(gate(mlp_in)) ∘ up(mlp_in))
///
/// Each projection is a LoRA linear. Between these arrays arithmetic is float32, and they have the bundle's dtype.
struct BlockForward {
    let architecture: Architecture
    let weights: PackedWeights
    /// The block's LoRA parameters `[P]`, or nil for the base model.
    let lora: MLXArray?
    let layout: LoRALayout
    /// α / rank
    let scale: Float
    let tile: TileSizes

    /// - Parameters:
    ///   - x: `[n, hidden]`
    ///   - cache: of the tokens before; these are added
    /// - Returns: y `[n, hidden]`. It and the cache are evaluated.
    func callAsFunction(_ x: MLXArray, _ cache: inout KeyValues) -> MLXArray {
        let xMid = (x + attention(x, &cache)).asType(x.dtype)
        let y = mlp(xMid)
        eval(y, cache.keys, cache.values)
        return y
    }

    /// o(attn_out), in float32.
    private func attention(_ x: MLXArray, _ cache: inout KeyValues) -> MLXArray {
        let attnIn = norm("input_layernorm.weight", x)
        let start = cache.count
        func heads(_ p: Projection) -> MLXArray {
            projection(p)(attnIn, tile: tile.projection).reshaped([x.dim(0), -1, architecture.headDim]).swappedAxes(
                0, 1)
        }
        func rotated(_ p: Projection) -> MLXArray {
            rope(heads(p), start: start, base: architecture.ropeTheta).asType(x.dtype)
        }
        let q = rotated(.q)
        cache.keys = concatenated([cache.keys, rotated(.k)], axis: 1)
        cache.values = concatenated([cache.values, heads(.v).asType(x.dtype)], axis: 1)
        let attnOut = MeSPCore.attention(q: q, k: cache.keys, v: cache.values, tile: tile.attention).asType(x.dtype)
        return projection(.o)(attnOut, tile: tile.projection)
    }

    private func mlp(_ xMid: MLXArray) -> MLXArray {
        let mlpIn = norm("post_attention_layernorm.weight", xMid)
        let (gate, up, down) = (projection(.gate), projection(.up), projection(.down))
        let features = tiles(of: architecture.intermediateSize, size: tile.mlp)
        let y = features.reduce(xMid.asType(.float32)) { sum, f in
            let act = swiglu(gate: gate.outputs(f)(mlpIn), up: up.outputs(f)(mlpIn))
            let y = sum + down.inputs(f)(act)
            if features.count > 1 { eval(y) }
            return y
        }
        return y.asType(xMid.dtype)
    }

    private func norm(_ name: String, _ x: MLXArray) -> MLXArray {
        rmsNorm(x, weight: weights[name], eps: architecture.rmsNormEps)
    }

    private func projection(_ projection: Projection) -> LoRALinear {
        LoRALinear(
            weight: weights.matrix(projection.rawValue + "."),
            bias: projection.hasBias ? weights[projection.rawValue + ".bias"] : nil,
            lora: lora.map { layout.matrices(projection, in: $0) }, scale: scale)
    }
}
