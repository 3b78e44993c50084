import Foundation
import MLX
import MeSPBundle

/// The layout of a block's LoRA matrices in one flat float32 vector `[count]`.
///
/// Each module has A `[in, rank]`, then B `[rank, out]`, then with DoRA m `[out]`, each row-major. Experts have A `[experts, in, rank]` and B
/// `[experts, rank, out]` without m. The projections of a module share A, and each has its own columns of B.
///
/// Gradients and optimizer states have only the trained parameters, `[trainedCount]`.
package struct LoRALayout {
    package let block: BlockShape
    package let rank: Int
    package let modules: [Module]
    package let freezesA: Bool
    package let hasMagnitudes: Bool

    /// - Parameter modules: the modules that have LoRA matrices. The default is all linear layers of the block, without experts.
    package init(
        block: BlockShape, rank: Int, modules: [Module]? = nil, freezesA: Bool = false, hasMagnitudes: Bool = false
    ) {
        (self.block, self.rank, self.freezesA, self.hasMagnitudes) = (block, rank, freezesA, hasMagnitudes)
        self.modules = modules.map { block.trainable.filter($0.contains) } ?? block.modules
    }

    /// P, the number of LoRA parameters of the block.
    package var count: Int { modules.reduce(0) { $0 + size($1) } }

    package var trainedCount: Int { freezesA ? modules.reduce(0) { $0 + shapes($1).b.reduce(1, *) } : count }

    private func shapes(_ module: Module) -> (a: [Int], b: [Int]) { block.shapes([module], rank: rank) }

    private func size(_ module: Module) -> Int {
        let (a, b) = shapes(module)
        return a.reduce(1, *) + b.reduce(1, *) + magnitudes(of: module)
    }

    private func magnitudes(of module: Module) -> Int {
        hasMagnitudes && !module.isStacked ? block.dimensions(module).outputs : 0
    }

    package var magnitudes: Int { modules.reduce(0) { $0 + magnitudes(of: $1) } }

    package func magnitudes(_ module: Module, in all: MLXArray) -> MLXArray? {
        let (start, count) = (
            modules.prefix { $0 != module }.reduce(0) { $0 + magnitudes(of: $1) }, magnitudes(of: module)
        )
        return count > 0 ? all[start..<start + count] : nil
    }

    package func matrices(_ module: Module, in flat: MLXArray) -> LoRAMatrices {
        let start = modules.prefix { $0 != module }.reduce(0) { $0 + size($1) }
        let (a, b) = shapes(module)
        let (middle, end) = (start + a.reduce(1, *), start + size(module))
        let m = end - magnitudes(of: module)
        return LoRAMatrices(
            a: flat[start..<middle].reshaped(a), b: flat[middle..<m].reshaped(b), m: m < end ? flat[m..<end] : nil)
    }

    package func matrices(_ projection: Projection, in flat: MLXArray) -> LoRAMatrices? {
        let (module, outputs) = block.place(projection)
        guard modules.contains(module) else { return nil }
        let whole = matrices(module, in: flat)
        return module.projections.count == 1 ? whole : whole.outputs(outputs)
    }

    package func packed(_ matrices: [LoRAMatrices]) -> MLXArray {
        flattened(matrices.flatMap { [$0.a, $0.b] + [$0.m].compactMap { $0 } })
    }

    /// Returns the gradient `[trainedCount]`. The gradient of an A is the sum over the projections that share it.
    package func packed(_ gradients: LoRAGradients) -> MLXArray {
        flattened(
            modules.flatMap { module in
                if module.isStacked { return stacked(module, gradients.experts) }
                let a = module.projections.compactMap { gradients.a[$0] }
                let b = module.projections.compactMap { gradients.b[$0] }
                let m = module.projections.compactMap { gradients.m[$0] }
                let sum = a.first.map { a.dropFirst().reduce($0) { $0 + $1 } }
                return [sum, b.count == 1 ? b[0] : concatenated(b, axis: 1)].compactMap { $0 } + m
            })
    }

    /// Returns the gradients of each expert's A, unless A is frozen, then of each expert's B. An expert without tokens has zeros.
    private func stacked(_ module: Module, _ experts: [Int: LoRAGradients]) -> [MLXArray] {
        let (projection, numbers) = (module.projections[0], 0..<block.stack(module)[0])
        let (a, b) = shapes(module)
        let (noA, noB) = (MLXArray.zeros(Array(a.dropFirst())), MLXArray.zeros(Array(b.dropFirst())))
        return (freezesA ? [] : numbers.map { experts[$0]?.a[projection] ?? noA })
            + numbers.map { experts[$0]?.b[projection] ?? noB }
    }

    private func flattened(_ matrices: [MLXArray]) -> MLXArray {
        matrices.isEmpty ? MLXArray.zeros([0]) : concatenated(matrices.map { $0.flattened().asType(.float32) })
    }

    // MARK: - What is trained

    package func trained(in flat: MLXArray) -> MLXArray {
        freezesA ? flattened(modules.map { matrices($0, in: flat).b }) : flat
    }

    package func replacing(in flat: MLXArray, trained: MLXArray) -> MLXArray {
        guard freezesA else { return trained }
        var start = 0
        return packed(
            modules.map { module in
                let old = matrices(module, in: flat)
                defer { start += old.b.size }
                return LoRAMatrices(a: old.a, b: trained[start..<start + old.b.size].reshaped(old.b.shape))
            })
    }

    /// Returns a learning-rate factor for each parameter, float32 `[P]`: 1 for A, and `ratio` for B and m. Returns nil if `ratio` is 1.
    ///
    /// Requires that A is trained.
    package func rateFactors(ofB ratio: Float) -> MLXArray? {
        guard ratio != 1 else { return nil }
        let factors: [MLXArray] = modules.flatMap { module in
            let ofA = shapes(module).a.reduce(1, *)
            return [(Float(1), ofA), (ratio, size(module) - ofA)].map { broadcast(MLXArray($0), to: [$1]) }
        }
        return concatenated(factors)
    }

    // MARK: - Vectors of all the block's modules

    /// The layout with all linear layers of the block. It includes all experts' matrices if this layout has any.
    package var whole: LoRALayout {
        LoRALayout(
            block: block, rank: rank, modules: modules.contains(where: \.isStacked) ? block.trainable : nil,
            hasMagnitudes: hasMagnitudes)
    }

    /// Returns `flat` extended to the layout `whole`. Modules without matrices get zeros for A and B, and ones for m.
    package func whole(_ flat: MLXArray) -> MLXArray {
        let all = whole.modules
        guard modules != all else { return flat }
        var start = 0
        return concatenated(
            all.map { module in
                guard modules.contains(module) else {
                    let factors = magnitudes(of: module)
                    let zeros = MLXArray.zeros([size(module) - factors])
                    return factors > 0 ? concatenated([zeros, MLXArray.ones([factors])]) : zeros
                }
                defer { start += size(module) }
                return flat[start..<start + size(module)]
            })
    }

    /// Returns the parameters of this layout's modules from a vector of another layout, by default of `whole`.
    package func part(of vector: MLXArray, in other: LoRALayout? = nil) -> MLXArray {
        let other = other ?? whole
        return packed(modules.map { other.matrices($0, in: vector) })
    }

    /// Returns parameters `[P]` with zeros for A and B, and with m from `magnitudes`. They leave the base model unchanged if `magnitudes` are the
    /// norms of W's rows.
    package func base(_ magnitudes: MLXArray) -> MLXArray {
        packed(
            modules.map { module in
                let (a, b) = shapes(module)
                return LoRAMatrices(
                    a: MLXArray.zeros(a), b: MLXArray.zeros(b), m: self.magnitudes(module, in: magnitudes))
            })
    }

    /// Returns initial parameters, float32 `[P]`: A is uniform in ±1/√in and B is zero, as in mlx-lm.
    ///
    /// - Parameter magnitudes: with DoRA, the initial m of all modules.
    package func initial(seed: UInt64, block index: Int, magnitudes: MLXArray? = nil) -> MLXArray {
        let key = MLXRandom.split(key: MLXRandom.key(seed), into: block.architecture.numHiddenLayers)[index]
        let all = whole.modules
        let keys = zip(all, MLXRandom.split(key: key, into: all.count))
        return packed(
            keys.filter { modules.contains($0.0) }.map { module, key in
                let (a, b) = shapes(module)
                let bound = 1 / Float(block.dimensions(module).inputs).squareRoot()
                return LoRAMatrices(
                    a: MLXRandom.uniform(low: -bound, high: bound, a, key: key), b: MLXArray.zeros(b),
                    m: magnitudes.flatMap { self.magnitudes(module, in: $0) })
            })
    }
}

/// The matrices A `[in, rank]` and B `[rank, out]`, with DoRA also m `[out]`. Matrices of experts are stacked along a first axis.
package struct LoRAMatrices {
    package let a: MLXArray
    package let b: MLXArray
    package let m: MLXArray?

    package init(a: MLXArray, b: MLXArray, m: MLXArray? = nil) { (self.a, self.b, self.m) = (a, b, m) }

    package func outputs(_ range: Range<Int>) -> LoRAMatrices {
        LoRAMatrices(a: a, b: b[0..., range], m: m?[range])
    }
}

package struct LoRAGradients {
    package var a = [Projection: MLXArray]()
    package var b = [Projection: MLXArray]()
    package var m = [Projection: MLXArray]()
    /// The gradients of experts by index. Experts without tokens are absent.
    package var experts = [Int: LoRAGradients]()

    package init() {}

    package mutating func add(_ others: LoRAGradients) {
        a.merge(others.a) { $0 + $1 }
        b.merge(others.b) { $0 + $1 }
        m.merge(others.m) { $0 + $1 }
        for (number, gradients) in others.experts { experts[number, default: LoRAGradients()].add(gradients) }
    }
}

extension BlockShape {
    package func shapes(_ modules: [Module], rank: Int) -> (a: [Int], b: [Int]) {
        let (stack, (inputs, outputs)) = (stack(modules[0]), dimensions(modules))
        return (stack + [inputs, rank], stack + [rank, outputs])
    }
}

extension Architecture {
    package func layouts(rank: Int, withExperts: Bool = false, hasMagnitudes: Bool = false) -> [LoRALayout] {
        layers.indices.map {
            LoRALayout(
                block: block($0), rank: rank, modules: withExperts ? trainable : nil, hasMagnitudes: hasMagnitudes)
        }
    }
}
