import MLX

/// What the backward pass reads of what the block function returns: `[1, T, features]`, or `[1, heads, T, head_dim]`. The other
/// three are made again where they are needed: attn_in is a norm of x, gate and up come tile by tile.
struct Intermediates {
    let q, k, v, attnOut, xMid: MLXArray
}

/// How much of a matrix is worked on at once. Smaller tiles need less memory and more time.
struct TileSizes {
    /// Rows of a projection's weight.
    var projection: Int
    /// Intermediate features of the MLP, a multiple of the quantization group.
    var mlp: Int
    /// Query rows of attention.
    var attention: Int
    /// Rows of the vocabulary in the loss.
    var vocabulary: Int

    /// Sizes that keep each temporary near `bytes`.
    init(_ a: Architecture, group: Int, length: Int, bytes: Int = 4 << 20) {
        let floats = bytes / 4
        projection = max(64, floats / max(a.hiddenSize, a.numAttentionHeads * a.headDim))
        mlp = max(1, floats / max(a.hiddenSize, length) / group) * group
        attention = max(16, floats / (a.numAttentionHeads * length))
        vocabulary = max(64, floats / max(a.hiddenSize, length))
    }
}

/// The structured backward pass of one transformer block:
///
///     attn_in = RMSNorm(x)                      x_mid = x + o(attn_out)
///     q, k, v = RoPE(q(attn_in)), …             mlp_in = RMSNorm(x_mid)
///     attn_out = attention(q, k, v)             y = x_mid + down(silu(gate(mlp_in)) ∘ up(mlp_in))
///
/// Each projection is a LoRA linear. From x, the intermediates and dy it makes dx and the gradients of the seven pairs of LoRA
/// matrices, and nothing else.
struct BlockBackward {
    let architecture: Architecture
    let weights: PackedWeights
    let lora: MLXArray
    let layout: LoRALayout
    /// α / rank
    let scale: Float
    let tile: TileSizes

    /// - Parameters:
    ///   - x, dy: `[1, T, hidden]`
    ///   - wantsInput: false for the first block, whose dx nobody reads
    /// - Returns: dx `[1, T, hidden]` and the flat gradient of the LoRA parameters `[P]` in float32, both evaluated.
    func callAsFunction(x: MLXArray, _ forward: Intermediates, dy: MLXArray, wantsInput: Bool)
        -> (dx: MLXArray?, gradient: MLXArray)
    {
        let rows = [x.dim(1), architecture.hiddenSize]
        let x = x.reshaped(rows)
        var gradients = [Projection: LoRAMatrices]()
        let dMid = mlp(xMid: forward.xMid.reshaped(rows), dy: dy.reshaped(rows), &gradients)
        let dx = attention(x: x, forward, dMid: dMid, wantsInput: wantsInput, &gradients)
        let gradient = layout.packed(gradients)
        eval(gradient)
        return (dx?.reshaped(dy.shape), gradient)
    }

    // MARK: - y = x_mid + down(silu(gate(mlp_in)) ∘ up(mlp_in))

    /// The MLP's derivative, by tiles of the intermediate features. `gate` and `up` are made again for a tile from `mlp_in`, and
    /// each weight is dequantized once, whatever the sequence length.
    ///
    /// - Returns: d_x_mid `[T, hidden]`, evaluated.
    private func mlp(xMid: MLXArray, dy: MLXArray, _ gradients: inout [Projection: LoRAMatrices]) -> MLXArray {
        let dtype = xMid.dtype
        let norm = weights["post_attention_layernorm.weight"]
        let (wGate, wUp, wDown) = (matrix(.gate), matrix(.up), matrix(.down))
        let (gateLoRA, upLoRA, downLoRA) = (matrices(.gate, dtype), matrices(.up, dtype), matrices(.down, dtype))

        let mlpIn = rmsNorm(xMid, weight: norm, eps: architecture.rmsNormEps)
        let hGate = matmul(mlpIn, gateLoRA.a) * scale  // s x A
        let hUp = matmul(mlpIn, upLoRA.a) * scale
        let dyB = matmul(dy, downLoRA.b.T) * scale  // s dy Bᵀ of down
        var dMlpIn = MLXArray.zeros(mlpIn.shape, dtype: dtype)
        var hDown = MLXArray.zeros(hGate.shape, dtype: dtype)  // act A of down
        var dGateB = MLXArray.zeros(hGate.shape, dtype: dtype)  // d_gate Bᵀ of gate
        var dUpB = MLXArray.zeros(hGate.shape, dtype: dtype)
        var (dADown, dBGate, dBUp) = ([MLXArray](), [MLXArray](), [MLXArray]())
        eval(mlpIn, hGate, hUp, dyB)

        for f in tiles(of: architecture.intermediateSize, size: tile.mlp) {
            let (wGateF, wUpF, wDownF) = (wGate.rows(f), wUp.rows(f), wDown.columns(f))
            let (bGate, bUp, aDown) = (gateLoRA.b[0..., f], upLoRA.b[0..., f], downLoRA.a[f])

            let gate = wGateF.apply(mlpIn) + matmul(hGate, bGate)
            let up = wUpF.apply(mlpIn) + matmul(hUp, bUp)
            let dAct = wDownF.applyTransposed(dy, addedTo: matmul(dyB, aDown.T))
            let (act, dGate, dUp) = swigluBackward(gate: gate, up: up, dAct: dAct)

            hDown = addMM(hDown, act, aDown)
            dADown.append(matmul(act.T, dyB))
            dBGate.append(matmul(hGate.T, dGate))
            dBUp.append(matmul(hUp.T, dUp))
            dGateB = addMM(dGateB, dGate, bGate.T)
            dUpB = addMM(dUpB, dUp, bUp.T)
            dMlpIn = wUpF.applyTransposed(dUp, addedTo: wGateF.applyTransposed(dGate, addedTo: dMlpIn))
            eval([dMlpIn, hDown, dGateB, dUpB] + [dADown, dBGate, dBUp].compactMap(\.last))
        }

        gradients[.gate] = LoRAMatrices(a: matmul(mlpIn.T, dGateB) * scale, b: concatenated(dBGate, axis: 1))
        gradients[.up] = LoRAMatrices(a: matmul(mlpIn.T, dUpB) * scale, b: concatenated(dBUp, axis: 1))
        gradients[.down] = LoRAMatrices(a: concatenated(dADown), b: matmul((hDown * scale).T, dy))
        dMlpIn = dMlpIn + (matmul(dGateB, gateLoRA.a.T) + matmul(dUpB, upLoRA.a.T)) * scale
        let dMid = dy + rmsNormBackward(xMid, weight: norm, eps: architecture.rmsNormEps, dy: dMlpIn)
        eval([dMid] + [Projection.gate, .up, .down].compactMap { gradients[$0] }.flatMap { [$0.a, $0.b] })
        return dMid
    }

    // MARK: - x_mid = x + o(attention(RoPE(q(attn_in)), RoPE(k(attn_in)), v(attn_in)))

    /// - Returns: dx `[T, hidden]`, evaluated.
    private func attention(
        x: MLXArray, _ forward: Intermediates, dMid: MLXArray, wantsInput: Bool,
        _ gradients: inout [Projection: LoRAMatrices]
    ) -> MLXArray? {
        let a = architecture
        let (length, dtype) = (x.dim(0), x.dtype)

        func backward(_ projection: Projection, _ input: MLXArray, dy: MLXArray, addedTo sum: MLXArray?) -> MLXArray? {
            let (dx, gradient) = linearBackward(
                input, matrix(projection), matrices(projection, dtype), scale: scale, dy: dy, tile: tile.projection,
                addedTo: sum)
            gradients[projection] = gradient
            return dx
        }
        func byHead(_ x: MLXArray) -> MLXArray {
            x.reshaped([length, a.numAttentionHeads, a.headDim]).swappedAxes(0, 1)
        }

        let attnOut = forward.attnOut.reshaped([length, a.numAttentionHeads * a.headDim])
        let zeros = MLXArray.zeros(attnOut.shape, dtype: dtype)
        guard let dAttnOut = backward(.o, attnOut, dy: dMid, addedTo: zeros) else { return nil }
        let (dq, dk, dv) = attentionBackward(
            q: forward.q[0], k: forward.k[0], v: forward.v[0], out: byHead(attnOut), dOut: byHead(dAttnOut),
            base: a.ropeTheta, tile: tile.attention)

        let norm = weights["input_layernorm.weight"]
        let attnIn = rmsNorm(x, weight: norm, eps: a.rmsNormEps)
        var dAttnIn: MLXArray? = wantsInput ? MLXArray.zeros(x.shape, dtype: dtype) : nil
        for (projection, dy) in [(Projection.q, dq), (.k, dk), (.v, dv)] {
            dAttnIn = backward(projection, attnIn, dy: concatenated(dy), addedTo: dAttnIn)
        }
        guard let dAttnIn else { return nil }

        let dx = dMid + rmsNormBackward(x, weight: norm, eps: a.rmsNormEps, dy: dAttnIn)
        eval(dx)
        return dx
    }

    private func matrix(_ projection: Projection) -> QuantizedMatrix { weights.matrix(projection.rawValue + ".") }

    private func matrices(_ projection: Projection, _ dtype: DType) -> LoRAMatrices {
        layout.matrices(projection, in: lora, dtype: dtype)
    }
}
