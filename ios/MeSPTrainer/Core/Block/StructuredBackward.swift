import MLX
import MeSPAdapters
import MeSPBundle

extension Block {
    // MARK: - y = x_mid + norm(mlp_out),  mlp_out = w down(act(gate(mlp_in)) ∘ up(mlp_in)) + mixture(mlp_in),  mlp_in = RMSNorm(x_mid)

    func mlpBackward(
        _ intermediates: Intermediates, _ rows: Range<Int>, dy: MLXArray, _ gradients: inout LoRAGradients
    ) -> MLXArray {
        let (xMid, mlpOut) = (intermediates.xMid[rows], intermediates.mlpOut?[rows])
        var dResidual = dy
        if let p = perLayerEmbeddings, let norm = weights.mlpPostNorm, let mlpOut {
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
            let d = tiled(gatedMLP).backward(mlpIn, kept: kept, dy: dMlpOut, w: w, wanted: wanted)
            gradients.add(d.gradients)
            dMlpIn = schedule.stage(d.dx, d.gradients).0
            // w = σ(z), z = x gᵀ:  dz = w (1 − w) dw,  dx += dz g
            if let g, let w, let dw = d.dw {
                dMlpIn = g.applyTransposed(w * (1 - w) * dw, addedTo: dMlpIn)
            }
        }
        if let experts = weights.shape.mlp.experts {
            mixtureOfExpertsBackward(experts, mlpIn, dy: dMlpOut, addedTo: &dMlpIn, &gradients)
        }
        return weights.mlpNorm.backward(xMid, dy: dMlpIn, addedTo: dResidual)
    }

    private func postNormBackward(_ norm: RMSNorm?, _ output: MLXArray?, dy: MLXArray) -> MLXArray {
        guard let norm, let output else { return dy }
        return schedule.phase(norm.backward(output, dy: dy))
    }

    // MARK: - x_mid = x + norm(mixer_out),  mixer_out = mixer(mixer_in),  mixer_in = RMSNorm(x)

    func mixerBackward(
        x: MLXArray, _ intermediates: consuming Intermediates, dMid: MLXArray, wantsDx: Bool,
        _ carried: inout CarriedGradients,
        _ gradients: inout LoRAGradients, dShared: inout MixerState.KeyValues?
    ) -> MLXArray? {
        let dProjections = projectionGradients(
            consume intermediates, dMid: dMid, &carried, &gradients, dShared: &dShared)
        schedule.phase(dProjections.map(\.value), carried.keyValues, carried.net, dShared)
        let norm = weights.mixerNorm
        let mixerIn = norm(x).asType(.float32)
        var dMixerIn: MLXArray?
        for (name, dy) in dProjections {
            dMixerIn = linearBackward(name, mixerIn, dy: dy, wantsDx: wantsDx, addedTo: dMixerIn, &gradients)
        }
        guard let dMixerIn else { return nil }
        schedule.stage(dMixerIn, gradients)
        return schedule.phase(norm.backward(x, dy: dMixerIn, addedTo: dMid))
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
        let d = linear(name).backward(input, dy: dy, wanted: wanted, wantsDx: wantsDx, addedTo: sum)
        (gradients.a[name], gradients.b[name], gradients.m[name]) = (d.dA, d.dB, d.dG)
        return d.dx
    }
}
