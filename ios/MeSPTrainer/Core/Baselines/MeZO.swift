import MLX

/// MeZO's estimate of the gradient from two forward passes: with z ~ N(0, 1) from a seed,
///
///     g = (L(lora + ε z) − L(lora − ε z)) / 2ε,      ∂L/∂lora ≈ g z
///
/// z is drawn again, block by block, each time it is needed.
struct MeZO {
    let epsilon: Float
    /// A key of the random numbers for each block.
    let keys: [MLXArray]
    let layouts: [LoRALayout]

    /// - Parameter loss: L with the trained of each block's parameters `[P]` moved.
    /// - Returns: the mean of the two losses, and g.
    func slope(loss: (_ moved: (_ block: Int, _ lora: MLXArray) -> MLXArray) throws -> Float) rethrows
        -> (loss: Float, g: Float)
    {
        func moved(by distance: Float) throws -> Float {
            try loss { block, lora in
                let layout = layouts[block]
                return layout.replacing(in: lora, trained: layout.trained(in: lora) + distance * z(block))
            }
        }
        let (plus, minus) = (try moved(by: epsilon), try moved(by: -epsilon))
        return ((plus + minus) / 2, (plus - minus) / (2 * epsilon))
    }

    /// The direction of a block's trained parameters.
    func z(_ block: Int) -> MLXArray { MLXRandom.normal([layouts[block].trainedCount], key: keys[block]) }
}

extension Trainer {
    /// - Returns: the mean of MeZO's two losses, and the norm of the gradient where it is clipped.
    func zerothOrderStep(_ parts: [Part], _ number: Int) throws -> (loss: Float, norm: Float?) {
        try zerothOrderStep(number, of: parts.map(\.example)) { moved in
            try parts.reduce(0) { try $0 + $1.weight * model.loss($1.example, parameters: moved) }
        }
    }

    /// MeZO's step for any loss.
    ///
    /// - Parameters:
    ///   - examples: that the loss is of.
    ///   - loss: with each block's parameters moved.
    func zerothOrderStep(
        _ number: Int, of examples: [Example],
        loss: (_ moved: (_ block: Int, _ lora: MLXArray) -> MLXArray) throws -> Float
    ) throws -> (loss: Float, norm: Float?) {
        let keys = keys(number)
        let mezo = MeZO(epsilon: settings.mezoEpsilon, keys: keys, layouts: model.layouts)
        let (loss, g) = try mezo.slope(loss: loss)
        guard g.isFinite else { throw try model.notFinite(examples) }
        model.isWarm = true
        return (loss, try updateAll(number, keys) { g * mezo.z($0) })
    }
}
