import MLX
import MeSPBundle

/// A function that takes the gradient of a block's trained parameters `[trainedCount]`. A backward pass calls it for each drawn block, from the last
/// to the first.
package typealias GradientSink = (_ block: Int, _ gradient: MLXArray) throws -> Void

package final class Updates {
    let model: BlockwiseModel
    private var settings: RunSettings { model.settings }
    var optimizer: Optimizer
    private var sums: BlockArrays?
    var clippedSums: BlockArrays?
    private let start: BlockArrays?

    init(of model: BlockwiseModel, _ arrays: TrainingArrays) {
        (self.model, optimizer, start) = (model, arrays.optimizer, arrays.start)
        (sums, clippedSums) = (arrays.sums, arrays.clippedSums)
    }

    /// Returns the result of `step`. With `skipBadSteps`, restores the previous parameters and state if `step` throws `NotFinite`.
    func undoingFailure<R>(_ step: () throws -> R) throws -> R {
        let before = settings.skipBadSteps ? (model.lora.vectors, optimizer) : nil
        do {
            return try step()
        } catch let error as NotFinite {
            if let before { (model.lora.vectors, optimizer, model.work.hasChanged) = (before.0, before.1, false) }
            throw error
        }
    }

    // MARK: - Sinks of gradients

    var areSummed: Bool { sums != nil }

    func makeUpdateSink(_ number: Int, _ keys: [MLXArray]) -> GradientSink {
        { [self] block, gradient in try update(block, number, keys[block]) { gradient } }
    }

    func makeSumSink() -> GradientSink {
        sums?.beginSums()
        return { [self] block, gradient in try add(to: \.sums, block) { gradient } }
    }

    func add(
        to sums: ReferenceWritableKeyPath<Updates, BlockArrays?>, _ block: Int, _ array: () throws -> MLXArray
    ) throws {
        guard let old = self[keyPath: sums] else { return }
        let new = try model.work.confirmed { try old.sum(with: array(), block) }
        try self[keyPath: sums]?.writeSum(new, block)
    }

    func sum(_ block: Int) throws -> MLXArray {
        guard let sums else { preconditionFailure("gradients are not summed") }
        return try sums.read(block)
    }

    // MARK: - Updates

    /// Updates one block from the gradient of its trained parameters. On a GPU nothing changes before all results are evaluated without errors
    /// (`MLXErrors`).
    func update(_ block: Int, _ number: Int, _ key: MLXArray, _ gradient: () throws -> MLXArray) throws {
        // The number at the end confirms the results.
        let update = try model.work.repeating(confirms: false) {
            var gradient = try gradient()
            let (all, sum) = (gradient, gradient.sum())
            let (layout, parameters) = (model.lora.layouts[block], try model.lora.parameters(block))
            let old = layout.trained(in: parameters)
            if let mu = settings.proximalMu, let start = try start?.read(block) {
                gradient = gradient + mu * (old - layout.trained(in: start))
            }
            let rate = settings.learningRate(step: number, of: model.bundle.architecture)
            var update = try optimizer.update(
                old, gradient, block: block, rate: rate, factors: layout.rateFactors(ofB: settings.loraplusLrRatio))
            update.w = layout.replacing(in: parameters, trained: update.w)
            if settings.loraDtype == .bfloat16 {
                update.w = stochasticallyRounded(update.w, key: MLXRandom.split(key: key).0)
            }
            MLXErrors.evaluateOnGPU([sum] + update.arrays)
            guard try sum.number(Float.self).isFinite else { throw try model.notFinite(gradient: all, block) }
            return update
        }
        model.work.hasChanged = true
        try optimizer.keep(update, block: block)
        try model.lora.vectors.write(update.w, block)
    }

    /// Updates every drawn block after all gradients are computed, with the norm of the gradient clipped to `maxGradNorm`.
    ///
    /// - Returns: the norm before clipping; nil without clipping.
    func updateAll(_ number: Int, _ keys: [MLXArray], gradient: (_ block: Int) throws -> MLXArray) throws -> Float? {
        let (factor, norm) = try settings.maxGradNorm.map { try computeClipping(to: $0, gradient) } ?? (1, nil)
        for block in model.drawn {
            try model.work.boundary()
            try update(block, number, keys[block]) { factor * (try gradient(block)) }
        }
        model.work.hasChanged = false
        return norm
    }

    func randomKeys(_ number: Int) throws -> [MLXArray] {
        let seed = scattered(settings.seed) &+ UInt64(settings.firstStep + number)
        return try model.work.repeating {
            let keys = MLXRandom.split(key: MLXRandom.key(seed), into: model.blocks.count)
            MLXErrors.evaluateOnGPU(keys)
            return keys
        }
    }

    /// The bytes written so far to the offloaded arrays that steps change, without block inputs.
    var writtenBytes: Int {
        [model.lora.vectors, sums, clippedSums, optimizer.first, optimizer.second].reduce(0) { $0 + ($1?.written ?? 0) }
    }
}

/// Returns the first output of SplitMix64 with the state `seed`. Neighbouring seeds give distant outputs, so a step's number can be added to an
/// output.
func scattered(_ seed: UInt64) -> UInt64 {
    var z = seed &+ 0x9e37_79b9_7f4a_7c15
    z = (z ^ (z >> 30)) &* 0xbf58_476d_1ce4_e5b9
    z = (z ^ (z >> 27)) &* 0x94d0_49bb_1331_11eb
    return z ^ (z >> 31)
}

/// Returns x in bfloat16, with stochastic rounding: the expected value is x. Rounding to nearest would lose small updates.
///
/// The upper 16 bits of a float32 are the bfloat16 below it in magnitude. The probability that a uniform 16-bit number carries into them is
/// proportional to the lower 16 bits.
/// - Parameter x: float32 `[P]`
func stochasticallyRounded(_ x: MLXArray, key: MLXArray) -> MLXArray {
    let noise = MLXRandom.randInt(low: 0, high: 1 << 16, x.shape, type: UInt32.self, key: key)
    let upper = (x.view(dtype: .uint32) + noise) >> 16
    return upper.asType(.uint16).view(dtype: .bfloat16)
}
