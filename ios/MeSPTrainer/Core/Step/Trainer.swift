import Foundation
import MLX
import MeSPBundle

/// LoRA training on a bundle, one block at a time. Not for use from several threads at once.
///
/// A step is the paper's algorithm. With block inputs x₀, x₁, … of a model of L blocks:
///
///     forward     x₀ = embed(tokens),  xₗ₊₁ = blockₗ(xₗ),  of which only the inputs stay
///     head        loss, d = ∂loss/∂x_L
///     for l = L − 1 … 0:
///         recompute         the intermediates of block l, from xₗ
///         differentiate     g = the gradient of block l's LoRA matrices,  d ← ∂loss/∂xₗ
///         update            block l's LoRA matrices with g
///         free              everything but d
///
/// Updating at once is exact: no block before reads block l's matrices again. Of several sequences g is the sum: they go through the
/// model one after the other, or each block takes all of them before the next (`Plan.order`).
package final class Trainer {
    /// A sequence of a step, and the weight of each of its targets in the step's loss.
    package typealias Part = (example: Example, weight: Float)

    /// One forward and backward pass of some sequences, which go through each block together.
    ///
    /// - Parameter update: gets the gradient of each block's trained parameters, the sum of the sequences', from the last block to the
    ///   first, as soon as it is there, and may change that block's parameters.
    /// - Returns: the sum of the losses, each times its part's weight.
    /// - Throws: `NotFinite` where that is not finite; then nothing was updated.
    package func backpropagate(_ parts: [Part], update: (_ block: Int, _ gradient: MLXArray) throws -> Void) throws
        -> Float
    {
        // Of each sequence the last block's output, then d.
        var states = try forward(parts.map(\.example))
        var loss: Float = 0
        try model.bundle.withHead { _ in
            for (sequence, part) in parts.enumerated() {
                let (sum, d) = try head(states[sequence], part.example, weight: part.weight)
                loss += part.weight * sum
                states[sequence] = d
            }
        }
        try backward(&states, update: update)
        return loss
    }

    /// Forward: each block's inputs stay. All sequences go through a block while its weights are mapped.
    ///
    /// - Parameter first: the number of the first sequence, among those whose inputs stay. The last blocks' intermediates, where the plan
    ///   has memory for them, stay of a pass that begins at 0.
    /// - Returns: the last block's outputs.
    func forward(_ examples: [Example], first: Int = 0) throws -> [MLXArray] {
        kept = [:]
        var states = try examples.map(model.embed)
        let contexts = try zip(examples, states).map { try model.context($0, x0: $1) }
        for (sequence, context) in contexts.enumerated() { self.contexts[first + sequence] = context }
        for block in model.blocks {
            try model.bundle.withBlock(block) { weights in
                let lora = try model.parameters(block)
                for sequence in states.indices {
                    let (index, x) = (inputIndex(block, first + sequence), states[sequence])
                    let beside = try model.beside(block, contexts[sequence], lending: x, lora, weights)
                    if block >= trained[0] { try inputs.write(x, index) }
                    if first == 0, keepsIntermediates(block) {
                        let outputs = try model.outputs(block, x, lora, weights, beside: beside)
                        (states[sequence], kept[index]) = (outputs.y, outputs.intermediates)
                    } else {
                        states[sequence] = try model.output(block, x, lora, weights, beside: beside)
                    }
                }
            }
        }
        return states
    }

    /// The sum of a sequence's losses, and its gradient by the last block's output, times `weight`.
    ///
    /// - Throws: `NotFinite` where the loss is not finite.
    func head(_ y: MLXArray, _ example: Example, weight: Float) throws -> (loss: Float, dy: MLXArray) {
        let (loss, dy) = try model.lossAndGradient(y, example, scale: weight)
        guard loss.isFinite else { throw try model.notFinite([example]) }
        return (loss, dy)
    }

    /// Backward, from the last block: recompute, differentiate, update, free.
    ///
    /// - Parameters:
    ///   - d: of each sequence the gradient of the last block's output; replaced by that of the first trained block's input.
    ///   - first: as in the forward pass.
    func backward(
        _ d: inout [MLXArray], first: Int = 0, update: (_ block: Int, _ gradient: MLXArray) throws -> Void
    ) throws {
        for block in (trained[0]..<model.blocks.upperBound).reversed() {
            var sum: MLXArray?
            try model.bundle.withBlock(block) { weights in
                for sequence in d.indices {
                    let changed = sums == nil && block < model.blocks.upperBound - 1
                    try clock.boundary(changed: changed)
                    try clock.timed(\.backward) {
                        let gradient = try gradient(
                            block, first + sequence, weights, d: &d[sequence], addedTo: sum, changed: changed)
                        if sequence < d.count - 1 {
                            sum = gradient
                        } else if trained.contains(block) {
                            try update(block, gradient)
                        }
                        model.freeCache()
                    }
                }
            }
        }
        for sequence in d.indices { contexts[first + sequence] = nil }
        model.isWarm = true
    }

    /// The gradient of a block's trained parameters, from its input of a sequence; d goes from dy to dx. Both are evaluated.
    ///
    /// Where a GPU fails, it is made again from the block's input, d and the parameters, which are held until it is confirmed.
    /// - Parameters:
    ///   - sum: of the sequences before.
    ///   - changed: whether the step has changed parameters.
    private func gradient(
        _ block: Int, _ sequence: Int, _ weights: BlockWeights, d: inout MLXArray, addedTo sum: MLXArray?, changed: Bool
    ) throws -> MLXArray {
        let input = inputIndex(block, sequence)
        let x = try inputs.take(input)
        var intermediates = kept.removeValue(forKey: input)
        let areKept = intermediates != nil
        guard let context = contexts[sequence] else { preconditionFailure("a sequence that did not run forward") }
        // Keys and values that several blocks take: by the block that has them.
        let owner = model.bundle.architecture.keysOf(block) ?? block
        var shared = context.gradients.removeValue(forKey: owner)
        let held = MLXErrors.held((d, shared))
        let gradient = try clock.repeating(changed: changed) {
            if let held { (d, shared) = held }
            let (lora, beside) = (try model.parameters(block), try model.beside(block, context))
            var gradient: MLXArray
            if settings.method == .mebp {
                gradient = try model.automaticGradient(block, x, lora, weights, beside, d: &d, shared: &shared)
            } else {
                gradient = try model.withWorkspace {
                    let forward =
                        try intermediates.take()
                        ?? model.recompute(block, x, lora, weights, beside: beside, all: areKept)
                    return model.block(block, x, lora, weights, beside: beside)
                        .gradient(x: x, consume forward, d: &d, wantsInput: block > trained[0], shared: &shared)
                }
            }
            if let sum {
                gradient = sum + gradient
                eval(gradient)
            }
            return gradient
        }
        if owner >= trained[0] { context.gradients[owner] = shared }
        return gradient
    }

    /// The index of a block's input of a sequence among `inputs`.
    private func inputIndex(_ block: Int, _ sequence: Int) -> Int { sequence * model.blocks.count + block }

    // MARK: - A step

    package struct StepResult {
        /// Nats a token.
        var loss: Float
        /// The targets that counted.
        var tokens: Int
        /// The inputs up to each sequence's last target that counted.
        var inputTokens: Int
        /// ‖∂loss/∂lora‖₂ over all blocks, before clipping; of DP-SGD the mean of the examples'. nil where it isn't clipped.
        var gradientNorm: Float?

        // Of preference data, the means over its pairs or answers.

        /// The difference of the rewards of chosen or good answers and the others.
        var margin: Float?
        /// The share of pairs whose chosen answer has the higher reward; of single answers the share on the right side of β k.
        var accuracy: Float?
        var rewardChosen: Float?
        var rewardRejected: Float?
        /// An estimate of the divergence from π₀, in nats an answer: of KTO's its k, elsewhere the mean of log π / π₀ over the data's answers.
        var kl: Float?

        // Of answers that were sampled.

        /// The mean over all answers.
        var reward: Float?
        /// The answers', with those that end them.
        var sampledTokens: Int?
        /// The time that sampling took.
        var samplingSeconds: Double?
    }

    /// One update from some sequences, whose loss is the mean over all their counted targets.
    ///
    /// One after the other, sequences take the memory of one and of a sum of gradients, however many they are; by blocks, of all their block
    /// inputs, and unless the update needs all gradients at once, of one block's sum.
    /// - Parameter number: of the step, from 0.
    /// - Throws: `NotFinite`. With `skipBadSteps` nothing has changed then; otherwise some blocks may have been updated.
    package func step(_ examples: [Example], number: Int) throws -> StepResult {
        let weight = 1 / Float(examples.reduce(0) { $0 + $1.counted.count })
        return try step(examples.map { (example: $0, weight: weight) }, number: number)
    }

    /// One update from sequences whose weights are given.
    func step(_ parts: [Part], number: Int) throws -> StepResult {
        let (loss, norm) = try takingBack {
            settings.method.hasBackwardPass ? try firstOrderStep(parts, number) : try zerothOrderStep(parts, number)
        }
        return StepResult(
            loss: loss, tokens: parts.reduce(0) { $0 + $1.example.counted.count },
            inputTokens: parts.reduce(0) { $0 + $1.example.inputCount }, gradientNorm: norm)
    }

    private func firstOrderStep(_ parts: [Part], _ number: Int) throws -> (loss: Float, norm: Float?) {
        let keys = try keys(number)
        sums?.beginSums()
        var loss: Float = 0
        for group in plan.order == .blocks ? [parts] : parts.map({ [$0] }) {
            loss += try backpropagate(group) { block, gradient in
                if sums == nil {
                    try update(block, number, keys[block]) { gradient }
                } else {
                    try gather(block, gradient)
                }
            }
        }
        return (loss, sums == nil ? nil : try updateFromSums(number, keys))
    }

    /// The result of `step`. With `skipBadSteps`, where it throws `NotFinite`, parameters and state are as before.
    func takingBack<R>(_ step: () throws -> R) throws -> R {
        let before = settings.skipBadSteps ? (model.lora, optimizer) : nil
        do {
            return try step()
        } catch let error as NotFinite {
            if let before { (model.lora, optimizer) = before }
            throw error
        }
    }

    /// Adds a sequence's gradient of a block to its sum.
    func gather(_ block: Int, _ gradient: MLXArray) throws {
        guard sums != nil else { preconditionFailure("gradients are not summed") }
        try clock.repeating { try sums?.add(gradient, block) }
    }

    /// Updates every trained block from the sums; the norm is `updateAll`'s.
    func updateFromSums(_ number: Int, _ keys: [MLXArray]) throws -> Float? {
        guard let sums else { preconditionFailure("gradients are not summed") }
        return try updateAll(number, keys, gradient: sums.read)
    }

    /// A random key for each block in a step.
    func keys(_ number: Int) throws -> [MLXArray] {
        let seed = Self.scattered(settings.seed) &+ UInt64(settings.firstStep + number)
        return try clock.repeating {
            let keys = MLXRandom.split(key: MLXRandom.key(seed), into: model.blocks.count)
            MLXErrors.evaluateOnGPU(keys)
            return keys
        }
    }

    /// The first output of SplitMix64 with this state. Neighbouring seeds lie so far apart afterwards that counting steps from one does not
    /// lead to the other.
    static func scattered(_ seed: UInt64) -> UInt64 {
        var z = seed &+ 0x9e37_79b9_7f4a_7c15
        z = (z ^ (z >> 30)) &* 0xbf58_476d_1ce4_e5b9
        z = (z ^ (z >> 27)) &* 0x94d0_49bb_1331_11eb
        return z ^ (z >> 31)
    }

    // MARK: - What a step needs

    package let model: BlockwiseModel
    package let clock = StepClock()
    package let settings: RunSettings
    let plan: Plan
    /// The blocks with parameters, which are trained, ascending. `Manifest.check` has found that there are some.
    package let trained: [Int]
    /// The block inputs, from the forward to the backward pass: all of a sequence, then of the next.
    private var inputs: BlockArrays
    /// The other inputs of the blocks, of the sequences whose block inputs are kept.
    private var contexts = [Int: BlockwiseModel.Context]()
    /// The last blocks' intermediates that stay from the forward to the backward pass, by the index of the block's input.
    private var kept = [Int: Intermediates]()
    /// Sums of gradients, where an update needs more than one backward pass gives at a time.
    var sums: BlockArrays?
    /// With DP-SGD the sums of clipped gradients; `sums` are then those of one example.
    var clippedSums: BlockArrays?
    var optimizer: Optimizer
    /// Whether an update has changed parameters since this was false.
    var hasChanged = false
    /// The parameters that the run began with, where answers are compared with that model or an update is held near it.
    let start: BlockArrays?
    /// log π₀ of answers, in nats, as they are met.
    var references = [JudgedAnswer.Source: Float]()

    /// - Parameters:
    ///   - settings: `Manifest.check` must have found their length and rank in the bundle.
    ///   - folder: where the files of offloaded arrays are made, if the plan asks for any.
    package init(bundle: ModelBundle, settings: RunSettings, plan: Plan, folder: URL) throws {
        let architecture = bundle.architecture
        let blocks = architecture.numHiddenLayers
        let layouts = settings.layouts(of: architecture)
        self.settings = settings
        self.plan = plan
        trained = layouts.indices.filter { layouts[$0].count > 0 }

        let keepsMaps = bundle.processor.keepsMaps(plan)
        /// Arrays of the shape that a block's number of parameters gives.
        func arrays(_ shape: (_ parameters: Int) -> [Int], _ dtype: DType) throws -> BlockArrays {
            let largest = shape(layouts.map(\.count).max() ?? 0)
            let file =
                plan.offload == .all
                ? try ArrayFile(in: folder, shape: largest, dtype: dtype, keepsMaps: keepsMaps) : nil
            return BlockArrays(count: blocks, file: file, keepsPrevious: settings.skipBadSteps)
        }
        let trained = trained
        func zeros(_ shape: (_ parameters: Int) -> [Int], _ dtype: DType) throws -> BlockArrays {
            var arrays = try arrays(shape, dtype)
            for block in trained {
                try arrays.write(MLXArray.zeros(shape(layouts[block].trainedCount), dtype: dtype), block)
            }
            return arrays
        }
        let longest = [1, settings.seqLen, architecture.hiddenSize]
        let inputsFile =
            plan.offload != .none && settings.method.hasBackwardPass
            ? try ArrayFile(in: folder, shape: longest, dtype: bundle.dtype, keepsMaps: keepsMaps) : nil
        inputs = BlockArrays(count: plan.sequences(of: settings) * blocks, file: inputsFile)
        optimizer = try Optimizer(settings, zeros: zeros)
        sums = plan.gathersGradients(of: settings) ? try zeros({ [$0] }, .float32) : nil
        clippedSums = settings.dpClip == nil ? nil : try zeros({ [$0] }, .float32)
        var lora = try arrays({ [$0] }, settings.loraDtype.dtype)
        for block in trained {
            let initial = layouts[block].initial(seed: settings.seed, block: block)
            try lora.write(initial.asType(settings.loraDtype.dtype), block)
        }
        start = try Self.start(settings, architecture, layouts) { try arrays({ [$0] }, .float32) }
        model = try BlockwiseModel(bundle, settings, plan: plan, lora: lora, clock: clock)
    }

    /// The adapters of the settings, in each block.
    private static func start(
        _ settings: RunSettings, _ architecture: Architecture, _ layouts: [LoRALayout],
        arrays: () throws -> BlockArrays
    ) throws -> BlockArrays? {
        guard settings.keepsStart, let folder = settings.adapters else { return nil }
        var start = try arrays()
        let adapters = try settings.loadAdapters(from: URL(fileURLWithPath: folder), architecture: architecture)
        for (block, layout) in layouts.enumerated() where layout.count > 0 {
            try start.write(layout.part(of: adapters.lora[block], in: adapters.layouts[block]), block)
        }
        return start
    }

    /// Whether a block's intermediates stay from the forward to the backward pass.
    private func keepsIntermediates(_ block: Int) -> Bool {
        settings.method.readsIntermediates && block >= model.blocks.upperBound - plan.keptBlocks
    }

    /// Bytes written to offloaded arrays since the start.
    var writtenBytes: Int {
        [inputs, model.lora, sums, clippedSums, optimizer.first, optimizer.second].reduce(0) {
            $0 + ($1?.written ?? 0)
        }
    }
}
