import MLX
import MeSPAdapters
import MeSPBundle

/// DoRA of a block's modules. A layer computes
///
///     y = g ∘ (x Wᵀ + s (x A) B) + b        g = m / n        n = ‖W + s (A B)ᵀ‖
///
/// where n `[out]` holds the norms of the matrix's rows. `LoRALinear` computes y from A, B̃ = B ∘ g and G = g. As in the paper, the gradient treats n
/// as a constant. A row of zeros has g = 0.
struct DoRA {
    private let layout: LoRALayout
    /// A, B and m `[P]`.
    private let lora: MLXArray
    /// n of all modules with magnitudes. It is ∞ for a row of zeros, and NaN where n² is too large for float32.
    let norms: MLXArray

    init(_ lora: MLXArray, _ layout: LoRALayout, norms: MLXArray) {
        (self.lora, self.layout, self.norms) = (lora, layout, norms)
    }

    /// A column of A and the row of s B that belongs to it, scaled so that the numbers of A are at most 1.
    struct Scaled {
        let a, b: MLXArray

        init(_ matrices: LoRAMatrices, scale: Float) {
            let most = maximum(matrices.a.abs().max(axis: 0, keepDims: true), Float.leastNormalMagnitude)
            (a, b) = (matrices.a / most, scale * (most.T * matrices.b))
        }

        /// Returns n `[out]`, from ‖w‖² `[out]` and Aᵀ Wᵀ `[rank, out]`. For a row w of W and a column b of s B, n² = ‖w‖² + 2 ⟨w, A b⟩ + ‖A b‖². As
        /// the numbers of A are at most 1, no term overflows unless s A b or n² does.
        func norms(squares: MLXArray, wA: MLXArray) -> MLXArray {
            let all = squares + (b * (2 * wA + matmul(matmul(a.T, a), b))).sum(axis: 0)
            return which(
                all .< Float.leastNormalMagnitude, Float.infinity, which(all .< Float.infinity, sqrt(all), Float.nan))
        }
    }

    /// A, B̃ and G of all modules `[P]`.
    var scaled: MLXArray {
        layout.packed(
            layout.modules.map { module in
                scaled(layout.matrices(module, in: lora), n: layout.magnitudes(module, in: norms))
            })
    }

    func scaled(_ projection: Projection) -> LoRAMatrices? { parts(projection).map { scaled($0, n: $1) } }

    private func scaled(_ matrices: LoRAMatrices, n: MLXArray?) -> LoRAMatrices {
        guard let n, let m = matrices.m else { return matrices }
        return LoRAMatrices(a: matrices.a, b: matrices.b * (m / n), m: m / n)
    }

    /// Replaces the gradients of A, B̃ and G by the gradients of A, B and m:
    ///
    ///     dB = dB̃ ∘ g        dm = (dG + Σ B ∘ dB̃) / n
    func turn(_ gradients: inout LoRAGradients) {
        for (projection, dG) in gradients.m {
            guard let (matrices, n) = parts(projection), let n, let m = matrices.m, let dB = gradients.b[projection]
            else { continue }
            gradients.b[projection] = dB * (m / n)
            gradients.m[projection] = (dG + (matrices.b * dB).sum(axis: 0)) / n
        }
    }

    private func parts(_ projection: Projection) -> (LoRAMatrices, n: MLXArray?)? {
        let (module, outputs) = layout.block.place(projection)
        return layout.matrices(projection, in: lora).map { ($0, layout.magnitudes(module, in: norms)?[outputs]) }
    }
}
