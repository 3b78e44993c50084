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
        // Forward: each block's input stays, and the last blocks' intermediates where the plan has memory for them.
        var x = try model.embed(part.example)
        var kept = [Int: Intermediates]()
        for block in model.blocks {
            if trained.contains(block) { try inputs.write(x, block) }
            (x, kept[block]) = try model.forward(block, x, model.parameters(block), keep: keeps(block))
        }

        // Head: d is the gradient of its input, and from here on of each block's output, then of its input.
        let (loss, dLast) = try model.head(x, part.example, gradientScale: part.weight)
        guard var d = dLast else { preconditionFailure("the head was asked for a gradient") }
        guard loss.isFinite else { return loss }

        // Backward, from the last block: recompute, differentiate, update, free.
        for block in trained.reversed() {
            try clock.boundary(changed: gradients == nil && block < model.blocks.upperBound - 1)
            try clock.timed(\.backward) {
                x = try inputs.take(block)
                try update(block, gradient(block, x, kept.removeValue(forKey: block), d: &d))
                Memory.clearCache()
            }
        }
        return loss
    }

    /// The gradient of a block's LoRA parameters `[P]`; d goes from dy to dx.
    private func gradient(_ block: Int, _ x: MLXArray, _ kept: Intermediates?, d: inout MLXArray) throws -> MLXArray {
        let gradient =
            if let automatic { try automatic(block, x, d: &d) } else { try structured(block, x, kept, d: &d) }
        return mask.map { gradient * $0 } ?? gradient
    }

    /// The structured backward pass: the block's forward pass again up to x_mid, unless it was kept, then the derivatives by hand.
    private func structured(_ block: Int, _ x: MLXArray, _ kept: Intermediates?, d: inout MLXArray) throws -> MLXArray {
        let lora = try model.parameters(block)
        return try model.withBlock(block) { weights in
            let intermediates = try kept ?? model.recompute(block, x, lora, weights)
            let backward = BlockBackward(
                weights: weights, lora: lora, layout: model.layout, scale: model.scale, tile: model.tile)
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
    }

    /// One update from some batches of sequences.
    ///
    /// A batch's loss is the mean over all its counted targets, the step's the mean of its batches'. Sequences go one after the
    /// other, so that a step of any size takes the memory of one sequence and, where there are several, of a sum of gradients.
    /// - Parameter number: of the step, from 0.
    /// - Throws: `NotFinite`. With `skipBadSteps` nothing has changed then; otherwise some blocks may have been updated.
    func step(_ batches: [[Example]], number: Int) throws -> StepResult {
        let before = settings.skipBadSteps ? (model.lora, optimizer) : nil
        do {
            return try takeStep(batches, number)
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
        let keys = MLXRandom.split(
            key: MLXRandom.key(settings.seed &+ 1 &+ UInt64(number)), into: model.blocks.count)
        if settings.method == .mezo {
            let (loss, norm) = try takeZerothOrderStep(parts, number, keys)
            return StepResult(loss: loss, tokens: tokens, gradientNorm: norm)
        }

        var loss: Float = 0
        for (index, part) in parts.enumerated() {
            let sum = try backpropagate(part) { block, gradient in
                guard let sums = gradients else { return try update(block, gradient, number, keys[block]) }
                let sum = index == 0 ? gradient : try sums.read(block) + gradient
                try gradients?.write(sum, block)
            }
            loss += part.weight * sum
            guard loss.isFinite else { throw try model.notFinite([part.example]) }
        }
        let norm = try gradients.map { sums in try updateAll(number, keys) { try sums.read($0) } }
        return StepResult(loss: loss, tokens: tokens, gradientNorm: norm ?? nil)
    }

    /// - Returns: the mean of MeZO's two losses, and the norm of the gradient where it is clipped.
    private func takeZerothOrderStep(_ parts: [Part], _ number: Int, _ keys: [MLXArray]) throws -> (Float, Float?) {
        let mezo = MeZO(epsilon: settings.mezoEpsilon, keys: keys, layout: model.layout, trained: trained, mask: mask)
        let (loss, g) = try mezo.slope { moved in
            try parts.reduce(0) { try $0 + $1.weight * model.loss($1.example, parameters: moved) }
        }
        guard g.isFinite else { throw try model.notFinite(parts.map(\.example)) }
        return (loss, try updateAll(number, keys) { g * mezo.z($0) })
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
    /// 1 for each parameter of a trained module, 0 for the others, `[P]`; nil where all are trained.
    let mask: MLXArray?
    /// The block inputs, from the forward to the backward pass.
    private var inputs: BlockArrays
    /// Sums of gradients, float32 `[P]` a block, where an update needs more than one backward pass gives at a time.
    private var gradients: BlockArrays?
    var optimizer: Optimizer

    /// - Parameters:
    ///   - settings: `Manifest.check` must have found their length and rank in the bundle.
    ///   - folder: where the files of offloaded arrays are made, if the plan asks for any.
    init(bundle: ModelBundle, settings: RunSettings, plan: Plan, folder: URL) throws {
        let architecture = bundle.architecture
        let (length, blocks) = (settings.seqLen, architecture.numHiddenLayers)
        let layout = LoRALayout(architecture: architecture, rank: settings.rank)
        self.settings = settings
        self.plan = plan
        trained = max(0, blocks - (settings.numLayers ?? blocks))..<blocks
        modules = try settings.modules(of: architecture)
        mask = modules == architecture.modules ? nil : layout.mask(modules)

        func vectors(_ dtype: DType) throws -> BlockArrays {
            let file = plan.offload == .all ? try ArrayFile(in: folder, shape: [layout.count], dtype: dtype) : nil
            return BlockArrays(count: blocks, file: file, keepsPrevious: settings.skipBadSteps)
        }
        let trained = trained
        func zeros() throws -> BlockArrays {
            var arrays = try vectors(.float32)
            for block in trained { try arrays.write(MLXArray.zeros([layout.count]), block) }
            return arrays
        }
        let inputShape = [1, length, architecture.hiddenSize]
        inputs = BlockArrays(
            count: blocks,
            file: plan.offload == .none || settings.method == .mezo
                ? nil : try ArrayFile(in: folder, shape: inputShape, dtype: bundle.dtype))
        optimizer = try Optimizer(settings, zeros: zeros)
        gradients = settings.gathersGradients ? try zeros() : nil
        var lora = try vectors(settings.loraDtype.dtype)
        for block in 0..<blocks {
            try lora.write(layout.initial(seed: settings.seed, block: block).asType(settings.loraDtype.dtype), block)
        }
        model = try BlockwiseModel(bundle, settings, plan: plan, lora: lora, clock: clock)
        automatic = settings.method == .mebp ? try AutomaticBackward(model, length: length) : nil
    }

    /// Whether a block's intermediates stay from the forward to the backward pass.
    private func keeps(_ block: Int) -> Bool {
        settings.method == .mesp && block >= model.blocks.upperBound - plan.keptBlocks
    }

    /// Bytes written to offloaded arrays since the start.
    var writtenBytes: Int {
        [inputs, model.lora, gradients, optimizer.first, optimizer.second].reduce(0) { $0 + ($1?.written ?? 0) }
    }
}
