import MLX

/// What the backward pass reads of what the block function returns: `[1, T, features]`, or `[1, heads, T, head_dim]`. attn_in is made
/// again, a norm of x; so are gate and up, tile by tile, where they were not kept.
struct Intermediates {
    let q, k, v, attnOut, xMid: MLXArray
    let gate, up: MLXArray?
    /// The outputs of attention and of the MLP that go through norms, in a block with post-norms.
    let oOut, mlpOut: MLXArray?

    /// From what the block function returned. `gate` and `up` have not been evaluated unless they are to be `kept`.
    init(_ outputs: [MLXArray], kept: Bool) {
        (q, k, v, attnOut, xMid) = (outputs[2], outputs[3], outputs[4], outputs[5], outputs[6])
        (gate, up) = kept ? (outputs[7], outputs[8]) : (nil, nil)
        (oOut, mlpOut) = outputs.count > 9 ? (outputs[9], outputs[10]) : (nil, nil)
    }

    var arrays: [MLXArray] { [q, k, v, attnOut, xMid] + [gate, up, oOut, mlpOut].compactMap { $0 } }
}

/// The structured backward pass of one transformer block:
///
///     attn_in = RMSNorm(x)                      x_mid = x + o(attn_out)
///     q, k, v = q(attn_in), …                   mlp_in = RMSNorm(x_mid)
///     attn_out = attention(q, k, v)             y = x_mid + down(act(gate(mlp_in)) ∘ up(mlp_in))
///
/// Each projection is a LoRA linear, and what is added to x and x_mid may go through an RMSNorm before. From x, the intermediates and dy
/// it makes dx and the gradients of the LoRA matrices, and nothing else. What it takes and dx have the bundle's dtype, norms too, as the
/// block function made them; everything else is float32.
struct BlockBackward {
    let weights: BlockWeights
    let lora: MLXArray
    let layout: LoRALayout
    /// α / rank
    let scale: Float
    let tile: TileSizes

    /// - Parameters:
    ///   - x: `[1, T, hidden]`
    ///   - forward: given away, so that each array goes when it has been used
    ///   - d: dy `[1, T, hidden]`, replaced by dx
    ///   - wantsInput: false for the first block, whose dx nobody reads; d then ends as d_x_mid
    /// - Returns: the flat gradient of the LoRA parameters `[P]` in float32. It and d are evaluated.
    func callAsFunction(x: MLXArray, _ forward: consuming Intermediates, d: inout MLXArray, wantsInput: Bool)
        -> MLXArray
    {
        let shape = x.shape
        let x = x.reshaped([shape[1], shape[2]])
        var gradients = [Projection: LoRAMatrices]()
        d = d.reshaped([shape[1], shape[2]]).asType(.float32)
        d = mlp(forward, dy: d, &gradients)
        if let dx = attention(x: x, consume forward, dMid: d, wantsInput: wantsInput, &gradients) { d = dx }
        d = d.reshaped(shape).asType(x.dtype)
        let gradient = layout.packed(gradients)
        eval(d, gradient)
        return gradient
    }

    // MARK: - y = x_mid + norm(mlp_out),  mlp_out = down(act(gate(mlp_in)) ∘ up(mlp_in)),  mlp_in = RMSNorm(x_mid)

    /// The MLP's derivative, by tiles of the intermediate features. `gate` and `up` are made again for a tile from `mlp_in`, and
    /// each weight is dequantized once, whatever the sequence length.
    ///
    /// - Returns: d_x_mid `[T, hidden]`, evaluated.
    private func mlp(
        _ forward: borrowing Intermediates, dy dResidual: MLXArray, _ gradients: inout [Projection: LoRAMatrices]
    )
        -> MLXArray
    {
        let xMid = forward.xMid.reshaped(dResidual.shape)
        let (gateKept, upKept) = (forward.gate?[0], forward.up?[0])
        let norm = weights.mlpNorm
        let dy = through(weights.mlpPostNorm, forward.mlpOut, dy: dResidual)
        let (wGate, wUp, wDown) = (weights.matrix(.gate), weights.matrix(.up), weights.matrix(.down))
        let (gateBias, upBias) = (weights.bias(.gate), weights.bias(.up))
        let (gateLoRA, upLoRA, downLoRA) = (matrices(.gate), matrices(.up), matrices(.down))

        let mlpIn = norm(xMid)
        let hGate = matmul(mlpIn, gateLoRA.a) * scale  // s x A
        let hUp = matmul(mlpIn, upLoRA.a) * scale
        let dyB = matmul(dy, downLoRA.b.T) * scale  // s dy Bᵀ of down
        var dMlpIn = MLXArray.zeros(mlpIn.shape)
        var hDown = MLXArray.zeros(hGate.shape)  // act A of down
        var dGateB = MLXArray.zeros(hGate.shape)  // d_gate Bᵀ of gate
        var dUpB = MLXArray.zeros(hGate.shape)
        var (dADown, dBGate, dBUp) = ([MLXArray](), [MLXArray](), [MLXArray]())
        eval(mlpIn, hGate, hUp, dyB)

        for f in tiles(of: wGate.rows, size: tile.mlp) {
            let (wGateF, wUpF, wDownF) = (wGate.rows(f), wUp.rows(f), wDown.columns(f))
            let (bGate, bUp, aDown) = (gateLoRA.b[0..., f], upLoRA.b[0..., f], downLoRA.a[f])

            let gate =
                gateKept?[0..., f].asType(.float32)
                ?? added(gateBias?[f], to: wGateF.apply(mlpIn, as: .float32) + matmul(hGate, bGate))
            let up =
                upKept?[0..., f].asType(.float32)
                ?? added(upBias?[f], to: wUpF.apply(mlpIn, as: .float32) + matmul(hUp, bUp))
            let dAct = wDownF.applyTransposed(dy, addedTo: matmul(dyB, aDown.T))
            let (act, dGate, dUp) = weights.architecture.hiddenAct.gatedBackward(gate: gate, up: up, dAct: dAct)

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
        eval([Projection.gate, .up, .down].compactMap { gradients[$0] }.flatMap { [$0.a, $0.b] })
        dMlpIn = addMM(addMM(dMlpIn, dGateB * scale, gateLoRA.a.T), dUpB * scale, upLoRA.a.T)
        eval(dMlpIn)
        let dMid = dResidual + norm.backward(xMid, dy: dMlpIn)
        eval(dMid)
        return dMid
    }

    private func added(_ bias: MLXArray?, to y: MLXArray) -> MLXArray { bias.map { y + $0 } ?? y }

    /// The gradient of what a norm of an output took, evaluated; dy where there is no such norm.
    private func through(_ norm: RMSNorm?, _ output: MLXArray?, dy: MLXArray) -> MLXArray {
        guard let norm, let output else { return dy }
        let d = norm.backward(output.reshaped(dy.shape), dy: dy)
        eval(d)
        return d
    }

    // MARK: - x_mid = x + norm(o_out),  o_out = o(attention(q(attn_in), k(attn_in), v(attn_in))),  attn_in = RMSNorm(x)

    /// - Returns: dx `[T, hidden]`, evaluated, or nil where it is not wanted.
    private func attention(
        x: MLXArray, _ forward: consuming Intermediates, dMid: MLXArray, wantsInput: Bool,
        _ gradients: inout [Projection: LoRAMatrices]
    ) -> MLXArray? {
        let norm = weights.attentionNorm
        let (dq, dk, dv) = heads(consume forward, dMid: dMid, &gradients)
        let attnIn = norm(x)
        var dAttnIn: MLXArray? = wantsInput ? MLXArray.zeros(x.shape) : nil
        dAttnIn = projection(.q, attnIn, dy: dq, addedTo: dAttnIn, &gradients)
        dAttnIn = projection(.k, attnIn, dy: dk, addedTo: dAttnIn, &gradients)
        dAttnIn = projection(.v, attnIn, dy: dv, addedTo: dAttnIn, &gradients)
        guard let dAttnIn else { return nil }
        let dx = dMid + norm.backward(x, dy: dAttnIn)
        eval(dx)
        return dx
    }

    /// - Returns: the gradients of the q, k and v projections' outputs, `[T, features]`, evaluated.
    private func heads(
        _ forward: consuming Intermediates, dMid: MLXArray, _ gradients: inout [Projection: LoRAMatrices]
    ) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
        let a = weights.architecture
        let shape = [dMid.dim(0), a.numAttentionHeads, a.headDim]
        let attnOut = forward.attnOut.reshaped([shape[0], shape[1] * shape[2]])
        let dOut = through(weights.attentionPostNorm, forward.oOut, dy: dMid)
        guard
            let dAttnOut = projection(
                .o, attnOut, dy: dOut, addedTo: MLXArray.zeros(attnOut.shape), &gradients)
        else { preconditionFailure("a gradient was asked for") }
        func byHead(_ x: MLXArray) -> MLXArray { x.reshaped(shape).swappedAxes(0, 1) }
        return weights.attention.backward(
            q: forward.q[0], k: forward.k[0], v: forward.v[0], dOut: byHead(dAttnOut),
            tile: tile.attention)
    }

    /// The derivative of one projection of `input`: see `linearBackward`.
    private func projection(
        _ projection: Projection, _ input: MLXArray, dy: MLXArray, addedTo sum: MLXArray?,
        _ gradients: inout [Projection: LoRAMatrices]
    ) -> MLXArray? {
        let (dx, gradient) = linearBackward(
            input, weights.matrix(projection), matrices(projection), scale: scale, dy: dy,
            tile: tile.projection, addedTo: sum)
        gradients[projection] = gradient
        return dx
    }

    private func matrices(_ projection: Projection) -> LoRAMatrices {
        layout.matrices(projection, in: lora)
    }
}
