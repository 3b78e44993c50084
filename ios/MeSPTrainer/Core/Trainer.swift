import Foundation
import MLX

/// How gradients are made.
public enum Method: String, Codable, Sendable, CaseIterable {
    /// The structured backward pass, written out by hand.
    case mesp
    /// The same loop over blocks, with gradients from automatic differentiation.
    case mebp
    /// Zeroth order: two forward passes with a seeded perturbation.
    case mezo
}

/// LoRA training on a bundle, one block at a time. Not for use from several threads at once.
final class Trainer {
    let bundle: ModelBundle
    let layout: LoRALayout
    /// What the adapters' output is multiplied by: α / rank, or α / √rank.
    let scale: Float
    /// The parameters: one flat vector `[P]` a block, in float32 or bfloat16.
    private(set) var lora: BlockArrays
    private(set) var optimizer: Optimizer

    /// Called at every block boundary, forward and backward. It may wait (a pause, with the half-done step in memory) or throw
    /// `CancellationError`, which ends the step while that has changed nothing yet, and is not heeded afterwards.
    var atBlock: () throws -> Void = {}

    /// Where the time since the start went, in seconds.
    private(set) var time = Phases()

    struct Phases {
        var forward = 0.0
        var loss = 0.0
        var backward = 0.0
        /// What `atBlock` has taken; not in the others.
        var waiting = 0.0
    }

    private let settings: RunSettings
    /// For each block the function of its kind.
    private let functions: [ImportedFunction]
    private let plainFunctions: [ImportedFunction]?
    private let plan: Plan
    private let tile: TileSizes
    /// The blocks whose parameters are trained.
    private let trained: Range<Int>
    /// The modules of these blocks that are trained.
    private let modules: [Module]
    /// 1 for each parameter of a trained module, 0 for the others, `[P]`; nil where all are trained.
    private let mask: MLXArray?
    /// The block inputs, from the forward to the backward pass.
    private var inputs: BlockArrays
    /// Sums of gradients, float32 `[P]` a block, where an update needs more than one backward pass gives at a time.
    private var gradients: BlockArrays?

    /// - Parameters:
    ///   - settings: `Manifest.check` must have found their length and rank in the bundle.
    ///   - folder: where the files of offloaded arrays are made, if the plan asks for any.
    init(bundle: ModelBundle, settings: RunSettings, plan: Plan, folder: URL) throws {
        let manifest = bundle.manifest
        let architecture = bundle.architecture
        let (length, blocks) = (settings.seqLen, architecture.numHiddenLayers)
        self.bundle = bundle
        self.settings = settings
        self.plan = plan
        layout = LoRALayout(architecture: architecture, rank: settings.rank)
        scale = settings.scale
        tile = TileSizes(
            architecture, group: manifest.featureGroup, length: length, bytes: plan.tileBytes)
        trained = max(0, blocks - (settings.numLayers ?? blocks))..<blocks
        modules = try settings.modules(of: architecture)
        mask = modules == architecture.modules ? nil : layout.mask(modules)
        functions = try bundle.functions(\.functions, length: length)
        plainFunctions = settings.method == .mebp ? try bundle.functions(\.plainFunctions, length: length) : nil

        let count = layout.count
        func vectors(_ dtype: DType) throws -> BlockArrays {
            let file = plan.offload == .all ? try ArrayFile(in: folder, shape: [count], dtype: dtype) : nil
            return BlockArrays(count: blocks, file: file, keepsPrevious: settings.skipBadSteps)
        }
        let trained = trained
        func zeros() throws -> BlockArrays {
            var arrays = try vectors(.float32)
            for block in trained { try arrays.write(MLXArray.zeros([count]), block) }
            return arrays
        }
        let inputShape = [1, length, architecture.hiddenSize]
        inputs = BlockArrays(
            count: blocks,
            file: plan.offload == .none || settings.method == .mezo
                ? nil : try ArrayFile(in: folder, shape: inputShape, dtype: bundle.dtype))
        optimizer = try Optimizer(settings, zeros: zeros)
        gradients = settings.gathersGradients ? try zeros() : nil
        lora = try vectors(settings.loraDtype.dtype)
        for block in 0..<blocks {
            try lora.write(layout.initial(seed: settings.seed, block: block).asType(settings.loraDtype.dtype), block)
        }
    }

    /// Bytes written to offloaded arrays since the start.
    var writtenBytes: Int {
        [inputs, lora, gradients, optimizer.first, optimizer.second].reduce(0) { $0 + ($1?.written ?? 0) }
    }

    // MARK: - A step

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
        let before = settings.skipBadSteps ? (lora, optimizer) : nil
        do {
            return try update(batches, number)
        } catch let error as NotFinite {
            if let before { (lora, optimizer) = before }
            throw error
        }
    }

    private func update(_ batches: [[Example]], _ number: Int) throws -> StepResult {
        let parts = batches.flatMap { batch in
            let counted = batch.reduce(0) { $0 + $1.counted.count }
            return batch.map { Part(example: $0, weight: 1 / Float(counted * batches.count)) }
        }
        let tokens = parts.reduce(0) { $0 + $1.example.counted.count }
        let keys = MLXRandom.split(key: MLXRandom.key(settings.seed &+ 1 &+ UInt64(number)), into: blocks)

        if settings.method == .mezo {
            let (loss, slope) = try directionalDerivative(parts, keys: keys)
            guard slope.isFinite else { throw try notFinite(parts) }
            let norm = try updateAll(number, keys) { slope * z($0, keys) }
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
            guard loss.isFinite else { throw try notFinite([part]) }
        }
        let norm = try gradients.map { sums in try updateAll(number, keys) { try sums.read($0) } }
        return StepResult(loss: loss, tokens: tokens, gradientNorm: norm ?? nil)
    }

    /// A sequence of a step, and the weight of each of its targets in the step's loss.
    struct Part {
        let example: Example
        let weight: Float
    }

    /// Updates every trained block, once all gradients are there, with their norm limited to `maxGradNorm`.
    ///
    /// - Returns: the norm before, nil where it isn't limited.
    private func updateAll(_ number: Int, _ keys: [MLXArray], gradient: (_ block: Int) throws -> MLXArray) throws
        -> Float?
    {
        var (factor, norm) = (Float(1), Float?.none)
        if let limit = settings.maxGradNorm {
            let squares = try trained.reduce(Float(0)) { try $0 + gradient($1).square().sum().item(Float.self) }
            norm = squares.squareRoot()
            // Clipping would make zeros of the finite gradients, and spread what is not.
            if !squares.isFinite { for block in trained { try check(gradient(block), block) } }
            factor = min(1, limit / (squares.squareRoot() + 1e-6))
        }
        for block in trained {
            try boundary(changed: block > trained.lowerBound)
            try update(block, factor * gradient(block), number, keys[block])
        }
        return norm
    }

    /// One block's update, from its gradient `[P]`.
    private func update(_ block: Int, _ gradient: MLXArray, _ number: Int, _ key: MLXArray) throws {
        try check(gradient, block)
        let stored = try lora.read(block)
        let old = stored.asType(.float32)
        var new = try optimizer.update(old, gradient, block: block, rate: optimizer.learningRate(step: number))
        if let mask { new = which(mask, new, old) }
        if settings.loraDtype == .bfloat16 {
            new = stochasticallyRounded(new, key: MLXRandom.split(key: key).0)
        }
        try lora.write(new, block)
    }

    // MARK: - Numbers that are not finite

    private func check(_ gradient: MLXArray, _ block: Int) throws {
        guard !isFinite(gradient) else { return }
        throw NotFinite(what: "The gradient of \(firstNotFinite(gradient, block) ?? "block \(block)")")
    }

    private func isFinite(_ array: MLXArray) -> Bool { array.sum().item(Float.self).isFinite }

    /// The name, as in a file of adapters, of the first matrix in a block's vector `[P]` that is not finite.
    private func firstNotFinite(_ vector: MLXArray, _ block: Int) -> String? {
        for module in layout.modules {
            let matrices = layout.matrices(module, in: vector)
            for (name, matrix) in [("lora_a", matrices.a), ("lora_b", matrices.b)] where !isFinite(matrix) {
                return "model.layers.\(block).\(module.name).\(name)"
            }
        }
        return nil
    }

    /// Where the numbers go wrong that make the loss of these sequences not finite, found by another forward pass.
    private func notFinite(_ parts: [Part]) throws -> NotFinite {
        for part in parts {
            var x = try embedded(part.example)
            for block in 0..<blocks {
                let lora = try parameters(block)
                if let name = firstNotFinite(lora, block) { return NotFinite(what: "The parameter \(name)") }
                x = try forward(block, x, lora).y
                guard isFinite(x) else { return NotFinite(what: "The output of block \(block)") }
            }
        }
        return NotFinite(what: "The loss")
    }

    // MARK: - MeSP and MeBP

    /// One forward and backward pass. `update` gets each trained block's gradient `[P]`, from the last block to the first, as soon as
    /// it is there, and may change that block's parameters.
    ///
    /// - Returns: the sum of the losses of the counted targets, in nats. Where it is not finite, nothing was updated.
    func backpropagate(_ part: Part, update: (_ block: Int, _ gradient: MLXArray) throws -> Void) throws -> Float {
        // Forward: keep only each block's input, and the intermediates of the last few where the plan has memory for them.
        var x = try embedded(part.example)
        var kept = [Int: Intermediates]()
        for block in 0..<blocks {
            if trained.contains(block) { try inputs.write(x, block) }
            let keep = settings.method == .mesp && block >= blocks - plan.keptBlocks
            (x, kept[block]) = try forward(block, x, parameters(block), keep: keep)
        }

        let (loss, dLast) = try head(x, part.example, gradientScale: part.weight)
        guard var d = dLast else { preconditionFailure("the head was asked for a gradient") }
        guard loss.isFinite else { return loss }

        // Backward, from the last block: recompute, differentiate, update, free. d goes from dy to dx.
        for block in trained.reversed() {
            try boundary(changed: gradients == nil && block < blocks - 1)
            try timed(\.backward) {
                x = try inputs.take(block)
                let gradient =
                    settings.method == .mebp
                    ? try automaticBackward(block, x, d: &d)
                    : try structuredBackward(block, x, kept.removeValue(forKey: block), d: &d)
                try update(block, mask.map { gradient * $0 } ?? gradient)
                Memory.clearCache()
            }
        }
        return loss
    }

    /// The block's output `[1, T, hidden]` and, where they are to be kept, its intermediates; evaluated.
    private func forward(_ block: Int, _ x: MLXArray, _ lora: MLXArray, keep: Bool = false) throws
        -> (y: MLXArray, kept: Intermediates?)
    {
        try boundary()
        return try timed(\.forward) {
            defer { Memory.clearCache() }
            return try bundle.withBlock(block) { weights in
                guard keep else {
                    // Without a reference to the others, each goes as soon as y no longer needs it.
                    let y = try call(functions[block], x, lora, weights)[0]
                    eval(y)
                    return (y, nil)
                }
                let outputs = try call(functions[block], x, lora, weights)
                let kept = Intermediates(outputs, kept: true)
                eval([outputs[0]] + kept.arrays)
                return (outputs[0], kept)
            }
        }
    }

    /// MeSP: the block's forward pass again up to x_mid, unless it was kept, then the derivatives by hand.
    private func structuredBackward(
        _ block: Int, _ x: MLXArray, _ kept: Intermediates?, d: inout MLXArray
    ) throws -> MLXArray {
        let lora = try parameters(block)
        return try bundle.withBlock(block) { weights in
            let intermediates = try kept ?? recompute(block, x, lora, weights)
            let backward = BlockBackward(weights: weights, lora: lora, layout: layout, scale: scale, tile: tile)
            return backward(x: x, consume intermediates, d: &d, wantsInput: block > trained.lowerBound)
        }
    }

    /// The outputs that nobody evaluates cost nothing, but hold the tiles they would be made of: they end before the others are evaluated.
    private func recompute(_ block: Int, _ x: MLXArray, _ lora: MLXArray, _ weights: BlockWeights) throws
        -> Intermediates
    {
        let intermediates = Intermediates(try call(functions[block], x, lora, weights), kept: false)
        eval(intermediates.arrays)
        return intermediates
    }

    /// MeBP: automatic differentiation of the block in plain operations, from its input.
    private func automaticBackward(_ block: Int, _ x: MLXArray, d: inout MLXArray) throws -> MLXArray {
        guard let plain = plainFunctions?[block] else { preconditionFailure("the trainer was made for another method") }
        let lora = try parameters(block)
        return try bundle.withBlock(block) { weights in
            let (_, gradients) = vjp(
                { primals in
                    // The call fails only for shapes that the file has no trace for; `Manifest.check` has found these.
                    (try? self.call(plain, primals[0], primals[1], weights)[0]).map { [$0] } ?? []
                }, primals: [x, lora], cotangents: [d])
            eval(gradients)
            d = gradients[0]
            return gradients[1]
        }
    }

    // MARK: - MeZO

    /// MeZO's estimate of the gradient: with z ~ N(0, 1) from the seed, `g = (L(lora + ε z) − L(lora − ε z)) / 2ε`, and the gradient is
    /// `g z`. z is drawn again, block by block, each time it is needed.
    ///
    /// - Returns: the mean of the two losses, and g.
    private func directionalDerivative(_ parts: [Part], keys: [MLXArray]) throws -> (loss: Float, slope: Float) {
        let epsilon = settings.mezoEpsilon
        func loss(_ move: Float) throws -> Float {
            try parts.reduce(0) { sum, part in
                try sum + part.weight
                    * self.loss(part.example) { block, lora in
                        trained.contains(block) ? lora + move * z(block, keys) : lora
                    }
            }
        }
        let (plus, minus) = (try loss(epsilon), try loss(-epsilon))
        return ((plus + minus) / 2, (plus - minus) / (2 * epsilon))
    }

    private func z(_ block: Int, _ keys: [MLXArray]) -> MLXArray {
        let z = MLXRandom.normal([layout.count], key: keys[block])
        return mask.map { z * $0 } ?? z
    }

    // MARK: - Loss

    /// The sum of the losses of the counted targets, in nats, with the parameters as they are or moved.
    func loss(_ example: Example, parameters moved: (_ block: Int, _ lora: MLXArray) -> MLXArray = { $1 }) throws
        -> Float
    {
        var x = try embedded(example)
        for block in 0..<blocks {
            x = try forward(block, x, moved(block, try parameters(block))).y
        }
        return try head(x, example, gradientScale: nil).loss
    }

    private func embedded(_ example: Example) throws -> MLXArray {
        try bundle.withEmbedding { weights in
            let x = embed(MLXArray(example.inputs), weights, bundle.architecture, dtype: bundle.dtype)
            eval(x)
            return x
        }
    }

    private func head(_ y: MLXArray, _ example: Example, gradientScale: Float?) throws -> (loss: Float, dy: MLXArray?) {
        try boundary()
        return try timed(\.loss) {
            let targets = MLXArray(Array(example.targets))
            let (loss, dy) = try bundle.withHead { weights in
                let head = Head(weights: weights, architecture: bundle.architecture, tile: tile.vocabulary)
                return head(y, targets: targets, counted: example.counted, gradientScale: gradientScale)
            }
            Memory.clearCache()
            return (loss.item(Float.self), dy)
        }
    }

    // MARK: -

    private var blocks: Int { bundle.architecture.numHiddenLayers }

    /// A block's parameters in float32, as the block function takes them.
    private func parameters(_ block: Int) throws -> MLXArray { try lora.read(block).asType(.float32) }

    private func call(_ function: ImportedFunction, _ x: MLXArray, _ lora: MLXArray, _ weights: BlockWeights) throws
        -> [MLXArray]
    {
        try function.dynamicallyCall(
            withKeywordArguments: ["": x, "": lora, "": MLXArray(scale), "": weights.packed.words])
    }

    /// - Parameter changed: whether the step has changed parameters, and so must be finished.
    private func boundary(changed: Bool = false) throws {
        let start = Date.now
        defer { time.waiting += Date.now.timeIntervalSince(start) }
        do { try atBlock() } catch is CancellationError where changed {}
    }

    private func timed<R>(_ phase: WritableKeyPath<Phases, Double>, _ body: () throws -> R) rethrows -> R {
        let start = Date.now
        defer { time[keyPath: phase] += Date.now.timeIntervalSince(start) }
        return try body()
    }

    // MARK: - Saving

    /// Every vector that the next step depends on, by name.
    func vectors() throws -> [String: MLXArray] {
        var vectors = [String: MLXArray]()
        for block in 0..<blocks { vectors["lora.\(block)"] = try lora.read(block) }
        for block in trained {
            vectors["first.\(block)"] = try optimizer.first?.read(block)
            vectors["second.\(block)"] = try optimizer.second?.read(block)
        }
        return vectors
    }

    /// Takes vectors that `vectors()` gave, by name; each is asked for once, as it may be read from a file. A trainer that this throws on is
    /// of no more use.
    func restore(_ vectors: (_ name: String) -> MLXArray?) throws {
        func vector(_ name: String, like current: MLXArray) throws -> MLXArray {
            guard let vector = vectors(name), vector.shape == current.shape, vector.dtype == current.dtype else {
                throw MeSPError("The saved state is of another model or rank; start the run again in another folder.")
            }
            return vector
        }
        for block in 0..<blocks { try lora.write(vector("lora.\(block)", like: lora.read(block)), block) }
        for block in trained {
            if let first = try optimizer.first?.read(block) {
                try optimizer.first?.write(vector("first.\(block)", like: first), block)
            }
            if let second = try optimizer.second?.read(block) {
                try optimizer.second?.write(vector("second.\(block)", like: second), block)
            }
        }
    }

    /// Takes the parameters of adapters, as mlx-lm or PEFT wrote them, instead of the initial ones.
    func startFrom(_ folder: URL) throws {
        let adapters = try loadAdapters(from: folder, architecture: bundle.architecture) { [settings] in
            $0.initial(seed: settings.seed, block: $1)
        }
        guard adapters.layout.rank == layout.rank else {
            throw MeSPError(
                "The adapters in \(folder.path) have rank \(adapters.layout.rank), the run has \(layout.rank); choose theirs."
            )
        }
        guard abs(adapters.scale - scale) <= 1e-6 * abs(adapters.scale) else {
            throw MeSPError(
                "The adapters in \(folder.path) are scaled by \(adapters.scale), the run's by \(scale); set alpha to \(settings.alpha * adapters.scale / scale)."
            )
        }
        for (block, vector) in adapters.lora.enumerated() {
            for module in layout.modules where !trained.contains(block) || !modules.contains(module) {
                guard layout.matrices(module, in: vector).b.abs().max().item(Float.self) == 0 else {
                    throw MeSPError(
                        "The adapters in \(folder.path) have a \(module.shortName) in block \(block), which this run does not train and would lose; train it too."
                    )
                }
            }
            try lora.write(vector.asType(settings.loraDtype.dtype), block)
        }
    }

    /// Writes the trained adapters for mlx-lm and PEFT.
    func saveAdapters(to folder: URL) throws {
        try MeSPCore.saveAdapters(
            layout: layout, blocks: trained, modules: modules, scale: scale, model: bundle.manifest.model.id,
            to: folder, lora: lora.read)
    }
}
