import MLX
import MeSPBundle

/// The choice of a token's experts, and their weights, from what the router gives for all of them, z `[T, E]`:
///
///     K = the k experts with the highest s + b        w = c s / (Σ_K s + ε)        s = σ(z) or exp(z)
///
/// k is `numExpertsPerTok`, and c `scaling`. ε is 10⁻⁶ with the sigmoid, and 0 otherwise. The choice has no gradient.
extension Experts {
    /// The experts of each token `[T, k]`, the one with the highest score first, of equal ones the one that comes first.
    ///
    /// - Parameter bias: b `[E]`; nil for 0.
    func chosen(_ z: MLXArray, bias: MLXArray?) -> MLXArray {
        let s = scores == .sigmoid ? sigmoid(z) : z
        return argSort(-(bias.map { s + $0 } ?? s), axis: -1)[0..., 0..<numExpertsPerTok]
    }

    /// w `[T, k]`, of z of the chosen experts alone.
    func weights(_ z: MLXArray) -> MLXArray { parts(z).w }

    /// dz of the chosen experts `[T, k]` from dw:
    ///
    ///     ds = (c dw − Σ_K w dw) / (Σ_K s + ε)        dz = ds ∘ s (1 − s), or ds ∘ s
    func weightsBackward(_ z: MLXArray, dw: MLXArray) -> MLXArray {
        let (w, s, total) = parts(z)
        let ds = (scaling * dw - (w * dw).sum(axis: -1, keepDims: true)) / total
        return scores == .sigmoid ? ds * s * (1 - s) : ds * s
    }

    private func parts(_ z: MLXArray) -> (w: MLXArray, s: MLXArray, total: MLXArray) {
        // exp(z) over that of the highest, which w does not change.
        let s = scores == .sigmoid ? sigmoid(z) : exp(z - z.max(axis: -1, keepDims: true))
        let total = s.sum(axis: -1, keepDims: true) + Float(scores == .sigmoid ? 1e-6 : 0)
        return (scaling * s / total, s, total)
    }
}
