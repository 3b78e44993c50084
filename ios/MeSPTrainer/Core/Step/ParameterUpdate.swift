import MLX
import MeSPBundle

extension Trainer {
    /// One block's update, from the gradient of its trained parameters. On a GPU nothing changes before all that it makes is confirmed.
    ///
    /// - Parameter gradient: makes the gradient from confirmed arrays.
    func update(_ block: Int, _ number: Int, _ key: MLXArray, _ gradient: () throws -> MLXArray) throws {
        let update = try clock.repeating(changed: true) {
            var gradient = try gradient()
            try model.check(gradient, block)
            let (layout, parameters) = (model.layouts[block], try model.parameters(block))
            let old = layout.trained(in: parameters)
            if let mu = settings.proximalMu, let start = try start?.read(block) {
                gradient = gradient + mu * (old - layout.trained(in: start))
            }
            var update = try optimizer.update(old, gradient, block: block, rate: settings.learningRate(step: number))
            update.w = layout.replacing(in: parameters, trained: update.w)
            if settings.loraDtype == .bfloat16 {
                update.w = stochasticallyRounded(update.w, key: MLXRandom.split(key: key).0)
            }
            MLXErrors.evaluateOnGPU(update.arrays)
            return update
        }
        hasChanged = true
        try optimizer.keep(update, block: block)
        try model.lora.write(update.w, block)
    }

    /// Updates every trained block, once all gradients are there, with their norm limited to `maxGradNorm`.
    ///
    /// - Returns: the norm before, nil where it isn't limited.
    func updateAll(_ number: Int, _ keys: [MLXArray], gradient: (_ block: Int) throws -> MLXArray) throws -> Float? {
        let (factor, norm) = try settings.maxGradNorm.map { try clipping(to: $0, gradient) } ?? (1, nil)
        for block in trained {
            try clock.boundary(changed: block > trained[0])
            try update(block, number, keys[block]) { factor * (try gradient(block)) }
        }
        return norm
    }

    /// The factor of the gradient, min(1, limit / (‖g‖₂ + 10⁻⁶)), and ‖g‖₂ over all blocks.
    func clipping(to limit: Float, _ gradient: (_ block: Int) throws -> MLXArray) throws -> (factor: Float, norm: Float)
    {
        let norm = try clock.repeating {
            let squares = try trained.reduce(Float(0)) { try $0 + gradient($1).square().sum().number(Float.self) }
            // Clipping would make zeros of the finite gradients, and spread what is not.
            if !squares.isFinite { for block in trained { try model.check(gradient(block), block) } }
            return squares.squareRoot()
        }
        return (min(1, limit / (norm + 1e-6)), norm)
    }
}

/// `x` in bfloat16, rounded up or down at random, so that the expected value is x. To the nearest, an update below 1/256 of a parameter
/// would be lost.
///
/// A float32's upper 16 bits are the bfloat16 below it in magnitude; adding a uniform 16-bit number to the bits carries into them with the
/// probability that the lower 16 ask for.
/// - Parameter x: float32 `[P]`
func stochasticallyRounded(_ x: MLXArray, key: MLXArray) -> MLXArray {
    let noise = MLXRandom.randInt(low: 0, high: 1 << 16, x.shape, type: UInt32.self, key: key)
    let upper = (x.view(dtype: .uint32) + noise) >> 16
    return upper.asType(.uint16).view(dtype: .bfloat16)
}
