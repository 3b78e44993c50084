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
/// Updating at once is exact: no block before reads block l's matrices again.
final class Trainer {
    /// One forward and backward pass.
    ///
    /// - Parameter update: gets each trained block's gradient `[P]`, from the last block to the first, as soon as it is there, and may
    ///   change that block's parameters.
    /// - Returns: the sum of the losses of the counted targets, in nats. Where it is not finite, nothing was updated.
    func backpropagate(_ part: Part, update: (_ block: Int, _ gradient: MLXArray) throws -> Void) throws -> Float {
        try backpropagate(part.example, update: update) { try head($0, part.example, weight: part.weight) }
    }

    /// The same, with a loss of one's own.
    ///
    /// - Parameter head: gets the last block's output; returns the loss, and its gradient by that.
    private func backpropagate(
        _ example: Example, update: (_ block: Int, _ gradient: MLXArray) throws -> Void,
        head: (_ y: MLXArray) throws -> (loss: Float, dy: MLXArray)
    ) throws -> Float {
        var kept = [Int: Intermediates]()
        // d is the gradient of the head's input, and from here on of each block's output, then of its input.
        let (loss, d) = try head(forward(example) { kept[$0] = $1 })
        guard loss.isFinite else { return loss }
        try backward(consume d, &kept, update: update)
        return loss
    }

    /// Forward: each block's input stays.
    ///
    /// - Parameter keep: takes the last blocks' intermediates, where the plan has memory for them; nil makes none.
    /// - Returns: the last block's output.
    private func forward(_ example: Example, keep: ((_ block: Int, Intermediates?) -> Void)? = nil) throws -> MLXArray {
        var x = try model.embed(example)
        for block in model.blocks {
            if trained.contains(block) { try inputs.write(x, block) }
            let (y, kept) = try model.forward(block, x, model.parameters(block), keep: keep != nil && keeps(block))
            x = y
            keep?(block, kept)
        }
        return x
    }

    /// Backward, from the last block: recompute, differentiate, update, free.
    private func backward(
        _ d: consuming MLXArray, _ kept: inout [Int: Intermediates],
        update: (_ block: Int, _ gradient: MLXArray) throws -> Void
    ) throws {
        for block in trained.reversed() {
            try clock.boundary(changed: gradients == nil && block < model.blocks.upperBound - 1)
            try clock.timed(\.backward) {
                let x = try inputs.take(block)
                try update(block, gradient(block, x, kept.removeValue(forKey: block), d: &d))
                model.freeCache()
            }
        }
    }

    /// The sum of a sequence's losses, and its gradient by the last block's output, times `weight`.
    func head(_ y: MLXArray, _ example: Example, weight: Float) throws -> (loss: Float, dy: MLXArray) {
        let (loss, dy) = try model.head(y, example, gradientScale: weight)
        guard let dy else { preconditionFailure("the head was asked for a gradient") }
        return (loss, dy)
    }

    /// The gradient of a block's LoRA parameters `[P]`; d goes from dy to dx.
    private func gradient(_ block: Int, _ x: MLXArray, _ kept: Intermediates?, d: inout MLXArray) throws -> MLXArray {
        let gradient =
            if let automatic { try automatic(block, x, d: &d) } else { try structured(block, x, kept, d: &d) }
        return mask(block).map { gradient * $0 } ?? gradient
    }

    /// The structured backward pass: the block's forward pass again up to x_mid, unless it was kept, then the derivatives by hand.
    private func structured(_ block: Int, _ x: MLXArray, _ kept: Intermediates?, d: inout MLXArray) throws -> MLXArray {
        let lora = try model.parameters(block)
        return try model.withBlock(block) { weights in
            let intermediates = try kept ?? model.recompute(block, x, lora, weights)
            let backward = BlockBackward(
                weights: weights, lora: lora, layout: model.layouts[block], scale: model.scale, tile: model.tile(x))
            return backward(x: x, consume intermediates, d: &d, wantsInput: block > trained.lowerBound)
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
        /// ‖∂loss/∂lora‖₂ over all blocks, before clipping; nil where it isn't clipped.
        var gradientNorm: Float?
        /// Of a step on judged answers.
        var preference: PreferenceFigures?
    }

    /// One update from some batches of sequences.
    ///
    /// A batch's loss is the mean over all its counted targets, the step's the mean of its batches'. Sequences go one after the
    /// other, so that a step of any size takes the memory of one sequence and, where there are several, of a sum of gradients.
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
        let keys = keys(number)
        if settings.method == .mezo {
            let (loss, norm) = try takeZerothOrderStep(parts, number, keys)
            return StepResult(loss: loss, tokens: tokens, gradientNorm: norm)
        }

        var loss: Float = 0
        for (index, part) in parts.enumerated() {
            let sum = try backpropagate(part) { block, gradient in
                guard gradients != nil else { return try update(block, gradient, number, keys[block]) }
                try gather(gradient, block, first: index == 0)
            }
            loss += part.weight * sum
            guard loss.isFinite else { throw try model.notFinite([part.example]) }
        }
        let norm = gradients == nil ? nil : try updateGathered(number, keys)
        return StepResult(loss: loss, tokens: tokens, gradientNorm: norm)
    }

    /// A random key for each block in a step.
    func keys(_ number: Int) -> [MLXArray] {
        MLXRandom.split(key: MLXRandom.key(settings.seed &+ 1 &+ UInt64(number)), into: model.blocks.count)
    }

    // MARK: - Sums of gradients

    /// Adds the gradient of a sequence to the sums, which begin with the first.
    ///
    /// - Parameter head: gets the last block's output; returns a loss, which is not to be more than a number, and its gradient by that.
    func gather(_ example: Example, first: Bool, head: (_ y: MLXArray) throws -> (loss: Float, dy: MLXArray)) throws {
        let loss = try backpropagate(
            example, update: { block, gradient in try gather(gradient, block, first: first) }, head: head)
        guard loss.isFinite else { throw try model.notFinite([example]) }
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
        let (loss, dy) = try head(forward(example), example, weight: 1)
        swap(&inputs, &waitingInputs)
        return Waiting(loss: loss, dy: dy)
    }

    func gather(_ waiting: consuming Waiting, weight: Float) throws {
        swap(&inputs, &waitingInputs)
        let d = weight * waiting.dy
        var kept = [Int: Intermediates]()
        try backward(consume d, &kept) { block, gradient in try gather(gradient, block, first: false) }
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
        return (loss, try updateAll(number, keys) { g * mezo.z($0) })
    }

    func zerothOrder(_ keys: [MLXArray]) -> MeZO {
        MeZO(epsilon: settings.mezoEpsilon, keys: keys, layouts: model.layouts, trained: trained, mask: mask)
    }

    // MARK: - What a step needs

    let model: BlockwiseModel
    let clock = StepClock()
    let settings: RunSettings
    private let plan: Plan
    /// MeBP's gradients; nil where they are the structured backward pass's.
    private let automatic: AutomaticBackward?
    /// The blocks whose parameters are trained.
    let trained: Range<Int>
    /// The modules of these blocks that are trained.
    let modules: [Module]
    /// For each of the model's mixers what `mask` gives of its blocks.
    private let masks: [MLXArray]?
    /// The block inputs, from the forward to the backward pass.
    private var inputs: BlockArrays
    /// Those of a sequence that waits.
    private var waitingInputs: BlockArrays
    /// Sums of gradients, float32 `[P]` a block, where an update needs more than one backward pass gives at a time.
    private var gradients: BlockArrays?
    var optimizer: Optimizer
    /// The parameters that the run began with, where answers are compared with that model and it has adapters.
    let start: BlockArrays?
    /// log π₀ of answers, in nats, as they are met.
    var references = [JudgedAnswer.Source: Float]()

    /// - Parameters:
    ///   - settings: `Manifest.check` must have found their length and rank in the bundle.
    ///   - folder: where the files of offloaded arrays are made, if the plan asks for any.
    init(bundle: ModelBundle, settings: RunSettings, plan: Plan, folder: URL) throws {
        let architecture = bundle.architecture
        let blocks = architecture.numHiddenLayers
        let layouts = architecture.layouts(rank: settings.rank)
        self.settings = settings
        self.plan = plan
        trained = max(0, blocks - (settings.numLayers ?? blocks))..<blocks
        let modules = try settings.modules(of: architecture)
        self.modules = modules
        masks =
            modules == architecture.modules
            ? nil : architecture.kinds.map { LoRALayout(block: $0, rank: settings.rank).mask(modules) }

        let parameters = layouts.map(\.count)
        /// Of the shape that a block's P parameters give.
        func arrays(_ shape: (_ parameters: Int) -> [Int], _ dtype: DType) throws -> BlockArrays {
            let largest = shape(parameters.max() ?? 0)
            let file = plan.offload == .all ? try ArrayFile(in: folder, shape: largest, dtype: dtype) : nil
            return BlockArrays(count: blocks, file: file, keepsPrevious: settings.skipBadSteps)
        }
        let trained = trained
        func zeros(_ shape: (_ parameters: Int) -> [Int], _ dtype: DType) throws -> BlockArrays {
            var arrays = try arrays(shape, dtype)
            for block in trained { try arrays.write(MLXArray.zeros(shape(parameters[block]), dtype: dtype), block) }
            return arrays
        }
        let longest = [1, settings.seqLen, architecture.hiddenSize]
        func inputs(areKept: Bool) throws -> BlockArrays {
            let file = areKept && plan.offload != .none && settings.method != .mezo
            return BlockArrays(
                count: blocks, file: file ? try ArrayFile(in: folder, shape: longest, dtype: bundle.dtype) : nil)
        }
        self.inputs = try inputs(areKept: true)
        waitingInputs = try inputs(areKept: plan.keepsAnswer == true)
        optimizer = try Optimizer(settings, zeros: zeros)
        gradients = settings.gathersGradients ? try zeros({ [$0] }, .float32) : nil
        var lora = try arrays({ [$0] }, settings.loraDtype.dtype)
        for (block, layout) in layouts.enumerated() {
            try lora.write(layout.initial(seed: settings.seed, block: block).asType(settings.loraDtype.dtype), block)
        }
        start = try Self.start(settings, architecture) { try arrays({ [$0] }, .float32) }
        model = try BlockwiseModel(bundle, settings, plan: plan, lora: lora, clock: clock)
        automatic = settings.method == .mebp ? AutomaticBackward(model) : nil
    }

    /// The adapters of the settings, in each block.
    private static func start(
        _ settings: RunSettings, _ architecture: Architecture, arrays: () throws -> BlockArrays
    ) throws -> BlockArrays? {
        guard settings.keepsStart, let folder = settings.adapters else { return nil }
        var start = try arrays()
        let adapters = try loadAdapters(from: URL(fileURLWithPath: folder), architecture: architecture)
        for (block, vector) in adapters.lora.enumerated() { try start.write(vector, block) }
        return start
    }

    /// 1 for each parameter of a trained module of a block, 0 for the others, `[P]`; nil where all are trained.
    func mask(_ block: Int) -> MLXArray? { masks.map { $0[model.bundle.architecture.layers[block]] } }

    /// Whether a block's intermediates stay from the forward to the backward pass.
    private func keeps(_ block: Int) -> Bool {
        settings.method == .mesp && block >= model.blocks.upperBound - plan.keptBlocks
    }

    /// Bytes written to offloaded arrays since the start.
    var writtenBytes: Int {
        [inputs, waitingInputs, model.lora, gradients, optimizer.first, optimizer.second].reduce(0) {
            $0 + ($1?.written ?? 0)
        }
    }
}
