import MLX
import MeSPBundle

extension Trainer {
    /// Performs a step of DP-SGD (arXiv:1607.00133) on the sampled examples, which may be none:
    ///
    ///     g = (Σᵢ min(1, C / (‖gᵢ‖₂ + 10⁻⁶)) gᵢ + Z C n) / B,      n ~ N(0, 1)
    ///
    /// gᵢ is the gradient of an example's loss over the step's blocks. C is `dpClip`, Z is `dpNoise`, and B is `batchSize`, the expected number of
    /// examples.
    ///
    /// - Parameter losses: each depends on one example. The loss and the norm of the result are means over the examples.
    package func privateStep(
        _ losses: some Sequence<some StepLoss>, _ secret: SecretKey, number: Int
    ) throws -> StepResult {
        let settings = model.settings
        guard let clip = settings.dpClip, let noise = settings.dpNoise else {
            preconditionFailure("the settings are not of DP-SGD")
        }
        var (result, count, norms) = (StepResult(), 0, Float(0))
        beginStep(number)
        updates.clippedSums?.beginSums()
        for loss in losses {
            try loss.backpropagate(self, into: updates.makeSumSink(), &result)
            let (factor, norm) = try updates.computeClipping(to: clip, updates.sum)
            for block in model.drawn {
                try updates.add(to: \.clippedSums, block) { try factor * updates.sum(block) }
            }
            (count, norms) = (count + 1, norms + norm)
        }
        _ = try updates.updateAll(number, updates.randomKeys(number)) { block in
            let key = MLXRandom.key(secret.noiseSeed(step: number, block: block))
            var sum = noise * clip * MLXRandom.normal([model.lora.layouts[block].trainedCount], key: key)
            if count > 0, let clipped = try updates.clippedSums?.read(block) { sum = clipped + sum }
            return sum / Float(settings.batchSize)
        }
        if count > 0 { (result.sum, result.gradientNorm) = (result.sum / Double(count), norms / Float(count)) }
        return result
    }
}
