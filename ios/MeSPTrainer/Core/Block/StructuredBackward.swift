import MLX
import MeSPAdapters
import MeSPBundle

extension Block {
    /// Returns the gradient of the trained LoRA parameters, and replaces dy by dx.
    ///
    /// - Parameters:
    ///   - intermediates: consumed, so that each array is freed after its last use
    ///   - wantsDx: whether to compute dx. If false, `d` is d_x_mid afterwards.
    ///   - dShared: the sum of the gradients of shared keys and values, `[kv_heads, T, head_dim]` each. A block that attends to another block's keys
    ///     and values adds to the sum. The block that computes these keys and values adds the sum to its own gradients.
    /// - Returns: the gradient of the trained LoRA parameters, flat and in float32. This gradient and `d` are evaluated.
    package func structuredBackward(
        x: MLXArray, _ intermediates: consuming Intermediates, d: inout MLXArray, wantsDx: Bool,
        dShared: inout MixerState.KeyValues?
    ) -> MLXArray {
        let shape = x.shape
        let x = x.reshaped([shape[1], shape[2]])
        var gradients = LoRAGradients()
        d = d.reshaped([shape[1], shape[2]]).asType(.float32)
        mlpBackward(intermediates, d: &d, &gradients)
        mixerBackward(x: x, consume intermediates, d: &d, wantsDx: wantsDx, &gradients, dShared: &dShared)
        d = d.reshaped(shape).asType(x.dtype)
        dora?.turn(&gradients)
        let gradient = layout.packed(gradients)
        eval(d, gradient)
        return gradient
    }

    // MARK: - y = x_mid + norm(mlp_out),  mlp_out = w down(act(gate(mlp_in)) ∘ up(mlp_in)) + mixture(mlp_in),  mlp_in = RMSNorm(x_mid)

    /// - Parameter d: dy `[T, hidden]`, replaced by d_x_mid
    private func mlpBackward(
        _ intermediates: borrowing Intermediates, d: inout MLXArray, _ gradients: inout LoRAGradients
    ) {
        let intermediates = copy intermediates
        machine.replaceByTokens(&d) { rows, dy in
            var own = LoRAGradients()
            let dMid = from(rows.lowerBound).mlpBackward(intermediates, rows, dy: dy, &own)
            gradients.add(own)
            return machine.phase(dMid, gradients).0
        }
    }

    private func mlpBackward(
        _ intermediates: Intermediates, _ rows: Range<Int>, dy: MLXArray, _ gradients: inout LoRAGradients
    ) -> MLXArray {
        let (xMid, mlpOut) = (intermediates.xMid[rows], intermediates.mlpOut?[rows])
        var dResidual = dy
        if let p = side.perLayer, let norm = weights.mlpPostNorm, let mlpOut {
            let h = xMid.asType(.float32) + norm(mlpOut.asType(.float32))
            dResidual = perLayerBackward(h, p: p[rows], dy: dResidual, &gradients)
        }
        let mlpIn = weights.mlpNorm(xMid)
        let dMlpOut = postNormBackward(weights.mlpPostNorm, mlpOut, dy: dResidual)
        var dMlpIn = MLXArray.zeros(mlpIn.shape)
        if !weights.shape.mlp.modules.isEmpty {
            let g = weights.mlpGate
            let w = g.map { factor($0, mlpIn) }
            let kept = intermediates.gate.flatMap { gate in intermediates.up.map { (gate[rows], $0[rows]) } }
            let d = gatedMLP.backward(
                mlpIn, kept: kept, dy: dMlpOut, w: w, wantsA: wantsA, tile: (machine.mlpTileTokens, machine.features),
                machine: machine)
            gradients.add(d.gradients)
            dMlpIn = machine.stage(d.dx, d.gradients).0
            // w = σ(z), z = x gᵀ:  dz = w (1 − w) dw,  dx += dz g
            if let g, let w, let dw = d.dw {
                dMlpIn = machine.part(g.applyTransposed(w * (1 - w) * dw, addedTo: dMlpIn))
            }
        }
        if let experts = weights.shape.mlp.experts {
            mixtureOfExpertsBackward(experts, mlpIn, dy: dMlpOut, addedTo: &dMlpIn, &gradients)
        }
        return weights.mlpNorm.backward(xMid, dy: dMlpIn, addedTo: dResidual)
    }

    private func postNormBackward(_ norm: RMSNorm?, _ output: MLXArray?, dy: MLXArray) -> MLXArray {
        guard let norm, let output else { return dy }
        return machine.phase(norm.backward(output, dy: dy))
    }

    // MARK: - x_mid = x + norm(mixer_out),  mixer_out = mixer(mixer_in),  mixer_in = RMSNorm(x)

    /// A long sequence is processed in segments, from the last to the first.
    ///
    /// - Parameter d: d_x_mid `[T, hidden]`, replaced by dx if `wantsDx`
    private func mixerBackward(
        x: MLXArray, _ intermediates: consuming Intermediates, d: inout MLXArray, wantsDx: Bool,
        _ gradients: inout LoRAGradients, dShared: inout MixerState.KeyValues?
    ) {
        var carried = CarriedGradients()
        guard !intermediates.segments.isEmpty else {
            let dx = mixerBackward(
                x: x, consume intermediates, dMid: d, wantsDx: wantsDx, &carried, &gradients, dShared: &dShared)
            if let dx { d = dx }
            return
        }
        let mixerOut = intermediates.mixerOut
        var segments = intermediates.segments
        _ = consume intermediates
        while let segment = segments.popLast() {
            var own = LoRAGradients()
            let x = x[segment.rows]
            let dx = from(segment.rows.lowerBound).mixerBackward(
                x: x, recompute(segment, x, mixerOut: mixerOut?[segment.rows]), dMid: d[segment.rows],
                wantsDx: wantsDx, &carried, &own, dShared: &dShared)
            gradients.add(own)
            machine.part(gradients)
            if let dx { replace(segment.rows, of: &d, by: dx) }
            Memory.clearCache()
        }
    }

    private func mixerBackward(
        x: MLXArray, _ intermediates: consuming Intermediates, dMid: MLXArray, wantsDx: Bool,
        _ carried: inout CarriedGradients,
        _ gradients: inout LoRAGradients, dShared: inout MixerState.KeyValues?
    ) -> MLXArray? {
        let dProjections = projectionGradients(
            consume intermediates, dMid: dMid, &carried, &gradients, dShared: &dShared)
        let norm = weights.mixerNorm
        let mixerIn = norm(x).asType(.float32)
        var dMixerIn: MLXArray?
        for (name, dy) in dProjections {
            dMixerIn = linearBackward(name, mixerIn, dy: dy, wantsDx: wantsDx, addedTo: dMixerIn, &gradients)
        }
        guard let dMixerIn else { return nil }
        machine.stage(dMixerIn, gradients)
        return machine.phase(norm.backward(x, dy: dMixerIn, addedTo: dMid))
    }

    typealias ProjectionGradients = KeyValuePairs<Projection, MLXArray>

    private func projectionGradients(
        _ intermediates: consuming Intermediates, dMid: MLXArray, _ carried: inout CarriedGradients,
        _ gradients: inout LoRAGradients,
        dShared: inout MixerState.KeyValues?
    ) -> ProjectionGradients {
        let dOut = postNormBackward(weights.mixerPostNorm, intermediates.mixerOut, dy: dMid)
        switch weights.shape.mixer {
        case .attention(let mixer):
            return attentionBackward(mixer, consume intermediates, dOut: dOut, &carried, &gradients, dShared: &dShared)
        case .gatedDeltaNet(let mixer):
            return gatedDeltaNetBackward(mixer, consume intermediates, dOut: dOut, &carried, &gradients)
        case .shortConvolution: return shortConvolutionBackward(consume intermediates, dOut: dOut, &gradients)
        case .mamba2(let mixer): return mamba2Backward(mixer, consume intermediates, dOut: dOut, &gradients)
        }
    }

    func outputProjectionBackward(
        _ projection: Projection, _ input: MLXArray, dy: MLXArray, _ gradients: inout LoRAGradients
    ) -> MLXArray {
        let dInput = linearBackward(projection, input, dy: dy, wantsDx: true, addedTo: nil, &gradients)
        guard let dInput else { preconditionFailure("a gradient was asked for") }
        return dInput
    }

    func linearBackward(
        _ name: Projection, _ input: MLXArray, dy: MLXArray, wantsDx: Bool, addedTo sum: MLXArray?,
        _ gradients: inout LoRAGradients
    ) -> MLXArray? {
        let d = linear(name).backward(
            input, dy: dy, machine: machine, wantsA: wantsA, wantsDx: wantsDx, addedTo: sum)
        (gradients.a[name], gradients.b[name], gradients.m[name]) = (d.dA, d.dB, d.dG)
        return d.dx
    }

    var wantsA: Bool { !layout.freezesA }
}
