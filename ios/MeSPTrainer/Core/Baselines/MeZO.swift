import MLX
import MeSPBundle

extension Trainer {
    /// - Returns: the mean of MeZO's two losses, and the norm of the gradient where it is clipped.
    func zerothOrderStep(_ parts: [Part], _ number: Int) throws -> (loss: Float, norm: Float?) {
        try zerothOrderStep(number, of: parts.map(\.example)) { moved in
            try parts.reduce(0) { try $0 + $1.weight * model.loss($1.example, parameters: moved) }
        }
    }

    /// MeZO's step for any loss, with an estimate of the gradient from two forward passes: with z ~ N(0, 1) from a seed,
    ///
    ///     g = (L(lora + ε z) − L(lora − ε z)) / 2ε,      ∂L/∂lora ≈ g z
    ///
    /// z is drawn again, block by block, each time it is needed.
    ///
    /// - Parameters:
    ///   - examples: that the loss is of.
    ///   - loss: L with the trained of each block's parameters `[P]` moved.
    func zerothOrderStep(
        _ number: Int, of examples: [Example],
        loss: (_ moved: (_ block: Int, _ lora: MLXArray) -> MLXArray) throws -> Float
    ) throws -> (loss: Float, norm: Float?) {
        let (keys, epsilon) = (try keys(number), settings.mezoEpsilon)
        func z(_ block: Int) -> MLXArray { MLXRandom.normal([model.layouts[block].trainedCount], key: keys[block]) }
        func moved(by distance: Float) throws -> Float {
            try loss { block, lora in
                let layout = model.layouts[block]
                return layout.replacing(in: lora, trained: layout.trained(in: lora) + distance * z(block))
            }
        }
        let (plus, minus) = (try moved(by: epsilon), try moved(by: -epsilon))
        let g = (plus - minus) / (2 * epsilon)
        guard g.isFinite else { throw try model.notFinite(examples) }
        model.isWarm = true
        return ((plus + minus) / 2, try updateAll(number, keys) { g * z($0) })
    }
}
