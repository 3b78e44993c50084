import Foundation
import MLX

/// How a block's LoRA matrices lie in one flat float32 vector `[count]`: for each module A `[in, rank]`, then B `[rank, out]`, row-major.
/// The projections of a module share its A and have columns of its B each.
struct LoRALayout {
    let block: BlockShape
    let rank: Int

    var modules: [Module] { block.modules }

    /// P, the number of LoRA parameters of a block.
    var count: Int { modules.reduce(0) { $0 + size($1) } }

    private func size(_ module: Module) -> Int {
        let (inputs, outputs) = block.dimensions(module)
        return (inputs + outputs) * rank
    }

    /// The matrices of one module as views of `flat`.
    func matrices(_ module: Module, in flat: MLXArray) -> LoRAMatrices {
        let start = modules.prefix { $0 != module }.reduce(0) { $0 + size($1) }
        let (inputs, outputs) = block.dimensions(module)
        let middle = start + inputs * rank
        return LoRAMatrices(
            a: flat[start..<middle].reshaped([inputs, rank]),
            b: flat[middle..<start + size(module)].reshaped([rank, outputs]))
    }

    /// The matrices of one projection, likewise.
    func matrices(_ projection: Projection, in flat: MLXArray) -> LoRAMatrices {
        let (module, outputs) = block.place(projection)
        let whole = matrices(module, in: flat)
        return module.projections.count == 1 ? whole : LoRAMatrices(a: whole.a, b: whole.b[0..., outputs])
    }

    /// One flat vector from every module's pair of matrices: the inverse of `matrices(_:in:)`.
    func packed(_ matrices: [LoRAMatrices]) -> MLXArray {
        concatenated(
            matrices.flatMap { [$0.a.flattened().asType(.float32), $0.b.flattened().asType(.float32)] })
    }

    /// The flat gradient from every projection's: that of an A which several share is the sum.
    func packed(_ gradients: [Projection: LoRAMatrices]) -> MLXArray {
        packed(
            modules.map { module in
                let parts = module.projections.compactMap { gradients[$0] }
                guard parts.count > 1 else { return parts[0] }
                return LoRAMatrices(
                    a: parts.dropFirst().reduce(parts[0].a) { $0 + $1.a }, b: concatenated(parts.map(\.b), axis: 1))
            })
    }

    /// Initial parameters of the block with this index, float32 `[P]`: A uniform in ±1/√in, B zero, as in mlx-lm.
    func initial(seed: UInt64, block index: Int) -> MLXArray {
        let key = MLXRandom.split(key: MLXRandom.key(seed), into: block.architecture.numHiddenLayers)[index]
        return packed(
            zip(modules, MLXRandom.split(key: key, into: modules.count)).map { module, key in
                let (inputs, outputs) = block.dimensions(module)
                let bound = 1 / Float(inputs).squareRoot()
                return LoRAMatrices(
                    a: MLXRandom.uniform(low: -bound, high: bound, [inputs, rank], key: key),
                    b: MLXArray.zeros([rank, outputs]))
            })
    }

    /// 1 for each parameter of these modules, 0 for the others: `[P]`.
    func mask(_ trained: [Module]) -> MLXArray {
        concatenated(
            modules.map { MLXArray.full([size($0)], values: MLXArray(trained.contains($0) ? 1 : Float(0))) })
    }
}

/// A `[in, rank]` and B `[rank, out]` of one module or projection, or their gradients.
struct LoRAMatrices {
    let a: MLXArray
    let b: MLXArray
}

extension Architecture {
    /// Of each block.
    func layouts(rank: Int) -> [LoRALayout] {
        layers.indices.map { LoRALayout(block: block($0), rank: rank) }
    }
}
