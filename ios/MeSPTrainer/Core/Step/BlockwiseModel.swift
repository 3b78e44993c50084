import MLX
import MeSPAdapters
import MeSPBundle

/// The frozen model with its LoRA parameters, run a block at a time: weights are mapped, and the activations of one block are all
/// that is alive. Sequences may have any of the lengths that the bundle has functions for.
package final class BlockwiseModel {
    package let bundle: ModelBundle
    package let settings: RunSettings
    /// The layout of each block's parameters.
    package let layouts: [LoRALayout]
    /// The blocks with parameters, which are trained, ascending. `Manifest.check` has found that there are some.
    package let trained: [Int]
    /// s, a factor of the adapters' output besides their own; 1 while they are trained.
    var strength: Float = 1
    /// The factor of the adapters' output: s · α / rank, or s · α / √rank.
    package var scale: Float { strength * settings.scale }
    private let tileBytes: Int
    /// The most that the arrays of one block or of the head may take on a GPU, in bytes.
    let workspace: Int?
    private let keepsCache: Bool
    let clock: StepClock
    /// The parameters: one flat vector `[P]` for each block that has any, in float32 or bfloat16.
    package var lora: BlockArrays
    /// With DoRA ‖W‖² of each block with parameters; nil without.
    private let squaredNorms: BlockArrays?
    /// Whether a whole step was done, so that a GPU has compiled the kernels; see `Machine.pause`.
    var isWarm: Bool
    /// The functions of whose derivative a GPU has compiled the kernels.
    var differentiated = Set<ObjectIdentifier>()
    /// For each block the function of its kind, by the files and the number of tokens, imported when a sequence of this length first comes.
    private var functions = [KeyPath<Manifest.Blocks, [String: String]>: [Int: [BlockFunction?]]]()

    /// - Parameter settings: `Manifest.check` must have found their length and rank in the bundle.
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
        tileBytes = plan.tileBytes
        workspace = bundle.processor.workspace(Planner(bundle.manifest, settings), plan)
        keepsCache = bundle.processor.keepsCache(plan)
        isWarm = bundle.processor.hasKernels
        bundle.maps.areKept = plan.keepsMaps
    }

    /// The block function for x `[1, T, hidden]` in some of a kind's files, which the bundle must have; nil for a block without one.
    package func function(
        _ block: Int, _ x: MLXArray, _ files: KeyPath<Manifest.Blocks, [String: String]> = \.functions
    ) throws -> BlockFunction? {
        let length = x.dim(1)
        if let known = functions[files]?[length] { return known[block] }
        let isFused = bundle.processor.fuses(files)
        var made = [ObjectIdentifier: BlockFunction]()
        let imported = try bundle.importFunctions(files, length: length).map { imported in
            guard let imported else { return BlockFunction?.none }
            let function = made[ObjectIdentifier(imported)] ?? BlockFunction(imported, isFused: isFused)
            made[ObjectIdentifier(imported)] = function
            return function
        }
        functions[files, default: [:]][length] = imported
        return imported[block]
    }

    /// The plan's machine for x `[1, T, hidden]`.
    func machine(_ x: MLXArray) -> Machine {
        Machine(
            bundle.architecture, group: bundle.manifest.featureGroup, length: x.dim(1), bytes: tileBytes,
            processor: bundle.processor, pause: isWarm ? nil : { [clock] in clock.pause() })
    }

    package var blocks: Range<Int> { 0..<bundle.architecture.numHiddenLayers }

    /// A block's parameters `[P]` in float32.
    package func parameters(_ block: Int) throws -> MLXArray {
        guard layouts[block].count > 0 else { return MLXArray.zeros([0]) }
        let stored = try lora.read(block)
        return stored.dtype == .float32 ? stored : try clock.confirmed { stored.asType(.float32) }
    }

    /// The parameters with which a block is the base model's, of a block with such.
    func baseParameters(_ block: Int) throws -> MLXArray {
        guard let squares = try squaredNorms?.read(block) else { return MLXArray.zeros([layouts[block].count]) }
        return layouts[block].base(sqrt(squares))
    }

    /// DoRA's formulas for a block with parameters; nil without DoRA.
    ///
    /// - Parameters:
    ///   - weights: the block's, mapped.
    ///   - lora: `[P]`
    private func dora(_ block: Int, _ weights: BlockWeights, _ lora: MLXArray) throws -> DoRA? {
        guard layouts[block].count > 0, let squares = try squaredNorms?.read(block) else { return nil }
        return DoRA(
            weights, lora, layouts[block], scale: scale, squares: squares,
            machine: Machine(
                bundle.architecture, group: bundle.manifest.featureGroup, length: settings.seqLen, bytes: tileBytes,
                processor: bundle.processor))
    }

    /// The parameters as they are now, as adapters of a model that generates.
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

    /// The embeddings `[1, T, hidden]` of a sequence's inputs.
    package func embed(_ example: Example) throws -> MLXArray {
        try clock.repeating {
            try bundle.withEmbedding { weights in
                MeSPCore.embed(Array(example.inputs), weights, bundle.architecture, dtype: bundle.dtype)
            }
        }
    }

    /// The inputs of the blocks besides the output of the block before, from the forward to the backward pass.
    package final class SequenceContext {
        fileprivate let records: [Range<Int>]?
        fileprivate let embeddings: LayerEmbeddings?
        fileprivate let dropout: DropoutKey?
        /// The keys and values that several blocks take, by the block that has them.
        fileprivate var sharedKeyValues = [Int: MixerState.KeyValues]()
        /// The sums of the gradients by these, of the blocks that took them.
        var gradients = [Int: MixerState.KeyValues]()

        fileprivate init(_ records: [Range<Int>]?, _ embeddings: LayerEmbeddings?, _ dropout: DropoutKey?) {
            (self.records, self.embeddings, self.dropout) = (records, embeddings, dropout)
        }
    }

    /// - Parameters:
    ///   - x0: the embeddings of the sequence's inputs `[1, T, hidden]`.
    ///   - dropout: the key of a sequence in a step; nil without dropout.
    package func makeContext(
        _ example: Example, x0: MLXArray, dropout: DropoutKey? = nil
    ) throws -> SequenceContext {
        SequenceContext(
            example.records,
            try clock.repeating { try bundle.layerEmbeddings(example.inputs, x0: x0.squeezed(axis: 0)) }, dropout)
    }

    /// A block's call for a sequence.
    ///
    /// - Parameters:
    ///   - weights: the block's, mapped.
    ///   - lora: `[P]`
    func makeCall(
        _ block: Int, _ weights: BlockWeights, _ lora: MLXArray, _ context: SequenceContext
    ) throws -> BlockCall {
        let perLayer = try clock.repeating { try bundle.part(of: context.embeddings, layer: block) }
        let shared = bundle.architecture.keysOf(block).flatMap { context.sharedKeyValues[$0] }
        var call = BlockCall(
            index: block, weights: weights, lora: lora,
            side: SideInputs(
                records: context.records, perLayer: perLayer, shared: shared, dropout: context.dropout?[block]))
        if settings.dora {
            call.dora = try clock.repeating {
                let dora = try dora(block, weights, lora)
                if let dora { eval(dora.norms) }
                return dora
            }
        }
        return call
    }

    /// A block's call in the forward pass. Where other blocks take its keys and values too, these are computed from x `[1, T, hidden]`, as a
    /// block function does not give them.
    package func makeForwardCall(
        _ block: Int, _ weights: BlockWeights, _ lora: MLXArray, _ context: SequenceContext, _ x: MLXArray
    ) throws -> BlockCall {
        let call = try makeCall(block, weights, lora, context)
        if bundle.architecture.owners.contains(block) {
            context.sharedKeyValues[block] = try clock.work(\.forward, in: nil) {
                let shared = self.block(call, x).keysAndValues(x)
                eval(shared.arrays)
                return shared
            }
        }
        return call
    }

    /// The block's output y `[1, T, hidden]`, evaluated.
    ///
    /// - Parameters:
    ///   - x: `[1, T, hidden]`
    ///   - keepsIntermediates: whether to return its intermediates too, evaluated; they are nil otherwise.
    package func forward(
        _ call: BlockCall, _ x: MLXArray, keepsIntermediates: Bool = false
    ) throws -> (y: MLXArray, intermediates: Intermediates?) {
        try clock.boundary()
        defer { freeCache() }
        return try clock.work(\.forward, in: workspace) {
            let pass = try forwardPass(call, x)
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
    /// - Parameter all: whether with gate and up, as `forward` keeps them.
    func recompute(_ call: BlockCall, _ x: MLXArray, all: Bool) throws -> Intermediates {
        let pass = try forwardPass(call, x)
        let intermediates = all ? try pass.outputs(x).intermediates : try pass.intermediates(x)
        eval(intermediates.arrays)
        return intermediates
    }

    private func forwardPass(_ call: BlockCall, _ x: MLXArray) throws -> any BlockForward {
        try bundle.processor.forwardPass(block(call, x)) {
            guard !settings.needsFormulas else { return nil }
            let imported = try function(call.index, x, call.side.records == nil ? \.functions : \.packed)
            return imported?(
                call, layouts[call.index], scale: scale, pause: isWarm ? nil : { [clock] in clock.pause() })
        }
    }

    /// The block's formulas for x `[1, T, hidden]`.
    func block(_ call: BlockCall, _ x: MLXArray) -> Block {
        var block = Block(
            weights: call.weights, lora: call.lora, layout: layouts[call.index], scale: scale, machine: machine(x),
            side: call.side)
        block.dora = call.dora
        return block
    }

    /// After a block or the head: gives the buffers back that MLX keeps, unless the plan has room for them.
    func freeCache() {
        if !keepsCache { Memory.clearCache() }
    }

    /// The sum of the losses of the counted targets, in nats, from the last block's output.
    func loss(_ y: MLXArray, _ example: Example) throws -> Float {
        try head(y) { head in
            try head.loss(
                y, targets: MLXArray(example.targets), counted: example.counted, atBoundary: { try clock.boundary() }
            ).number(Float.self)
        }
    }

    /// The same with its gradient `[1, T, hidden]` by y, times `scale`.
    package func lossAndGradient(_ y: MLXArray, _ example: Example, scale: Float) throws -> (loss: Float, dy: MLXArray)
    {
        try head(y) { head in
            let (loss, dy) = try head.lossAndGradient(
                y, targets: MLXArray(example.targets), counted: example.counted, scale: scale,
                atBoundary: { try clock.boundary() })
            eval(loss, dy)
            return (try loss.number(Float.self), dy)
        }
    }

    private func head<R>(_ y: MLXArray, _ body: (CrossEntropyHead) throws -> R) throws -> R {
        try clock.boundary()
        defer { freeCache() }
        return try bundle.withHead { weights in
            try clock.work(\.loss, in: workspace) {
                try body(CrossEntropyHead(weights: weights, architecture: bundle.architecture, machine: machine(y)))
            }
        }
    }

    /// The sum of the losses of a sequence's counted targets, in nats, with the parameters as they are or moved, where a block has
    /// any.
    func loss(_ example: Example, parameters moved: (_ block: Int, _ lora: MLXArray) throws -> MLXArray = { $1 })
        throws -> Float
    {
        try loss(lastOutput(example, parameters: moved), example)
    }

    /// The last block's output `[1, T, hidden]` of a sequence, alone in the model.
    ///
    /// - Parameters:
    ///   - moved: gives the parameters to take, where a block has any.
    ///   - check: gets each block's output.
    func lastOutput(
        _ example: Example, parameters moved: (_ block: Int, _ lora: MLXArray) throws -> MLXArray,
        check: (_ block: Int, _ y: MLXArray) throws -> Void = { _, _ in }
    ) throws -> MLXArray {
        var x = try embed(example)
        let context = try makeContext(example, x0: x)
        for block in blocks {
            x = try bundle.withBlock(block) { weights in
                var lora = try parameters(block)
                if layouts[block].count > 0 { lora = try clock.confirmed { [lora] in try moved(block, lora) } }
                return try forward(makeForwardCall(block, weights, lora, context, x), x).y
            }
            try check(block, x)
        }
        return x
    }
}
