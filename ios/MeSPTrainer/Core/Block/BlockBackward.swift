import MLX
import MeSPBundle

/// The structured backward pass: from x, the intermediates and dy it makes dx and the gradients of the LoRA matrices, and nothing else.
extension Block {
    /// - Parameters:
    ///   - x: `[1, T, hidden]`
    ///   - forward: given away, so that each array goes when it has been used
    ///   - d: dy `[1, T, hidden]`, replaced by dx
    ///   - wantsInput: false for the first block, whose dx nobody reads; d then ends as d_x_mid
    ///   - shared: the sum of the gradients by keys and values that several blocks take, `[kv_heads, T, head_dim]` each; the block that has
    ///     them takes the sum, each of the others adds to it. nil at first, and elsewhere.
    /// - Returns: the gradient of the trained LoRA parameters, flat and in float32. It and d are evaluated.
    package func gradient(
        x: MLXArray, _ forward: consuming Intermediates, d: inout MLXArray, wantsInput: Bool,
        shared: inout MixerState.KeyValues?
    ) -> MLXArray {
        let shape = x.shape
        let x = x.reshaped([shape[1], shape[2]])
        var gradients = LoRAGradients()
        d = d.reshaped([shape[1], shape[2]]).asType(.float32)
        mlpBackward(forward, d: &d, &gradients)
        mixerBackward(x: x, consume forward, d: &d, wantsInput: wantsInput, &gradients, shared: &shared)
        d = d.reshaped(shape).asType(x.dtype)
        let gradient = layout.packed(gradients)
        eval(d, gradient)
        return gradient
    }

    // MARK: - y = x_mid + norm(mlp_out),  mlp_out = w down(act(gate(mlp_in)) ∘ up(mlp_in)) + mixture(mlp_in),  mlp_in = RMSNorm(x_mid)

    /// Each token's derivative depends on no other token, so that a long sequence goes through some tokens at a time.
    ///
    /// - Parameter d: dy `[T, hidden]`, replaced by d_x_mid, evaluated
    private func mlpBackward(
        _ forward: borrowing Intermediates, d: inout MLXArray, _ gradients: inout LoRAGradients
    ) {
        for rows in tiles(of: d.dim(0), size: tile.mlpTokens) {
            replace(rows, of: &d, by: mlpBackward(forward, rows, dy: d[rows], &gradients))
            // What is freed here is in the way of arrays of the whole sequence, which take no part of it.
            if rows.count < d.dim(0) { Memory.clearCache() }
        }
    }

    /// - Parameter dy: of the `rows`
    /// - Returns: their d_x_mid, evaluated.
    private func mlpBackward(
        _ forward: borrowing Intermediates, _ rows: Range<Int>, dy: MLXArray, _ gradients: inout LoRAGradients
    ) -> MLXArray {
        var own = LoRAGradients()
        let (xMid, mlpOut) = (forward.xMid[rows], forward.mlpOut?[rows])
        var dResidual = dy
        if let p = beside.perLayer, let norm = weights.mlpPostNorm, let mlpOut {
            let h = xMid.asType(.float32) + norm(mlpOut.asType(.float32))
            dResidual = perLayerBackward(h, p: p[rows], dy: dResidual, &own)
        }
        let mlpIn = weights.mlpNorm(xMid)
        let dMlpOut = through(weights.mlpPostNorm, mlpOut, dy: dResidual)
        var dMlpIn: MLXArray
        if weights.shape.mlp.modules.isEmpty {
            dMlpIn = MLXArray.zeros(mlpIn.shape)
        } else {
            let weighed = weights.mlpGate.map { factorBackward($0, mlpIn, dy: dMlpOut) }
            dMlpIn = gatedMLP(
                mlpIn, gate: forward.gate?[rows], up: forward.up?[rows], dy: weighed?.dOut ?? dMlpOut, &own)
            if let g = weights.mlpGate, let dz = weighed?.dz {
                dMlpIn = g.applyTransposed(dz, addedTo: dMlpIn)
                eval(dMlpIn)
            }
        }
        if let experts = weights.shape.mlp.experts {
            mixtureBackward(experts, mlpIn, dy: dMlpOut, addedTo: &dMlpIn, &own)
        }
        let dMid = weights.mlpNorm.backward(xMid, dy: dMlpIn, addedTo: dResidual)
        gradients.add(own)
        submit([dMid] + gradients.arrays)
        return dMid
    }

    /// The derivative of mlp_out, by tiles of tokens and of the intermediate features. `gate` and `up` are made again for a tile from
    /// `mlp_in`, where they were not kept. Where weights are dequantized, a tile has all tokens, so that each is dequantized once,
    /// whatever the sequence length; otherwise all features.
    ///
    /// - Returns: d_mlp_in `[T, hidden]`; what else was made on the way goes with the function.
    private func gatedMLP(
        _ mlpIn: MLXArray, gate gateKept: MLXArray?, up upKept: MLXArray?, dy: MLXArray,
        _ gradients: inout LoRAGradients
    ) -> MLXArray {
        var (mlpIn, dy) = (mlpIn, dy)
        let (wGate, wUp, wDown) = (weights.matrix(.gate), weights.matrix(.up), weights.matrix(.down))
        let (gateBias, upBias) = (weights.bias(.gate), weights.bias(.up))
        let (gateLoRA, upLoRA, downLoRA) = (matrices(.gate), matrices(.up), matrices(.down))

        let (hGate, hUp, dyB) = {
            let x = mlpIn.asType(.float32)
            // s x A, and s dy Bᵀ of down
            return (
                gateLoRA.map { matmul(x, $0.a) * scale }, upLoRA.map { matmul(x, $0.a) * scale },
                downLoRA.map { matmul(dy, $0.b.T) * scale }
            )
        }()
        let first = tile.pace.next([mlpIn, dy], after: [mlpIn] + [hGate, hUp, dyB].compactMap { $0 })
        (mlpIn, dy) = (first[0], first[1])

        let features = tiles(of: wGate.rows, size: tile.mlp)
        // Of the tokens: dMlpIn, act A of down, d_gate Bᵀ of gate, d_up Bᵀ of up. Of the features: dA of down, dB of gate and of up.
        var (dMlpIns, hDowns, dGateBs, dUpBs) = ([MLXArray](), [MLXArray](), [MLXArray](), [MLXArray]())
        var (dADown, dBGate, dBUp) = (
            [MLXArray?](repeating: nil, count: features.count), [MLXArray?](repeating: nil, count: features.count),
            [MLXArray?](repeating: nil, count: features.count)
        )
        for t in tiles(of: mlpIn.dim(0), size: tile.tokens) {
            var (dMlpIn, hDown, dGateB, dUpB): (MLXArray?, MLXArray?, MLXArray?, MLXArray?) = (nil, nil, nil, nil)
            for (i, f) in features.enumerated() {
                let (wGateF, wUpF, wDownF) = (wGate.rows(f), wUp.rows(f), wDown.columns(f))
                let (bGate, bUp, aDown) = (gateLoRA?.b[0..., f], upLoRA?.b[0..., f], downLoRA?.a[f])

                let gate =
                    gateKept.map { [$0[t, f]] }
                    ?? [wGateF.apply(mlpIn[t]), product(hGate?[t], bGate), gateBias?[f]].compactMap { $0 }
                let up =
                    upKept.map { [$0[t, f]] }
                    ?? [wUpF.apply(mlpIn[t]), product(hUp?[t], bUp), upBias?[f]].compactMap { $0 }
                let dActW = wDownF.applyTransposed(dy[t], addedTo: nil)
                let dAct = product(dyB?[t], aDown?.T, addedTo: dActW) ?? dActW
                let (act, dGate, dUp) = weights.activation.gatedBackward(gate: gate, up: up, dAct: dAct)

                hDown = product(act, aDown, addedTo: hDown)
                dGateB = product(dGate, bGate?.T, addedTo: dGateB)
                dUpB = product(dUp, bUp?.T, addedTo: dUpB)
                dADown[i] = product(act.T, wantsA ? dyB?[t] : nil, addedTo: dADown[i])
                dBGate[i] = product(hGate?[t].T, dGate, addedTo: dBGate[i])
                dBUp[i] = product(hUp?[t].T, dUp, addedTo: dBUp[i])
                dMlpIn = wUpF.applyTransposed(dUp, addedTo: wGateF.applyTransposed(dGate, addedTo: dMlpIn))
                let next = tile.pace.next(
                    [mlpIn, dy],
                    after: [dMlpIn, hDown, dGateB, dUpB, dADown[i], dBGate[i], dBUp[i]].compactMap { $0 })
                (mlpIn, dy) = (next[0], next[1])
            }
            dMlpIns += [dMlpIn].compactMap { $0 }
            hDowns += [hDown].compactMap { $0 }
            dGateBs += [dGateB].compactMap { $0 }
            dUpBs += [dUpB].compactMap { $0 }
        }

        func whole(_ parts: [MLXArray?], axis: Int) -> MLXArray? {
            let parts = parts.compactMap { $0 }
            return parts.isEmpty ? nil : concatenated(parts, axis: axis)
        }
        let (dGateB, dUpB) = (whole(dGateBs, axis: 0), whole(dUpBs, axis: 0))
        if wantsA {
            let mlpIn32 = mlpIn.asType(.float32)
            gradients.a[.gate] = product(mlpIn32.T, dGateB).map { $0 * scale }
            gradients.a[.up] = product(mlpIn32.T, dUpB).map { $0 * scale }
            gradients.a[.down] = whole(dADown, axis: 0)
        }
        (gradients.b[.gate], gradients.b[.up]) = (whole(dBGate, axis: 1), whole(dBUp, axis: 1))
        gradients.b[.down] = whole(hDowns, axis: 0).map { matmul(($0 * scale).T, dy) }
        var dMlpIn = concatenated(dMlpIns)
        // s d_gate Bᵀ Aᵀ of gate, and the same of up.
        if let dB = whole([dGateB, dUpB], axis: 1), let a = whole([gateLoRA?.a, upLoRA?.a], axis: 1) {
            dMlpIn = addMM(dMlpIn, dB, a.T, alpha: scale)
        }
        tile.endPhase([dMlpIn] + gradients.arrays)
        return dMlpIn
    }

    /// The gradient of what a norm of an output took, evaluated; dy if there is no such norm.
    private func through(_ norm: RMSNorm?, _ output: MLXArray?, dy: MLXArray) -> MLXArray {
        guard let norm, let output else { return dy }
        let d = norm.backward(output, dy: dy)
        submit([d])
        return d
    }

    // MARK: - x_mid = x + norm(mixer_out),  mixer_out = mixer(mixer_in),  mixer_in = RMSNorm(x)

    /// Of a long sequence by segments, the last first: what a segment's tokens give to those before goes from one to the next.
    ///
    /// - Parameter d: d_x_mid `[T, hidden]`, replaced by dx, evaluated, if that is wanted
    private func mixerBackward(
        x: MLXArray, _ forward: consuming Intermediates, d: inout MLXArray, wantsInput: Bool,
        _ gradients: inout LoRAGradients, shared: inout MixerState.KeyValues?
    ) {
        var behind = Behind()
        guard !forward.segments.isEmpty else {
            let dx = mixerBackward(
                x: x, consume forward, dMid: d, wantsInput: wantsInput, &behind, &gradients, shared: &shared)
            if let dx { d = dx }
            return
        }
        let mixerOut = forward.mixerOut
        var segments = forward.segments
        _ = consume forward
        while let segment = segments.popLast() {
            var own = LoRAGradients()
            let x = x[segment.rows]
            let dx = mixerBackward(
                x: x, again(segment, x, mixerOut: mixerOut?[segment.rows]), dMid: d[segment.rows],
                wantsInput: wantsInput, &behind, &own, shared: &shared)
            gradients.add(own)
            eval(gradients.arrays)
            if let dx { replace(segment.rows, of: &d, by: dx) }
            Memory.clearCache()
        }
    }

    private func mixerBackward(
        x: MLXArray, _ forward: consuming Intermediates, dMid: MLXArray, wantsInput: Bool, _ behind: inout Behind,
        _ gradients: inout LoRAGradients, shared: inout MixerState.KeyValues?
    ) -> MLXArray? {
        let projected = projected(consume forward, dMid: dMid, &behind, &gradients, shared: &shared)
        let norm = weights.mixerNorm
        let mixerIn = norm(x).asType(.float32)
        var dMixerIn: MLXArray?
        for (name, dy) in projected {
            dMixerIn = projection(name, mixerIn, dy: dy, wantsInput: wantsInput, addedTo: dMixerIn, &gradients)
        }
        guard let dMixerIn else { return nil }
        tile.endPhase([dMixerIn] + gradients.arrays)
        let dx = norm.backward(x, dy: dMixerIn, addedTo: dMid)
        submit([dx])
        return dx
    }

    /// The gradients of the outputs `[T, features]` of a mixer's projections of mixer_in, evaluated.
    typealias Projected = KeyValuePairs<Projection, MLXArray>

    private func projected(
        _ forward: consuming Intermediates, dMid: MLXArray, _ behind: inout Behind, _ gradients: inout LoRAGradients,
        shared: inout MixerState.KeyValues?
    ) -> Projected {
        let dOut = through(weights.mixerPostNorm, forward.mixerOut, dy: dMid)
        switch weights.shape.mixer {
        case .attention(let mixer):
            return attentionBackward(mixer, consume forward, dOut: dOut, &behind, &gradients, shared: &shared)
        case .gatedDeltaNet(let mixer):
            return gatedDeltaNetBackward(mixer, consume forward, dOut: dOut, &behind, &gradients)
        case .shortConvolution: return shortConvolutionBackward(consume forward, dOut: dOut, &gradients)
        case .mamba2(let mixer): return mamba2Backward(mixer, consume forward, dOut: dOut, &gradients)
        }
    }

    /// The derivative of the mixer's last projection, o or out.
    /// - Returns: the gradient of its input `[T, features]`.
    func lastProjection(
        _ projection: Projection, _ input: MLXArray, dy: MLXArray, _ gradients: inout LoRAGradients
    ) -> MLXArray {
        let dInput = self.projection(projection, input, dy: dy, wantsInput: true, addedTo: nil, &gradients)
        guard let dInput else { preconditionFailure("a gradient was asked for") }
        return dInput
    }

    /// The derivative of one projection of `input`: see `linearBackward`.
    func projection(
        _ projection: Projection, _ input: MLXArray, dy: MLXArray, wantsInput: Bool, addedTo sum: MLXArray?,
        _ gradients: inout LoRAGradients
    ) -> MLXArray? {
        let (dx, dA, dB) = linearBackward(
            input, weights.matrix(projection), matrices(projection), scale: scale, dy: dy,
            tile: tile, wantsA: wantsA, wantsInput: wantsInput, addedTo: sum)
        (gradients.a[projection], gradients.b[projection]) = (dA, dB)
        return dx
    }

    var wantsA: Bool { !layout.freezesA }
}
