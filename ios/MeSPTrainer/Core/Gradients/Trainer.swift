import Foundation
import MLX

/// LoRA training on a bundle, one block at a time. Not for use from several threads at once.
///
/// A step is the paper's algorithm. With block inputs x₀, x₁, … of a model of L blocks:
///
///     forward     x₀ = embed(tokens),  xₗ₊₁ = blockₗ(xₗ),  of which only the inputs stay
///     head        loss, d = ∂loss/∂x_L
///     for l = L − 1 … 0:
///         recompute         what the derivatives read, from xₗ
///         differentiate     g = the gradient of block l's LoRA matrices,  d ← ∂loss/∂xₗ
///         update            block l's LoRA matrices with g
///         free              everything but d
///
/// Updating at once is exact: no block before reads block l's matrices again. Of several sequences g is the sum: they go through the
/// model one after the other, or each block takes all of them before the next (`Plan.order`).
final class Trainer {
    /// One forward and backward pass of some sequences, which go through each block together.
    ///
    /// - Parameter update: gets the gradient of each block's trained parameters, the sum of the sequences', from the last block to the first, as soon
    ///   as it is there, and may change that block's parameters.
    /// - Returns: the sum of the losses, each times its part's weight.
    /// - Throws: `NotFinite` where that is not finite; then nothing was updated.
    func backpropagate(_ parts: [Part], update: (_ block: Int, _ gradient: MLXArray) throws -> Void) throws -> Float {
        try backpropagate(parts.map(\.example), update: update) { y, sequence in
            let part = parts[sequence]
            let (loss, dy) = try head(y, part.example, weight: part.weight)
            return (part.weight * loss, dy)
        }
    }

    /// The same, with losses of one's own.
    ///
    /// - Parameter head: gets the last block's output and the number of its sequence; returns the loss, and its gradient by that.
    private func backpropagate(
        _ examples: [Example], update: (_ block: Int, _ gradient: MLXArray) throws -> Void,
        head: (_ y: MLXArray, _ sequence: Int) throws -> (loss: Float, dy: MLXArray)
    ) throws -> Float {
        var kept = [Int: Intermediates]()
        // Of each sequence the last block's output, then d: the gradient of the head's input, and from there on of each block's output,
        // then of its input.
        var states = try forward(examples) { kept[$0] = $1 }
        var sum: Float = 0
        try model.bundle.withHead { _ in
            for (sequence, example) in examples.enumerated() {
                let (loss, dy) = try head(states[sequence], sequence)
                sum += loss
                guard sum.isFinite else { throw try model.notFinite([example]) }
                states[sequence] = dy
            }
        }
        try backward(consume states, &kept, update: update)
        return sum
    }

    /// Forward: each block's inputs stay. All sequences go through a block while its weights are mapped.
    ///
    /// - Parameters:
    ///   - first: the number of the first sequence, among those whose inputs stay.
    ///   - keep: takes the last blocks' intermediates, where the plan has memory for them; nil makes none.
    /// - Returns: the last block's outputs.
    private func forward(
        _ examples: [Example], first: Int = 0, keep: ((_ place: Int, Intermediates?) -> Void)? = nil
    ) throws -> [MLXArray] {
        var states = try examples.map(model.embed)
        for block in model.blocks {
            try model.bundle.withBlock(block) { _ in
                for sequence in states.indices {
                    let place = place(block, first + sequence)
                    if block >= trained[0] { try inputs.write(states[sequence], place) }
                    let (y, kept) = try model.forward(
                        block, states[sequence], model.parameters(block), keep: keep != nil && keeps(block))
                    states[sequence] = y
                    keep?(place, kept)
                }
            }
        }
        return states
    }

    /// Backward, from the last block: recompute, differentiate, update, free.
    private func backward(
        _ d: consuming [MLXArray], first: Int = 0, _ kept: inout [Int: Intermediates],
        update: (_ block: Int, _ gradient: MLXArray) throws -> Void
    ) throws {
        let last = d.count - 1
        for block in (trained[0]..<model.blocks.upperBound).reversed() {
            var sum: MLXArray?
            try model.bundle.withBlock(block) { _ in
                for sequence in 0...last {
                    try clock.boundary(changed: gradients == nil && block < model.blocks.upperBound - 1)
                    try clock.timed(\.backward) {
                        let place = place(block, first + sequence)
                        let x = try inputs.take(place)
                        var gradient = try gradient(block, x, kept.removeValue(forKey: place), d: &d[sequence])
                        if let sum {
                            gradient = sum + gradient
                            eval(gradient)
                        }
                        if sequence < last {
                            sum = gradient
                        } else if trained.contains(block) {
                            try update(block, gradient)
                        }
                        model.freeCache()
                    }
                }
            }
        }
        model.isWarm = true
    }

    /// Where a block's input of a sequence is kept.
    private func place(_ block: Int, _ sequence: Int) -> Int { sequence * model.blocks.count + block }

    /// The sum of a sequence's losses, and its gradient by the last block's output, times `weight`.
    func head(_ y: MLXArray, _ example: Example, weight: Float) throws -> (loss: Float, dy: MLXArray) {
        let (loss, dy) = try model.head(y, example, gradientScale: weight)
        guard let dy else { preconditionFailure("the head was asked for a gradient") }
        return (loss, dy)
    }

    /// The gradient of a block's trained parameters; d goes from dy to dx.
    private func gradient(_ block: Int, _ x: MLXArray, _ kept: Intermediates?, d: inout MLXArray) throws -> MLXArray {
        if let automatic { try automatic(block, x, d: &d) } else { try structured(block, x, kept, d: &d) }
    }

    /// The structured backward pass: the block's forward pass again up to x_mid, unless it was kept, then the derivatives by hand.
    private func structured(_ block: Int, _ x: MLXArray, _ kept: Intermediates?, d: inout MLXArray) throws -> MLXArray {
        let lora = try model.parameters(block)
        return try model.withBlock(block) { weights in
            let intermediates = try kept ?? model.recompute(block, x, lora, weights)
            return model.block(block, x, lora, weights)
                .gradient(x: x, consume intermediates, d: &d, wantsInput: block > trained[0])
        }
    }

    // MARK: - A step

    /// A sequence of a step, and the weight of each of its targets in the step's loss.
    struct Part {
        let example: Example
        let weight: Float
    }

    struct StepResult {
        /// Nats a token.
        let loss: Float
        /// The targets that counted.
        let tokens: Int
        /// The inputs up to each sequence's last target that counted.
        let inputTokens: Int
        /// ‖∂loss/∂lora‖₂ over all blocks, before clipping; of DP-SGD the mean of the examples'. nil where it isn't clipped.
        var gradientNorm: Float?
        /// Of a step on judged answers.
        var preference: PreferenceFigures?
    }

    /// One update from some batches of sequences.
    ///
    /// A batch's loss is the mean over all its counted targets, the step's the mean of its batches'. One after the other, sequences take
    /// the memory of one and of a sum of gradients, however many they are; by blocks, of all their block inputs, and unless the update
    /// needs all gradients at once, of one block's sum.
    /// - Parameter number: of the step, from 0.
    /// - Throws: `NotFinite`. With `skipBadSteps` nothing has changed then; otherwise some blocks may have been updated.
    func step(_ batches: [[Example]], number: Int) throws -> StepResult {
        try takingBack { try takeStep(batches, number) }
    }

    /// What `step` gives. With `skipBadSteps`, where it throws `NotFinite`, parameters and state are as before.
    func takingBack(_ step: () throws -> StepResult) throws -> StepResult {
        let before = settings.skipBadSteps ? (model.lora, optimizer) : nil
        do {
            return try step()
        } catch let error as NotFinite {
            if let before { (model.lora, optimizer) = before }
            throw error
        }
    }

    private func takeStep(_ batches: [[Example]], _ number: Int) throws -> StepResult {
        let parts = batches.flatMap { batch in
            let counted = batch.reduce(0) { $0 + $1.counted.count }
            return batch.map { Part(example: $0, weight: 1 / Float(counted * batches.count)) }
        }
        let tokens = parts.reduce(0) { $0 + $1.example.counted.count }
        let inputTokens = parts.reduce(0) { $0 + $1.example.inputCount }
        let keys = keys(number)
        if settings.method == .mezo {
            let (loss, norm) = try takeZerothOrderStep(parts, number, keys)
            return StepResult(loss: loss, tokens: tokens, inputTokens: inputTokens, gradientNorm: norm)
        }

        var loss: Float = 0
        let groups = plan.order == .blocks ? [parts] : parts.map { [$0] }
        for (index, group) in groups.enumerated() {
            loss += try backpropagate(group) { block, gradient in
                guard gradients != nil else { return try update(block, gradient, number, keys[block]) }
                try gather(gradient, block, first: index == 0)
            }
        }
        let norm = gradients == nil ? nil : try updateGathered(number, keys)
        return StepResult(loss: loss, tokens: tokens, inputTokens: inputTokens, gradientNorm: norm)
    }

    /// A random key for each block in a step.
    func keys(_ number: Int) -> [MLXArray] {
        let seed = Self.scattered(settings.seed) &+ UInt64(settings.firstStep + number)
        return MLXRandom.split(key: MLXRandom.key(seed), into: model.blocks.count)
    }

    /// The first output of SplitMix64 with this state. Neighbouring seeds lie so far apart afterwards that counting steps from one does not
    /// lead to the other.
    private static func scattered(_ seed: UInt64) -> UInt64 {
        var z = seed &+ 0x9e37_79b9_7f4a_7c15
        z = (z ^ (z >> 30)) &* 0xbf58_476d_1ce4_e5b9
        z = (z ^ (z >> 27)) &* 0x94d0_49bb_1331_11eb
        return z ^ (z >> 31)
    }

    // MARK: - Sums of gradients

    /// Adds the gradient of a sequence to the sums, which begin with the first.
    ///
    /// - Parameter head: gets the last block's output; returns a loss, which is not to be more than a number, and its gradient by that.
    func gather(_ example: Example, first: Bool, head: (_ y: MLXArray) throws -> (loss: Float, dy: MLXArray)) throws {
        _ = try backpropagate(
            [example], update: { block, gradient in try gather(gradient, block, first: first) },
            head: { y, _ in try head(y) })
    }

    /// A sequence whose forward pass is done, and whose block inputs wait for the weight of its gradient.
    struct Waiting {
        let loss: Float
        /// By the last block's output.
        fileprivate let dy: MLXArray
    }

    /// The forward pass of a sequence, whose gradient `gather` adds to sums that another has begun; nil where the plan keeps no inputs
    /// for that.
    func forwardToWait(_ example: Example) throws -> Waiting? {
        guard plan.keepsAnswer == true else { return nil }
        let (loss, dy) = try head(forward([example], first: 1)[0], example, weight: 1)
        return Waiting(loss: loss, dy: dy)
    }

    func gather(_ waiting: consuming Waiting, weight: Float) throws {
        let d = [weight * waiting.dy]
        var kept = [Int: Intermediates]()
        try backward(consume d, first: 1, &kept) { block, gradient in try gather(gradient, block, first: false) }
    }

    private func gather(_ gradient: MLXArray, _ block: Int, first: Bool) throws {
        guard let sums = gradients else { preconditionFailure("gradients are not gathered") }
        try gradients?.write(first ? gradient : sums.read(block) + gradient, block)
    }

    /// Updates every trained block from the sums; the norm is `updateAll`'s.
    func updateGathered(_ number: Int, _ keys: [MLXArray]) throws -> Float? {
        guard let sums = gradients else { preconditionFailure("gradients were not gathered") }
        return try updateAll(number, keys) { try sums.read($0) }
    }

    /// - Returns: the mean of MeZO's two losses, and the norm of the gradient where it is clipped.
    private func takeZerothOrderStep(_ parts: [Part], _ number: Int, _ keys: [MLXArray]) throws -> (Float, Float?) {
        let mezo = zerothOrder(keys)
        let (loss, g) = try mezo.slope { moved in
            try parts.reduce(0) { try $0 + $1.weight * model.loss($1.example, parameters: moved) }
        }
        guard g.isFinite else { throw try model.notFinite(parts.map(\.example)) }
        model.isWarm = true
        return (loss, try updateAll(number, keys) { g * mezo.z($0) })
    }

    func zerothOrder(_ keys: [MLXArray]) -> MeZO {
        MeZO(epsilon: settings.mezoEpsilon, keys: keys, layouts: model.layouts)
    }

    // MARK: - What a step needs

    let model: BlockwiseModel
    let clock = StepClock()
    let settings: RunSettings
    private let plan: Plan
    /// MeBP's gradients; nil where they are the structured backward pass's.
    private let automatic: AutomaticBackward?
    /// The blocks with parameters, which are trained, ascending. `Manifest.check` has found that there are some.
    let trained: [Int]
    /// The block inputs, from the forward to the backward pass: all of a sequence, then of the next.
    private var inputs: BlockArrays
    /// Sums of gradients, a flat float32 vector a trained block, where an update needs more than one backward pass gives at a time.
    private(set) var gradients: BlockArrays?
    /// Of DP-SGD the sum of clipped gradients, likewise; `gradients` are then those of one example.
    var clippedSums: BlockArrays?
    var optimizer: Optimizer
    /// The parameters that the run began with, where answers are compared with that model or an update is held near it.
    let start: BlockArrays?
    /// log π₀ of answers, in nats, as they are met.
    var references = [JudgedAnswer.Source: Float]()

    /// - Parameters:
    ///   - settings: `Manifest.check` must have found their length and rank in the bundle.
    ///   - folder: where the files of offloaded arrays are made, if the plan asks for any.
    init(bundle: ModelBundle, settings: RunSettings, plan: Plan, folder: URL) throws {
        let architecture = bundle.architecture
        let blocks = architecture.numHiddenLayers
        let layouts = settings.layouts(of: architecture)
        self.settings = settings
        self.plan = plan
        trained = layouts.indices.filter { layouts[$0].count > 0 }

        let keepsMaps = bundle.products == .dense || plan.keepsMaps == true
        /// Of the shape that this many parameters of a block give.
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
            plan.offload != .none && settings.method != .mezo
            ? try ArrayFile(in: folder, shape: longest, dtype: bundle.dtype, keepsMaps: keepsMaps) : nil
        inputs = BlockArrays(count: plan.sequences(of: settings) * blocks, file: inputsFile)
        optimizer = try Optimizer(settings, zeros: zeros)
        gradients = plan.gathersGradients(of: settings) ? try zeros({ [$0] }, .float32) : nil
        clippedSums = settings.dpClip == nil ? nil : try zeros({ [$0] }, .float32)
        var lora = try arrays({ [$0] }, settings.loraDtype.dtype)
        for block in trained {
            let initial = layouts[block].initial(seed: settings.seed, block: block)
            try lora.write(initial.asType(settings.loraDtype.dtype), block)
        }
        start = try Self.start(settings, architecture, layouts) { try arrays({ [$0] }, .float32) }
        model = try BlockwiseModel(bundle, settings, plan: plan, lora: lora, clock: clock)
        automatic = settings.method == .mebp ? AutomaticBackward(model) : nil
    }

    /// The adapters of the settings, in each block.
    private static func start(
        _ settings: RunSettings, _ architecture: Architecture, _ layouts: [LoRALayout],
        arrays: () throws -> BlockArrays
    ) throws -> BlockArrays? {
        guard settings.keepsStart, let folder = settings.adapters else { return nil }
        var start = try arrays()
        let adapters = try loadAdapters(
            from: URL(fileURLWithPath: folder), architecture: architecture, onlyB: settings.freezeA)
        for (block, layout) in layouts.enumerated() where layout.count > 0 {
            try start.write(layout.part(of: adapters.lora[block]), block)
        }
        return start
    }

    /// Whether a block's intermediates stay from the forward to the backward pass.
    private func keeps(_ block: Int) -> Bool {
        settings.method == .mesp && block >= model.blocks.upperBound - plan.keptBlocks
    }

    /// Bytes written to offloaded arrays since the start.
    var writtenBytes: Int {
        [inputs, model.lora, gradients, clippedSums, optimizer.first, optimizer.second].reduce(0) {
            $0 + ($1?.written ?? 0)
        }
    }
}
