import MLX
import MeSPBundle

/// The formulas of the forward pass, without the bundle's block function. Generation uses them on every device, and training uses them on a CPU.
extension Block {
    func addMLP(to xMid: MLXArray, _ mlpOut: MLXArray, _ p: MLXArray?) -> MLXArray {
        let h = sumInFloat32(xMid, weights.mlpPostNorm, mlpOut)
        return (p.map { perLayer(h, p: $0) } ?? h).asType(xMid.dtype)
    }

    func sum(_ x: MLXArray, _ norm: RMSNorm?, _ output: MLXArray) -> MLXArray {
        sumInFloat32(x, norm, output).asType(x.dtype)
    }

    /// Returns x + norm(output), or x + output without a norm, in float32. The input of the norm is first rounded to x's dtype, because the backward
    /// pass reads it in that dtype.
    private func sumInFloat32(_ x: MLXArray, _ norm: RMSNorm?, _ output: MLXArray) -> MLXArray {
        x + (norm.map { $0(output.asType(x.dtype).asType(.float32)) } ?? output)
    }

    // MARK: - The mixer

    typealias MixerResult = (intermediates: MixerIntermediates, out: MLXArray)

    func mixer(_ x: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]) -> MixerResult {
        let mixerIn = weights.mixerNorm(x)
        return switch weights.shape.mixer {
        case .attention(let mixer): attention(mixer, mixerIn, sequences, &states)
        case .gatedDeltaNet(let mixer): gatedDeltaNet(mixer, mixerIn, sequences, &states)
        case .shortConvolution: shortConvolution(mixerIn, sequences, &states)
        case .mamba2(let mixer): mamba2(mixer, mixerIn, sequences, &states)
        }
    }

    func project(_ name: Projection, _ mixerIn: MLXArray) -> MLXArray {
        schedule.part(linear(name)(mixerIn).asType(mixerIn.dtype))
    }

    func eachSequence(
        _ sequences: [Range<Int>], _ states: inout [MixerState],
        formula: (_ rows: Range<Int>, _ state: inout MixerState) -> MLXArray
    ) -> MLXArray {
        concatenated(zip(sequences, states.indices).map { rows, index in formula(rows, &states[index]) })
    }

    // MARK: - The MLP

    /// Returns the output of the gated MLP or of the mixture of experts, in float32. If the block has both, returns their sum, in which the MLP's
    /// output may be multiplied by `factor`.
    func mlp(_ mlpIn: MLXArray, _ inner: (gate: MLXArray, up: MLXArray)? = nil) -> MLXArray {
        let mixture = weights.shape.mlp.experts.map { mixtureOfExperts($0, mlpIn) }
        if let mixture, weights.shape.mlp.modules.isEmpty { return mixture }
        let mlp = gatedMLP
        func output(addedTo sum: MLXArray?) -> MLXArray {
            inner.map { mlp($0.gate, $0.up, addedTo: sum) } ?? tiled(mlp)(mlpIn, addedTo: sum)
        }
        guard let mixture, let g = weights.mlpGate else { return output(addedTo: mixture) }
        return mixture + factor(g, mlpIn) * output(addedTo: nil)
    }

    var gatedMLP: GatedMLP {
        GatedMLP(
            gate: layer(.gate), up: layer(.up), down: layer(.down), names: (.gate, .up, .down),
            activation: weights.activation)
    }

    /// Returns w = σ(x gᵀ) `[n, 1]`, the factor of the MLP's output in a block that also has experts.
    func factor(_ g: QuantizedMatrix, _ mlpIn: MLXArray) -> MLXArray { sigmoid(g.apply(mlpIn.asType(.float32))) }
}
