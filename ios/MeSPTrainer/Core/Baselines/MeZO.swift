import MLX
import MeSPBundle

extension Trainer {
    /// Performs one update by MeZO, which estimates the gradient from two forward passes. z ~ N(0, 1) is drawn from a seed, and again, block by
    /// block, each time it is needed:
    ///
    ///     ℒ± = ℒ(lora ± ε z)        g = (ℒ₊ − ℒ₋) / 2ε        ∂ℒ/∂lora ≈ g z
    ///
    /// - Parameter losses: their sum is ℒ. The step's loss is the mean of ℒ₊ and ℒ₋.
    func stepByMeZO(_ losses: [some StepLoss], number: Int) throws -> StepResult {
        let (keys, epsilon) = (try updates.randomKeys(number), model.settings.mezoEpsilon)
        func z(_ block: Int) -> MLXArray {
            MLXRandom.normal([model.lora.layouts[block].trainedCount], key: keys[block])
        }
        var result = StepResult()
        func loss(movedBy distance: Float) throws -> Float {
            result = StepResult()
            for loss in losses {
                try loss.score(self, &result) { block, lora in
                    let layout = model.lora.layouts[block]
                    return layout.replacing(in: lora, trained: layout.trained(in: lora) + distance * z(block))
                }
            }
            return result.loss
        }
        let (plus, minus) = (try loss(movedBy: epsilon), try loss(movedBy: -epsilon))
        let g = (plus - minus) / (2 * epsilon)
        guard g.isFinite else { throw try model.notFinite(losses.flatMap(\.examples)) }
        model.work.isWarm = true
        result.sum = Double((plus + minus) / 2)
        result.gradientNorm = try updates.updateAll(number, keys) { g * z($0) }
        return result
    }
}
