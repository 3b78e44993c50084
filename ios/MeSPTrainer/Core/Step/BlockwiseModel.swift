import MLX
import MeSPAdapters
import MeSPBundle

/// The frozen model with its LoRA parameters, run one block at a time on mapped weights.
package final class BlockwiseModel {
    package let bundle: ModelBundle
    package let settings: RunSettings
    package let layouts: [LoRALayout]
    /// The indices of the trained blocks, ascending; at least one.
    package let trained: [Int]
    /// The trained blocks that the current step updates, ascending: all but with `blocksPerStep`.
    package var drawn: [Int]
    var strength: Float = 1
    /// The factor of the adapters' output: s · α / rank, or s · α / √rank with rsLoRA.
    package var scale: Float { strength * settings.scale }
    private let tileBytes: Int
    /// The maximum bytes of the arrays of one block or of the head on a GPU before MLX waits; nil on a CPU.
    let workspace: Int?
    private let keepsCache: Bool
    let clock: StepClock
    /// The parameters: one flat vector `[P]` for each block that has any, in float32 or bfloat16.
    package var lora: BlockArrays
    /// The squared norms of the rows of W, for each block with parameters; nil without DoRA.
    private let squaredNorms: BlockArrays?
    /// Whether all kernels are compiled. A GPU compiles them in the first step.
    var isWarm: Bool
    var differentiated = Set<Int>()
    private var functions = [KeyPath<Manifest.Blocks, [String: String]>: [Int: [BlockFunction?]]]()

    init(
        _ bundle: ModelBundle, _ settings: RunSettings, plan: Plan, lora: BlockArrays, squaredNorms: BlockArrays?,
        clock: StepClock
    ) throws {
        let architecture = bundle.architecture
        (self.bundle, self.settings, self.lora, self.clock) = (bundle, settings, lora, clock)
        self.squaredNorms = squaredNorms
        let layouts = settings.layouts(of: architecture)
        self.layouts = layouts
        trained = layouts.indices.filter { layouts[$0].count > 0 }
        drawn = trained
        tileBytes = plan.tileBytes
        workspace = bundle.processor.workspace(Planner(bundle.manifest, settings), plan)
        keepsCache = bundle.processor.keepsCache(plan)
        isWarm = bundle.processor.hasKernels
        bundle.maps.areKept = plan.keepsMaps
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

    func schedule(_ x: MLXArray) -> Schedule {
        bundle.schedule(length: x.dim(1), bytes: tileBytes, pause: isWarm ? nil : { [clock] in clock.pause() })
    }

    package var blocks: Range<Int> { 0..<bundle.architecture.numHiddenLayers }

    package func parameters(_ block: Int) throws -> MLXArray {
        guard layouts[block].count > 0 else { return MLXArray.zeros([0]) }
        let stored = try lora.read(block)
        return stored.asType(.float32)
    }

    func baseParameters(_ block: Int) throws -> MLXArray {
        guard let squares = try squaredNorms?.read(block) else { return MLXArray.zeros([layouts[block].count]) }
        return layouts[block].base(sqrt(squares))
    }

    private func dora(
        _ block: Int, _ weights: BlockWeights, _ lora: MLXArray, norms: MLXArray? = nil
    ) throws -> DoRA? {
        guard layouts[block].count > 0, let squares = try squaredNorms?.read(block) else { return nil }
        let schedule = bundle.schedule(length: settings.seqLen, bytes: tileBytes)
        return DoRA(
            lora, layouts[block],
            norms: norms ?? schedule.norms(weights, lora, layouts[block], scale: scale, squares: squares))
    }

    func adapters() throws -> LoadedAdapters {
        let lora = try blocks.map { block in
            try clock.confirmed {
                var lora = try parameters(block)
                if squaredNorms != nil {
                    lora = try bundle.withBlock(block) { weights in
                        let scaled = try dora(block, weights, lora)?.scaled ?? lora
                        eval(scaled)
                        return scaled
                    }
                }
                return layouts[block].whole(lora)
            }
        }
        return LoadedAdapters(rank: settings.rank, scale: scale, lora: lora, layouts: layouts.map(\.whole))
    }

    package func embed(_ example: Example) throws -> MLXArray {
        try clock.repeating { try bundle.embed(Array(example.inputs)) }
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
                : try clock.repeating { try bundle.layerEmbeddings(example.inputs, x0: x0.squeezed(axis: 0)) },
            dropout)
    }

    /// - Parameter x: the block's input `[1, T, hidden]`
    func makeBlock(
        _ index: Int, _ weights: BlockWeights, _ lora: MLXArray, _ context: SequenceContext, _ x: MLXArray
    ) throws -> Block {
        var block = Block(
            weights: weights, lora: lora, layout: layouts[index], scale: scale, schedule: schedule(x))
        (block.records, block.dropout) = (context.records, context.dropout?[index])
        block.perLayerEmbeddings = try bundle.part(of: context.embeddings, layer: index)
        block.shared = bundle.architecture.keysOf(index).flatMap { context.sharedKeyValues[$0] }
        if !drawn.contains(index) { block.wanted = .none }
        if settings.dora { block.dora = try dora(index, weights, lora, norms: context.norms[index]) }
        return block
    }

    /// Makes a block for the forward pass. Computes what the context keeps: the norms n of DoRA and, if other blocks attend to this block's keys and
    /// values, the keys and values of x.
    package func makeForwardBlock(
        _ index: Int, _ weights: BlockWeights, _ lora: MLXArray, _ context: SequenceContext, _ x: MLXArray
    ) throws -> Block {
        context.norms[index] = nil
        let block = try makeBlock(index, weights, lora, context, x)
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
        try clock.boundary()
        defer { freeCache() }
        let start = clock.now
        defer { clock.add(since: start, to: \.forward) }
        return try clock.repeating(in: workspace) {
            var lora = try parameters(block)
            if layouts[block].count > 0 { lora = try moved(block, lora) }
            let pass = try forwardPass(block, makeForwardBlock(block, weights, lora, context, x), x)
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

    func freeCache() {
        if !keepsCache { Memory.clearCache() }
    }

    func loss(_ y: MLXArray, _ example: Example) throws -> Float {
        try head(y) { head in
            try head.loss(
                y, targets: Array(example.targets), counted: example.counted, atBoundary: { try clock.boundary() }
            ).number(Float.self)
        }
    }

    /// Returns the sum of the losses at the positions `Example.counted`, in nats, and dy. dy is `scale` times the gradient of the sum with respect to
    /// y. y and dy are `[1, T, hidden]`.
    package func lossAndGradient(_ y: MLXArray, _ example: Example, scale: Float) throws -> (loss: Float, dy: MLXArray)
    {
        try head(y) { head in
            let (loss, dy) = try head.lossAndGradient(
                y, targets: Array(example.targets), counted: example.counted, scale: scale,
                atBoundary: { try clock.boundary() })
            eval(loss, dy)
            return (try loss.number(Float.self), dy)
        }
    }

    private func head<R>(_ y: MLXArray, _ body: (CrossEntropyHead) throws -> R) throws -> R {
        try clock.boundary()
        defer { freeCache() }
        return try bundle.withHead { weights in
            let start = clock.now
            defer { clock.add(since: start, to: \.loss) }
            // The loss at the end confirms the results.
            return try clock.repeating(in: workspace, confirms: false) {
                try body(CrossEntropyHead(weights: weights, architecture: bundle.architecture, schedule: schedule(y)))
            }
        }
    }

    func loss(_ example: Example, parameters moved: (_ block: Int, _ lora: MLXArray) throws -> MLXArray = { $1 })
        throws -> Float
    {
        try loss(lastOutput(example, parameters: moved), example)
    }

    /// Returns the sum of KL(base ‖ model) at the positions `Example.counted`, in nats. The base is the model without the adapters' output.
    func divergence(_ example: Example) throws -> Double {
        let own = strength
        defer { strength = own }
        let (base, other) = try (lastOutput(example, strength: 0), lastOutput(example, strength: own))
        let counted = MLXArray.of(example.counted.map { Int32($0) })
        return try head(base) { head in
            let terms = try head.divergences(base[0][counted], other[0][counted]) { try clock.boundary() }
            return try terms.numbers(Float.self).reduce(0) { $0 + Double($1) }
        }
    }

    private func lastOutput(_ example: Example, strength: Float) throws -> MLXArray {
        self.strength = strength
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
