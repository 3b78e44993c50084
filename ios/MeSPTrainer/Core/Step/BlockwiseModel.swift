import MLX
import MeSPAdapters
import MeSPBundle

/// The frozen model with its LoRA parameters, run one block at a time on mapped weights.
package final class BlockwiseModel {
    package let bundle: ModelBundle
    package let settings: RunSettings
    package let lora: TrainedLoRA
    package let head: LossHead
    let work: StepWork
    /// The trained blocks that the current step updates, ascending: all but with `blocksPerStep`.
    package var drawn: [Int]
    var differentiated = Set<Int>()
    private var functions = [KeyPath<Manifest.Blocks, [String: String]>: [Int: [BlockFunction?]]]()

    init(_ bundle: ModelBundle, _ settings: RunSettings, _ arrays: TrainingArrays, _ work: StepWork) {
        (self.bundle, self.settings, self.work) = (bundle, settings, work)
        lora = TrainedLoRA(bundle, settings, arrays, work)
        head = LossHead(bundle: bundle, work: work)
        drawn = lora.trained
    }

    /// Returns the block function for x `[1, T, hidden]` from `files`; nil for a block without such a function.
    package func function(
        _ block: Int, _ x: MLXArray, _ files: KeyPath<Manifest.Blocks, [String: String]> = \.functions
    ) throws -> BlockFunction? {
        let length = x.dim(1)
        if let known = functions[files]?[length] { return known[block] }
        let isFused = bundle.processor.fuses(files)
        var made = [ObjectIdentifier: BlockFunction]()
        let imported = try bundle.importFunctions(files, length: length, rank: settings.rank).map { imported in
            guard let imported else { return BlockFunction?.none }
            let function = made[ObjectIdentifier(imported)] ?? BlockFunction(imported, isFused: isFused)
            made[ObjectIdentifier(imported)] = function
            return function
        }
        functions[files, default: [:]][length] = imported
        return imported[block]
    }

    package var blocks: Range<Int> { 0..<bundle.architecture.numHiddenLayers }

    package func embed(_ example: Example) throws -> MLXArray {
        try work.repeating { try bundle.embed(example.inputs, images: example.images) }
    }

    /// A sequence on its way through the blocks.
    package final class SequenceContext {
        /// In the forward pass, the current block's input. Between the passes, the last block's output. In the backward pass, the gradient of the
        /// current block's output.
        var residual: MLXArray
        var inputs = BlockArrays(count: 0, file: nil)
        var kept = [Int: Intermediates]()
        fileprivate let records: [Range<Int>]?
        fileprivate let embeddings: LayerEmbeddings?
        fileprivate let dropout: DropoutKey?
        /// The shared keys and values, by the block that computes them, and their gradients.
        fileprivate var sharedKeyValues = [Int: MixerState.KeyValues]()
        var gradients = [Int: MixerState.KeyValues]()
        fileprivate var norms = [Int: MLXArray]()

        fileprivate init(
            _ x0: MLXArray, _ records: [Range<Int>]?, _ embeddings: LayerEmbeddings?, _ dropout: DropoutKey?
        ) {
            (residual, self.records, self.embeddings, self.dropout) = (x0, records, embeddings, dropout)
        }
    }

    package func makeContext(
        _ example: Example, x0: MLXArray, dropout: DropoutKey? = nil
    ) throws -> SequenceContext {
        SequenceContext(
            x0, example.records,
            bundle.architecture.perLayer == nil
                ? nil
                : try work.repeating { try bundle.layerEmbeddings(example.inputs, x0: x0.squeezed(axis: 0)) },
            dropout)
    }

    /// - Parameter x: the block's input `[1, T, hidden]`
    func makeBlock(
        _ index: Int, _ weights: BlockWeights, _ parameters: MLXArray, _ context: SequenceContext, _ x: MLXArray
    ) throws -> Block {
        var block = Block(
            weights: weights, lora: parameters, layout: lora.layouts[index], scale: lora.scale,
            schedule: work.schedule(length: x.dim(1)))
        (block.records, block.dropout) = (context.records, context.dropout?[index])
        block.perLayerEmbeddings = try bundle.part(of: context.embeddings, layer: index)
        block.shared = bundle.architecture.keysOf(index).flatMap { context.sharedKeyValues[$0] }
        if !drawn.contains(index) { block.wanted = .none }
        if settings.dora { block.dora = try lora.dora(index, weights, parameters, norms: context.norms[index]) }
        return block
    }

    /// Makes a block for the forward pass. Computes what the context keeps: the norms n of DoRA and, if other blocks attend to this block's keys and
    /// values, the keys and values of x.
    package func makeForwardBlock(
        _ index: Int, _ weights: BlockWeights, _ parameters: MLXArray, _ context: SequenceContext, _ x: MLXArray
    ) throws -> Block {
        context.norms[index] = nil
        let block = try makeBlock(index, weights, parameters, context, x)
        if let norms = block.dora?.norms {
            eval(norms)
            context.norms[index] = norms
        }
        if bundle.architecture.owners.contains(index) {
            let shared = block.keysAndValues(x)
            eval(shared.arrays)
            context.sharedKeyValues[index] = shared
        }
        return block
    }

    /// Returns the block's output y `[1, T, hidden]`, evaluated and confirmed.
    ///
    /// - Parameters:
    ///   - moved: returns the parameters to use, if the block has any
    ///   - keepsIntermediates: whether to return the intermediates too, evaluated; otherwise they are nil
    package func forward(
        _ block: Int, _ weights: BlockWeights, _ context: SequenceContext, _ x: MLXArray,
        parameters moved: (_ block: Int, _ lora: MLXArray) throws -> MLXArray = { $1 }, keepsIntermediates: Bool = false
    ) throws -> (y: MLXArray, intermediates: Intermediates?) {
        try work.boundary()
        defer { work.freeCache() }
        let start = work.now
        defer { work.add(since: start, to: \.forward) }
        return try work.repeating(isBounded: true) {
            var parameters = try lora.parameters(block)
            if lora.layouts[block].count > 0 { parameters = try moved(block, parameters) }
            let pass = try forwardPass(block, makeForwardBlock(block, weights, parameters, context, x), x)
            guard keepsIntermediates else {
                let y = try pass.output(x)
                eval(y)
                return (y, nil)
            }
            let outputs = try pass.outputs(x)
            eval([outputs.y] + outputs.intermediates.arrays)
            return (outputs.y, outputs.intermediates)
        }
    }

    /// Recomputes the block's intermediates from its input, evaluated.
    ///
    /// - Parameter all: whether to include gate and up.
    func recompute(_ index: Int, _ block: Block, _ x: MLXArray, all: Bool) throws -> Intermediates {
        let pass = try forwardPass(index, block, x)
        let intermediates = all ? try pass.outputs(x).intermediates : try pass.intermediates(x)
        eval(intermediates.arrays)
        return intermediates
    }

    private func forwardPass(_ index: Int, _ block: Block, _ x: MLXArray) throws -> any BlockForward {
        try bundle.processor.forwardPass(block) {
            settings.needsFormulas
                ? nil : try function(index, x, block.records == nil ? \.functions : \.packed)?(block)
        }
    }

    func loss(_ example: Example, parameters moved: (_ block: Int, _ lora: MLXArray) throws -> MLXArray = { $1 })
        throws -> Float
    {
        try head.loss(lastOutput(example, parameters: moved), example)
    }

    /// Returns the sum of KL(base ‖ model) at the positions `Example.counted`, in nats. The base is the model without the adapters' output.
    func divergence(_ example: Example) throws -> Double {
        let strength = lora.strength
        defer { lora.strength = strength }
        let (base, model) = try (lastOutput(example, strength: 0), lastOutput(example, strength: strength))
        return try head.divergence(base, model, example)
    }

    private func lastOutput(_ example: Example, strength: Float) throws -> MLXArray {
        lora.strength = strength
        return try lastOutput(example) { $1 }
    }

    func lastOutput(
        _ example: Example, parameters moved: (_ block: Int, _ lora: MLXArray) throws -> MLXArray,
        check: (_ block: Int, _ y: MLXArray) throws -> Void = { _, _ in }
    ) throws -> MLXArray {
        var x = try embed(example)
        let context = try makeContext(example, x0: x)
        for block in blocks {
            x = try bundle.withBlock(block) { try forward(block, $0, context, x, parameters: moved).y }
            try check(block, x)
        }
        return x
    }
}
