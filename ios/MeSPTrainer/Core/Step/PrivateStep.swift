import MLX
import MeSPBundle

extension Trainer {
    /// One update from the examples that were drawn, by `privateStep`; each example's loss is the mean over its own targets.
    func step(drawn examples: some Sequence<Example>, number: Int, _ secret: SecretKey) throws -> StepResult {
        var (loss, tokens, inputTokens) = (Float(0), 0, 0)
        let (count, norm) = try privateStep(examples, number, secret) { example in
            let weight = 1 / Float(example.counted.count)
            loss += try backpropagate([(example, weight)], update: gather)
            tokens += example.counted.count
            inputTokens += example.inputCount
        }
        return StepResult(
            loss: loss / Float(max(count, 1)), tokens: tokens, inputTokens: inputTokens, gradientNorm: norm)
    }

    /// One update by DP-SGD (arXiv:1607.00133) from the examples that were drawn, which may be none:
    ///
    ///     g = (Σᵢ min(1, C / (‖gᵢ‖₂ + 10⁻⁶)) gᵢ + Z C n) / B,      n ~ N(0, 1)
    ///
    /// gᵢ is an example's gradient by all trained blocks, C `dpClip`, Z `dpNoise`, and B `batchSize`, the expected number of examples. An
    /// example's norm is known when its backward pass has ended, so its gradient is kept until then, beside the sum.
    /// - Parameter gather: adds the gradients of an example to `sums`.
    /// - Returns: how many examples there were, and the mean of ‖gᵢ‖₂.
    func privateStep<E>(
        _ examples: some Sequence<E>, _ number: Int, _ secret: SecretKey, gather: (E) throws -> Void
    ) throws -> (count: Int, norm: Float?) {
        guard let clip = settings.dpClip, let noise = settings.dpNoise else {
            preconditionFailure("the settings are not of DP-SGD")
        }
        var (count, norms) = (0, Float(0))
        clippedSums?.beginSums()
        for example in examples {
            sums?.beginSums()
            try gather(example)
            guard let sums else { preconditionFailure("gradients are not summed") }
            let (factor, norm) = try clipping(to: clip, sums.read)
            for block in trained {
                try clock.repeating { try clippedSums?.add(factor * sums.read(block), block) }
            }
            (count, norms) = (count + 1, norms + norm)
        }
        _ = try updateAll(number, try keys(number)) { block in
            let key = MLXRandom.key(secret.noiseSeed(step: number, block: block))
            var sum = noise * clip * MLXRandom.normal([model.layouts[block].trainedCount], key: key)
            if count > 0, let clipped = try clippedSums?.read(block) { sum = clipped + sum }
            return sum / Float(settings.batchSize)
        }
        return (count, count > 0 ? norms / Float(count) : nil)
    }
}
