import MLX
import MeSPBundle

/// The choice of a token's experts and their weights, from the router's outputs z `[T, E]`:
///
///     K = the k experts with the highest σ(z) + b or z + b        w = c p / (Σ_K p + ε)        p = σ(z) or exp(z)
///
/// k is `numExpertsPerTok`, and c is `scaling`. ε is 10⁻⁶ with the sigmoid, and 0 otherwise.
extension Experts {
    /// Returns the experts of each token `[T, k]`, the highest score first.
    ///
    /// - Parameter bias: b `[E]`; nil for 0.
    func chosen(_ z: MLXArray, bias: MLXArray?) -> MLXArray {
        let p = scores == .sigmoid ? sigmoid(z) : z
        return argSort(-(bias.map { p + $0 } ?? p), axis: -1)[0..., 0..<numExpertsPerTok]
    }

    /// Returns w `[T, k]` from z `[T, k]` of the chosen experts.
    func weights(_ z: MLXArray) -> MLXArray { parts(z).w }

    /// Returns dz of the chosen experts `[T, k]` from dw:
    ///
    ///     dp = (c dw − Σ_K w dw) / (Σ_K p + ε)        dz = dp ∘ p (1 − p), or dp ∘ p
    func weightsBackward(_ z: MLXArray, dw: MLXArray) -> MLXArray {
        let (w, p, total) = parts(z)
        let dp = (scaling * dw - (w * dw).sum(axis: -1, keepDims: true)) / total
        return scores == .sigmoid ? dp * p * (1 - p) : dp * p
    }

    private func parts(_ z: MLXArray) -> (w: MLXArray, p: MLXArray, total: MLXArray) {
        // Dividing exp(z) by its largest value does not change w and avoids an overflow.
        let p = scores == .sigmoid ? sigmoid(z) : exp(z - z.max(axis: -1, keepDims: true))
        let total = p.sum(axis: -1, keepDims: true) + Float(scores == .sigmoid ? 1e-6 : 0)
        return (scaling * p / total, p, total)
    }
}
