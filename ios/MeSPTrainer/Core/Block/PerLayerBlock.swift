import MLX
import MeSPAdapters

/// The output of a block with per-layer embeddings p: y = c (h + norm(z)), z = out(m), m = act(u) ∘ p, u = gate(h), where c is the block's
/// `layer_scalar`.
extension Block {
    /// - Parameters:
    ///   - h: `[T, hidden]`, in float32
    ///   - p: `[T, size]`
    /// - Returns: y, in float32.
    func perLayer(_ h: MLXArray, p: MLXArray) -> MLXArray {
        weights.layerScalar * (h + weights.perLayerNorm(perLayerOut(h, p: p).z))
    }

    private func perLayerOut(_ h: MLXArray, p: MLXArray) -> (u: MLXArray, m: MLXArray, z: MLXArray) {
        let u = layer(.perLayerGate)(h)
        let m = weights.activation.gated(gate: u, up: p.asType(.float32))
        return (u, m, layer(.perLayerOut)(m))
    }

    /// Returns dh. u, m and z are recomputed from h:
    ///
    ///     dh₁ = c dy      dz = norm′(z) dh₁      dm = out's dx from dz      du = dm ∘ p ∘ act′(u)      dh = dh₁ + gate's dx from du
    func perLayerBackward(_ h: MLXArray, p: MLXArray, dy: MLXArray, _ gradients: inout LoRAGradients) -> MLXArray {
        let (u, m, z) = perLayerOut(h, p: p)
        let dH = weights.layerScalar * dy
        let dM = outputProjectionBackward(.perLayerOut, m, dy: weights.perLayerNorm.backward(z, dy: dH), &gradients)
        let dU = weights.activation.gatedBackward(gate: [u], up: [p], dAct: dM).dGate
        let dx = linearBackward(.perLayerGate, h, dy: dU, wantsDx: true, addedTo: dH, &gradients) ?? dH
        return schedule.stage(dx, gradients).0
    }
}
