import MLX
import MeSPAdapters
import MeSPBundle

/// DoRA of a block's modules. Of each layer, with the norm n `[out]` of each output's weights,
///
///     y = g ∘ (x Wᵀ + s (x A) B) + b        g = m / n        n = ‖W + s (A B)ᵀ‖
///
/// It is computed by `LoRALinear` from A, B̃ = B ∘ g and G = g. As in the paper, n is a constant in the derivative.
struct DoRA {
    private let layout: LoRALayout
    /// A, B and m `[P]`.
    private let lora: MLXArray
    /// n of all modules.
    private let norms: MLXArray

    /// - Parameters:
    ///   - squares: ‖W‖² of all modules, which `BlockWeights.squaredNorms` computes.
    ///   - machine: that takes some rows of W at a time.
    init(
        _ weights: BlockWeights, _ lora: MLXArray, _ layout: LoRALayout, scale: Float, squares: MLXArray,
        machine: Machine
    ) {
        (self.layout, self.lora) = (layout, lora)
        // By output  n² = ‖W‖² + 2 s ⟨W, (A B)ᵀ⟩ + s² ‖A B‖².  Of a row of zeros n is 0, and what it divides is 0 too.
        norms = concatenated(
            layout.modules.compactMap { module in
                guard let squares = layout.magnitudes(module, in: squares) else { return nil }
                let (matrices, w) = (layout.matrices(module, in: lora), weights.matrix(module))
                let (a, b) = (matrices.a, matrices.b)
                let wA = concatenated(
                    machine.each(of: w.rows, size: machine.projectionRows) { w.rows($0).apply(a.T, as: .float32) },
                    axis: 1)
                let products = 2 * wA + scale * matmul(matmul(a.T, a), b)
                return sqrt(maximum(squares + scale * (b * products).sum(axis: 0), Float.leastNormalMagnitude))
            })
    }

    /// A, B̃ and G `[P]`.
    var scaled: MLXArray {
        map { _, each, n in
            guard let n, let m = each.m else { return each }
            return LoRAMatrices(a: each.a, b: each.b * (m / n), m: m / n)
        }
    }

    /// The gradient by A, B and m `[P]` from that by A, B̃ and G:
    ///
    ///     dB = dB̃ ∘ g        dm = (dG + Σ B ∘ dB̃) / n
    func gradient(byScaled gradient: MLXArray) -> MLXArray {
        map { module, each, n in
            let d = layout.matrices(module, in: gradient)
            guard let n, let m = each.m, let dG = d.m else { return d }
            return LoRAMatrices(a: d.a, b: d.b * (m / n), m: (dG + (each.b * d.b).sum(axis: 0)) / n)
        }
    }

    private func map(_ body: (Module, LoRAMatrices, _ n: MLXArray?) -> LoRAMatrices) -> MLXArray {
        layout.packed(
            layout.modules.map {
                body($0, layout.matrices($0, in: lora), layout.magnitudes($0, in: norms))
            })
    }
}

extension BlockWeights {
    /// ‖W‖² of each output of all modules with magnitudes `[layout.magnitudes]`, evaluated.
    ///
    /// - Parameter bytes: of the rows of W that are dequantized at a time.
    func squaredNorms(_ layout: LoRALayout, bytes: Int = 1 << 20) -> MLXArray {
        let parts = layout.modules.filter { !$0.isStacked }.flatMap { module in
            let w = matrix(module)
            return tiles(of: w.rows, size: max(1, bytes / 4 / shape.dimensions(module).inputs)).map { rows in
                let squares = w.rows(rows).inFloat32.square().sum(axis: -1)
                eval(squares)
                return squares
            }
        }
        let all = concatenated(parts)
        eval(all)
        return all
    }
}

extension ModelBundle {
    /// See `DoRAReading`.
    func readScaled(
        _ block: Int, _ layout: LoRALayout, scale: Float, _ read: (_ base: MLXArray) throws -> MLXArray
    ) throws -> MLXArray {
        try withBlock(block) { weights in
            let squares = weights.squaredNorms(layout)
            let machine = Machine(
                architecture, group: manifest.featureGroup, length: 1, bytes: 1 << 20, processor: processor)
            let scaled = DoRA(
                weights, try read(layout.base(sqrt(squares))), layout, scale: scale, squares: squares, machine: machine
            ).scaled
            eval(scaled)
            return scaled
        }
    }
}
