import MLX
import MeSPBundle

/// Gets the gradient of a block's trained parameters `[trainedCount]` from a backward pass, from the last block to the first.
package typealias GradientSink = (_ block: Int, _ gradient: MLXArray) throws -> Void

/// The updates of the trained parameters from their gradients, with all that they need from step to step; see `TrainingArrays`.
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

    /// The result of a step. With `skipBadSteps`, where it throws `NotFinite`, parameters and state are as before.
    func undoingFailure<R>(_ step: () throws -> R) throws -> R {
        let before = settings.skipBadSteps ? (model.lora, optimizer) : nil
        do {
            return try step()
        } catch let error as NotFinite {
            if let before { (model.lora, optimizer, model.clock.hasChanged) = (before.0, before.1, false) }
            throw error
        }
    }

    // MARK: - What a backward pass does with gradients

    /// Whether gradients are summed. Otherwise each updates its block at once.
    var areSummed: Bool { sums != nil }

    /// Updates each block at once.
    func makeUpdateSink(_ number: Int, _ keys: [MLXArray]) -> GradientSink {
        { [self] block, gradient in try update(block, number, keys[block]) { gradient } }
    }

    /// Begins sums, and adds each gradient to its block's.
    func makeSumSink() -> GradientSink {
        sums?.beginSums()
        return { [self] block, gradient in try model.clock.repeating { try sums?.add(gradient, block) } }
    }

    /// The sum of a block's gradients.
    func sum(_ block: Int) throws -> MLXArray {
        guard let sums else { preconditionFailure("gradients are not summed") }
        return try sums.read(block)
    }

    // MARK: - Updates

    /// One block's update, from the gradient of its trained parameters. On a GPU nothing changes before all that it makes is confirmed.
    ///
    /// - Parameter gradient: makes the gradient from confirmed arrays.
    func update(_ block: Int, _ number: Int, _ key: MLXArray, _ gradient: () throws -> MLXArray) throws {
        let update = try model.clock.repeating {
            var gradient = try gradient()
            try model.check(gradient, block)
            let (layout, parameters) = (model.layouts[block], try model.parameters(block))
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
            MLXErrors.evaluateOnGPU(update.arrays)
            return update
        }
        model.clock.hasChanged = true
        try optimizer.keep(update, block: block)
        try model.lora.write(update.w, block)
    }

    /// Updates every trained block, once all gradients are there, with their norm limited to `maxGradNorm`.
    ///
    /// - Returns: the norm before, nil where it isn't limited.
    func updateAll(_ number: Int, _ keys: [MLXArray], gradient: (_ block: Int) throws -> MLXArray) throws -> Float? {
        let (factor, norm) = try settings.maxGradNorm.map { try computeClipping(to: $0, gradient) } ?? (1, nil)
        for block in model.trained {
            try model.clock.boundary()
            try update(block, number, keys[block]) { factor * (try gradient(block)) }
        }
        model.clock.hasChanged = false
        return norm
    }

    /// A random key for each block in a step.
    func randomKeys(_ number: Int) throws -> [MLXArray] {
        let seed = scattered(settings.seed) &+ UInt64(settings.firstStep + number)
        return try model.clock.repeating {
            let keys = MLXRandom.split(key: MLXRandom.key(seed), into: model.blocks.count)
            MLXErrors.evaluateOnGPU(keys)
            return keys
        }
    }

    /// Bytes written to offloaded arrays since the start.
    var writtenBytes: Int {
        [model.lora, sums, clippedSums, optimizer.first, optimizer.second].reduce(0) { $0 + ($1?.written ?? 0) }
    }
}

/// The first output of SplitMix64 with this state. Neighbouring seeds lie so far apart afterwards that counting steps from one does not
/// lead to the other.
func scattered(_ seed: UInt64) -> UInt64 {
    var z = seed &+ 0x9e37_79b9_7f4a_7c15
    z = (z ^ (z >> 30)) &* 0xbf58_476d_1ce4_e5b9
    z = (z ^ (z >> 27)) &* 0x94d0_49bb_1331_11eb
    return z ^ (z >> 31)
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
