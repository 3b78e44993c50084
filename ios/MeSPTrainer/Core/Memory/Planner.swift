import Foundation
import MeSPBundle

/// The choices of a step between time and memory. No choice changes the mathematics, only the order of sums.
public struct Plan: Codable, Sendable, Equatable {
    /// The size that temporaries are cut to, in bytes.
    public var tileBytes: Int
    /// The last blocks, whose intermediates stay in memory from the forward to the backward pass and aren't recomputed (MeSP).
    public var keptBlocks = 0
    /// The arrays that are kept in a file instead of in memory.
    public var offload = RunSettings.Offload.none
    /// The order of a step's sequences through the model; nil for a step of one.
    public var order: RunSettings.Order?
    /// Whether of a pair the block inputs of the answer that is scored first are kept too, so that it runs forward once.
    public var keepsAnswer = false
    /// The freed buffers that MLX may keep from one block to the next, on a GPU, in bytes.
    public var cacheBytes = 0
    /// Whether weights stay mapped from one use to the next.
    public var keepsMaps = false

    /// The sequences whose block inputs are there at once.
    func sequences(of settings: RunSettings) -> Int {
        order == .blocks ? settings.sequences : keepsAnswer ? 2 : 1
    }

    /// Whether an update needs all gradients at once, or sums over sequences that go one after the other.
    func gathersGradients(of settings: RunSettings) -> Bool {
        let oneByOne = settings.sequences > 1 && order != .blocks
        return settings.method.hasBackwardPass
            && (oneByOne || settings.maxGradNorm != nil || settings.objective != nil || settings.dpClip != nil)
    }
}

/// Predicts the peak footprint of a step, and chooses the plan.
public struct Planner: Sendable {
    let architecture: Architecture
    private let settings: RunSettings
    private let group: Int
    /// The size of a stored number, in bytes.
    let itemSize: Int
    private let backend: Backend
    private let functionBytes: Int
    private let mappedBytes: Int
    /// The weights that a sequence passes in a step, in bytes.
    private let passedBytes: Int
    /// The parameters and the optimizer's state, and the gradient of what is trained, in bytes; of DP-SGD the gradient of an example and
    /// their sum.
    private let vectors, gradients: Int
    /// The parameters as `CachedModel` takes them, in bytes: float32 matrices of every module.
    private let wholeBytes: Int
    /// The blocks from the first that is trained.
    private let trainedBlocks: Int
    /// The parameters of the block that has most, and the gradient of the one that has the largest, in bytes.
    private let loraBytes, gradientBytes: Int
    /// The number of gate, up and down that have adapters, of the MLP or of experts.
    private let adaptedInMLP: Int
    /// Tokens of a segment, of a mixer that goes by segments.
    let segment: Int
    /// The intermediates of the mixers and of the MLPs of the last blocks, by the number of blocks, in bytes.
    private var intermediates = [0]

    private var tileSizes: [Int] { Machine.choices(backend, hiddenSize: architecture.hiddenSize, length: length) }

    /// The inputs of blocks besides the output of the block before, and the sums of the gradients by keys and values that several
    /// take, in bytes.
    private let context, sharedSums: Int

    /// The memory that the system allows the process, in bytes; nil for all there is.
    private let systemLimit: Int?

    public init(_ manifest: Manifest, _ settings: RunSettings, systemLimit: Int? = systemMemoryLimit()) {
        self.systemLimit = systemLimit
        architecture = manifest.architecture
        self.settings = settings
        group = manifest.featureGroup
        mappedBytes = manifest.mappedBytes
        let layouts = settings.layouts(of: architecture)
        trainedBlocks = layouts.count - (layouts.firstIndex { $0.count > 0 } ?? layouts.count)
        loraBytes = layouts.map { 4 * $0.count }.max() ?? 0
        gradientBytes = layouts.map { 4 * $0.trainedCount }.max() ?? 0
        let adapted = Set(layouts.flatMap { $0.modules.flatMap(\.projections) })
        let ofMLPs: [Set<Projection>] = [[.gate, .up, .down], [.expertGate, .expertUp, .expertDown]]
        adaptedInMLP = ofMLPs.map { adapted.intersection($0).count }.max() ?? 0
        passedBytes = Self.passedBytes(manifest, settings, trainedBlocks)
        backend = manifest.device
        itemSize = manifest.dtype.dtype.size
        let functions = Set(
            manifest.lengths(settings).flatMap { length in manifest.blocks.compactMap { $0.functions["\(length)"] } })
        functionBytes = manifest.files.filter { functions.contains($0.path) }.reduce(0) { $0 + $1.size }
        (vectors, gradients) = Self.vectors(layouts, settings)
        wholeBytes = layouts.reduce(0) { $0 + 4 * $1.whole.count }
        (context, sharedSums) = Self.context(manifest, settings, firstTrained: layouts.count - trainedBlocks)
        segment = Machine.mixerTokens(architecture, settings.seqLen, backend.processor)
        let ofMixers = architecture.mixers.map(intermediates(of:))
        for (mixer, mlp) in zip(architecture.layers, architecture.mlpLayers).reversed() {
            let ofMLP = activation(2 * architecture.mlps[mlp].intermediateSize)
            intermediates.append(intermediates[intermediates.count - 1] + ofMixers[mixer] + ofMLP)
        }
    }

    private static func passedBytes(_ manifest: Manifest, _ settings: RunSettings, _ trainedBlocks: Int) -> Int {
        let goesBack = settings.method.hasBackwardPass
        let first = goesBack ? manifest.architecture.numHiddenLayers - trainedBlocks : 0
        let blocks = manifest.blocks.reduce(0) { sum, kind in
            sum + kind.words * (kind.layers.count + kind.layers.count { $0 >= first })
        }
        let projection = (manifest.perLayerProjection?.words ?? 0) * (goesBack ? 2 : 1)
        return 4 * (blocks + projection + manifest.head.words * (goesBack ? 1 : 2))
    }

    private static func context(
        _ manifest: Manifest, _ settings: RunSettings, firstTrained: Int
    ) -> (context: Int, sums: Int) {
        let (architecture, itemSize) = (manifest.architecture, manifest.dtype.dtype.size)
        // The tokens' rows of the table, as they are quantized, and the first block's input.
        let row = 4 * (manifest.perLayerEmbedding?.words ?? 0) / architecture.vocabSize
        let embeddings = architecture.perLayer == nil ? 0 : row + architecture.hiddenSize * itemSize
        let owners = architecture.owners.compactMap { block -> (block: Int, width: Int)? in
            guard case .attention(let mixer) = architecture.block(block).mixer else { return nil }
            return (block, 2 * mixer.keyValueWidth)
        }
        let shared = owners.reduce(0) { $0 + $1.width }
        // The block that has them takes what the sums were into those of its own.
        let summed = owners.filter { $0.block >= firstTrained }.reduce(0) { $0 + $1.width }
        return (settings.seqLen * (embeddings + shared * itemSize), settings.seqLen * summed * 4)
    }

    private static func vectors(_ layouts: [LoRALayout], _ settings: RunSettings) -> (vectors: Int, gradients: Int) {
        let (all, trained) = (layouts.map(\.count), layouts.map(\.trainedCount))
        func sum(_ blocks: [Int], _ bytes: (_ parameters: Int) -> Int = { 4 * $0 }) -> Int {
            blocks.reduce(0) { $0 + bytes($1) }
        }
        let kept = Optimizer.state(settings)
        let state = kept.count * sum(trained) { kept.shape($0).reduce(kept.dtype.size, *) }
        let parameters = sum(all) { settings.loraDtype.dtype.size * $0 }
        let start = settings.keepsStart ? sum(all) : 0
        // A step can be taken back while the old values are there.
        return (
            (parameters + state) * (settings.skipBadSteps ? 2 : 1) + start,
            sum(trained) * (settings.dpClip == nil ? 1 : 2)
        )
    }

    private var method: GradientMethod { settings.method }
    var length: Int { settings.seqLen }
    private var rank: Int { settings.rank }

    /// The fastest plan that stays within `memoryLimitMb` and what the system allows; where neither matters, large tiles and everything
    /// in memory. `offload` restricts the choice; it is the planner's last resort.
    ///
    /// - Throws: `MeSPError` with the least possible peak, where the limit is below it.
    public func plan() throws -> Plan {
        let asked = settings.memoryLimitMb.map { Int($0 * 1e6) }
        var plan = try plan(within: asked)
        // On a GPU the maps are kept only where they fit beside the peak, as the driver may count them.
        let limit = backend == .gpu ? min(asked ?? .max, room) - withMargin(peak(plan)) : room
        if mappedBytes <= limit { plan.keepsMaps = true }
        return plan
    }

    /// The memory for a step and the weights' clean pages together, in bytes.
    private var room: Int { min(systemLimit ?? .max, Int(ProcessInfo.processInfo.physicalMemory)) }

    private func plan(within asked: Int?) throws -> Plan {
        let offload = settings.offload ?? .none
        let standard = orders.flatMap { orders in
            ordered(
                Plan(tileBytes: tileSizes[0], offload: offload, keepsAnswer: keepingAnswers(offload).last ?? false),
                orders)
        }
        if asked == nil, let plan = standard.first(where: { withMargin(peak($0)) <= systemLimit ?? .max }) {
            return plan
        }
        let limit = min(asked ?? .max, systemLimit ?? .max)
        if let plan = plans.first(where: { withMargin(peak($0)) <= limit }) { return plan }
        let (subject, remedy): (Sentence, Sentence) =
            limit == asked
            ? ("A memory limit of \(rounded(limit)) MB is too low", "raise it")
            : ("The system allows this process \(rounded(limit)) MB, which is too little", "allow it more")
        throw MeSPError(
            "\(subject): sequences of \(length) tokens at rank \(rank) need at least \(rounded(leastPeak)) MB; \(remedy) or take shorter sequences, or fewer in a step."
        )
    }

    /// The next plan that takes less memory, nil where none does.
    public func cheaper(than plan: Plan) -> Plan? {
        let peak = peak(plan)
        guard var cheaper = plans.first(where: { self.peak($0) < peak }) else { return nil }
        // On a CPU they are clean pages, which the system takes back by itself.
        if backend == .cpu { cheaper.keepsMaps = plan.keepsMaps }
        return cheaper
    }

    /// From the fastest to the slowest.
    private var plans: [Plan] {
        let maxKept = method.readsIntermediates ? trainedBlocks : 0
        return offloads.flatMap { offload in
            orders.flatMap { orders in
                tileSizes.flatMap { tileBytes in
                    keepingAnswers(offload).flatMap { keepsAnswer in
                        (0...maxKept).reversed().flatMap {
                            ordered(
                                Plan(
                                    tileBytes: tileBytes, keptBlocks: $0, offload: offload, keepsAnswer: keepsAnswer),
                                orders)
                        }
                    }
                }
            }
        }
    }

    // MARK: - The order of a step's sequences

    /// The orders to choose from, the faster first; where one is as fast as another, the one that takes less memory. Sequences go through
    /// the blocks together where that takes no more memory, or where memory doesn't hold the weights, which each sequence by itself would
    /// read from disk again.
    private var orders: [[RunSettings.Order?]] {
        guard settings.sequences > 1 else { return [[nil]] }
        guard method.hasBackwardPass, settings.objective == nil, settings.dpClip == nil,
            settings.sequences <= maxTogether
        else {
            return [[.sequences]]
        }
        if let order = settings.order { return [[order]] }
        let plan = Plan(tileBytes: tileSizes[0], offload: settings.offload ?? .none, order: .sequences)
        return withMargin(peak(plan)) + mappedBytes <= room ? [[.blocks, .sequences]] : [[.blocks], [.sequences]]
    }

    /// The most sequences that may go through the blocks together without an overflow of a product.
    private var maxTogether: Int {
        let bytes = kept(trainedBlocks) + (trainedBlocks + 1) * hidden + context + sharedSums
        return min(RunSettings.maxSequences, (1 << 60) / bytes)
    }

    /// Whether a plan that was read from a file can be one for these settings.
    func isPossible(_ plan: Plan) -> Bool {
        (1...(1 << 30)).contains(plan.tileBytes) && (0...(1 << 40)).contains(plan.cacheBytes)
            && (0...(method.readsIntermediates ? trainedBlocks : 0)).contains(plan.keptBlocks)
            && (plan.order != .blocks || orders.joined().contains(.blocks))
            && (!plan.keepsAnswer || keepingAnswers(plan.offload).contains(true))
    }

    /// The plan in whichever of these orders takes least memory; none where it can be in none.
    private func ordered(_ plan: Plan, _ orders: [RunSettings.Order?]) -> [Plan] {
        let plans = orders.map { order in
            var plan = plan
            plan.order = order
            return plan
        }
        return plans.filter(fits).min { peak($0) < peak($1) }.map { [$0] } ?? []
    }

    /// Whether there is room for all sequences' block inputs, unless that order is asked for: in memory or, up to the size of the weights,
    /// on disk.
    private func fits(_ plan: Plan) -> Bool {
        guard plan.order == .blocks, settings.order == nil else { return true }
        return withMargin(peak(plan)) <= room
            && (plan.offload == .none || settings.sequences * trainedBlocks * hidden <= mappedBytes)
    }

    /// The weights that a step reads, from disk where memory doesn't hold them, in bytes; nil with an objective, where that varies.
    func readWeightBytes(_ plan: Plan) -> Int? {
        guard settings.objective == nil else { return nil }
        let (bytes, overflow) = passedBytes.multipliedReportingOverflow(
            by: plan.order == .blocks ? 1 : settings.sequences)
        return overflow ? .max : bytes
    }

    /// The possible values of `keepsAnswer`, the faster first: on disk it costs no memory.
    private func keepingAnswers(_ offload: RunSettings.Offload) -> [Bool] {
        guard settings.objective?.takesPairs == true, method.hasBackwardPass else { return [false] }
        return offload == .none ? [true, false] : [true]
    }

    /// The plan with a cache, on a GPU, for the self-check to measure. A smaller one would stay empty: while the GPU is behind, freed
    /// buffers are still in use.
    package func keepingCache(_ plan: Plan) -> Plan {
        var kept = plan
        kept.cacheBytes = 3 * phase(plan)
        return kept
    }

    private var offloads: [RunSettings.Offload] {
        if let choice = settings.offload { return [choice] }
        return method.hasBackwardPass ? [.none, .inputs, .all] : [.none, .all]
    }

    /// The lowest limit that some plan stays within, in bytes.
    public var leastPeak: Int { withMargin(plans.map(peak).min() ?? 0) }

    /// A prediction with a margin, so that it holds as a limit: a prediction is some 8% off.
    private func withMargin(_ bytes: Int) -> Int { bytes + bytes / 100 * 8 }

    /// The predicted peak footprint of a step, in bytes.
    public func peak(_ plan: Plan) -> Int { max(peakOfPasses(plan), sampling(plan) + answerCaches(plan)) }

    /// Where the step's answers are there already, or are the data's.
    private func peakOfPasses(_ plan: Plan) -> Int {
        process + (metalBytes ?? 0) + arrays(plan)
    }

    // MARK: - Answers that are sampled (`Core/Rewards`)

    /// The memory for the caches of the answers that are written together, in bytes: half of what the step's passes take beyond what there
    /// is while answers are written, or the cache of one. It depends on nothing but plan and settings, as a run that goes on samples the
    /// same answers.
    func answerCaches(_ plan: Plan) -> Int {
        guard settings.groupSize != nil else { return 0 }
        let one = architecture.cacheSize(tokens: length, itemSize: itemSize)
        return max((peakOfPasses(plan) - sampling(plan)) / 2, one)
    }

    /// The peak while answers are written, without their caches, in bytes; 0 where none are. The parameters are copied where they are not
    /// such vectors in memory. A prompt goes through a block as in a step; of the texts there are the logits, of one also those that a token
    /// is drawn from, with its noise.
    private func sampling(_ plan: Plan) -> Int {
        guard settings.groupSize != nil else { return 0 }
        let isWhole = plan.offload != .all && settings.loraDtype == .float32 && settings.projections == nil
        let texts = min(settings.sequences, CachedModel.mostTexts)
        let logits = 4 * architecture.vocabSize * (texts + 4)
        return process + (metalBytes ?? 0) + (plan.offload == .all ? 0 : vectors) + (isWhole ? 0 : wholeBytes)
            + max(forward, logits)
    }

    /// The part of a predicted peak that is Metal's, in bytes; nil where MLX does not start it. See `MetalMemory`.
    package var metalBytes: Int? {
        backend == .gpu || Processor.cpu.startsMetal ? MetalMemory[backend] ?? MetalMemory.assumed : nil
    }

    /// What MLX's arrays and its cache take at a step's peak, in bytes. On a GPU back-pressure keeps each phase in its workspace.
    public func arrays(_ plan: Plan) -> Int {
        guard backend == .gpu else { return arraysOnCPU(plan) }
        // With short command buffers two things exceed the workspace: the buffer that is encoded, and arrays of a finished one whose
        // completion handler has not run yet.
        let workspaces =
            MLXSupport.hasShortCommandBuffers
            ? workspace(plan) + phase(plan) * 3 / 10 : max(phase(plan), workspace(plan))
        let phase = max(workspaces, baseline ?? 0)
        // d before a block's backward pass, until its gradient is confirmed.
        let held = method.hasBackwardPass ? hidden : 0
        return lasting(plan) + (plan.keptBlocks > 0 ? 2 * intermediate : 0) + phase + held
    }

    /// The arrays that live through a step, in bytes: parameters, optimizer state and sums of gradients; block inputs; kept intermediates.
    private func lasting(_ plan: Plan) -> Int {
        let (sequences, gathers) = (plan.sequences(of: settings), plan.gathersGradients(of: settings))
        let inputs = !method.hasBackwardPass || plan.offload != .none ? 0 : sequences * trainedBlocks * hidden
        // The last block's outputs of the other sequences, then their d.
        let waiting = (sequences - 1) * hidden + sequences * (context + (method.hasBackwardPass ? sharedSums : 0))
        let together = plan.order == .blocks
        // Of a block, until the last sequence's gradient is there.
        let sum = together ? gradientBytes : 0
        return (plan.offload == .all ? 0 : vectors + (gathers ? gradients : 0)) + inputs + waiting + sum + examples
            + kept(plan.keptBlocks) * (together ? sequences : 1)
    }

    /// The tokens of a step's sequences, and the positions that count, which are all there when the step begins; of DP-SGD one by one.
    private var examples: Int {
        let arrays = (length + 1) * MemoryLayout<Int32>.size + length * MemoryLayout<Int>.size
        return (settings.dpClip == nil ? settings.sequences : 1) * (settings.objective == nil ? 1 : 2) * (arrays + 256)
    }

    private func tile(_ plan: Plan) -> Machine {
        Machine(architecture, group: group, length: length, bytes: plan.tileBytes, processor: backend.processor)
    }

    /// The memory of the arrays of one block, or of the head, on a GPU, in bytes: those that live through a tile, and those that some 21
    /// kernels write, the longest command buffer, for while it is encoded nothing of it can go. Whichever derivative takes more, the
    /// mixer's or the MLP's; fitted to what docs/ledger.md counts.
    private func phase(_ plan: Plan) -> Int {
        let postNormed = architecture.postNorms ? hidden : 0
        let mixer = 51 * plan.tileBytes + largest(tenGPUPhases) + 17 * postNormed
        let mlp = 34 * plan.tileBytes + 180 * hidden + 38 * gradientBytes + 46 * postNormed
        return max(mixer, mlp, 10 * update(plan)) / 10
    }

    /// Above what there is when a phase begins, what it may take before MLX waits for the GPU; and a cache. See `withWorkspace`. With
    /// short command buffers, what lets several of them run. With long ones, less than half of what the phase takes at its peak, so that
    /// only the buffer that is being encoded goes beyond.
    func workspace(_ plan: Plan) -> Int {
        (MLXSupport.hasShortCommandBuffers ? phase(plan) : phase(plan) * 2 / 5) + plan.cacheBytes
    }

    private func arraysOnCPU(_ plan: Plan) -> Int {
        let tile = tile(plan)
        let forward = plan.keptBlocks > 0 ? forward + 2 * intermediate : forward
        return lasting(plan)
            + max(forward, loss(tile), backward(tile), update(plan))
            + (Processor.cpu.startsMetal ? MetalMemory.beyondArrays(blocks: architecture.numHiddenLayers) : 0)
            // Freed memory doesn't return to the system at once: small blocks, and gaps between activations.
            + (plan.tileBytes < tileSizes[0] ? 4_000_000 : 0) + gaps(plan)
    }

    /// The memory that malloc keeps in gaps between arrays, in bytes: a sixteenth of those that last through a step, at most 2 MB, and 1.5 MB
    /// where arrays are large. With experts, mixers other than attention, or attention wider than the model, arrays are of more sizes: in
    /// place of both, large ones leave 1 MB and gaps of their own size, of the model's and the mixer's where that is wider, and two or
    /// three of the latter where it is recurrent, one with everything on disk. Parts of shorter sequences leave one more. Arrays of 8 MiB
    /// leave no gaps of their size, as malloc maps each by itself; of a long sequence the parts alone leave any.
    private func gaps(_ plan: Plan) -> Int {
        let (mapped, part) = (8 << 20, hidden / length * tile(plan).mlpTokens)
        if hidden >= mapped, part < mapped { return part + baselineGaps }
        let widest = max(hidden, largest(mixed))
        let isWide = widest > hidden
        let isRecurrent = isWide && architecture.isRecurrent
        let hasFewSizes =
            !isWide && architecture.mlps.allSatisfy { $0.experts == nil }
            && architecture.mixers.allSatisfy { if case .attention = $0 { true } else { false } }
        let isLarge = isRecurrent ? widest >= 1_500_000 : hidden >= (isWide ? 1_000_000 : 1_500_000)
        guard isLarge, !hasFewSizes, hidden < mapped, widest < mapped || (isRecurrent && widest == mapped) else {
            return min(2_000_000, lasting(plan) / 16) + (isLarge ? 1_500_000 : 0) + baselineGaps
        }
        let recurrent = plan.offload == .all ? 1 : hidden < 1_000_000 ? 2 : 3
        let ofWidest = isRecurrent ? recurrent * widest : isWide ? widest + hidden : widest
        return ofWidest + (isWide || part == hidden ? 0 : part) + 1_000_000 + baselineGaps
    }

    // MARK: - What is alive at once. Counts of arrays follow the code; the few constants were fitted to measurements on Linux.

    /// While a baseline differentiates a block; nil for the structured backward pass.
    private var baseline: Int? {
        switch method {
        case .mesp: return nil
        case .mebp:
            // All of the block's weights dequantized, six arrays as wide as the MLP, and what automatic differentiation keeps of the
            // mixer and of gelu.
            let weights = architecture.kinds.map { block in
                block.modules.reduce(0) { $0 + block.dimensions($1).inputs * block.dimensions($1).outputs }
            }
            return 4 * (weights.max() ?? 0) + (architecture.hiddenAct == .gelu ? 15 : 6) * intermediate
                + largest(automatic)
        // z, and the parameters moved by it, on the way into a block.
        case .mezo: return forward + gradientBytes + loraBytes
        }
    }

    /// The memory that malloc keeps between MeBP's arrays as wide as the MLP.
    private var baselineGaps: Int {
        method == .mebp && (1_600_000..<8 << 20).contains(intermediate) ? 7 * intermediate : 0
    }

    /// The process with MLX started and, where they are called, the block functions imported, whose graphs take several times the files.
    private var process: Int {
        (backend == .cpu ? 4_750_000 + 1_000_000 * Processor.cpu.threads : 6_750_000)
            + (backend == .gpu || method == .mebp ? 15 * functionBytes / 2 : 0)
    }

    /// One array `[T, features]`.
    func activation(_ features: Int) -> Int { length * features * itemSize }
    var hidden: Int { activation(architecture.hiddenSize) }
    private var intermediate: Int { activation(architecture.widestMLP) }

    /// The bytes of the mixer that takes most.
    private func largest(_ bytes: (Mixer) -> Int) -> Int { architecture.mixers.map(bytes).max() ?? 0 }

    /// Whether all mixers go by segments.
    private var isCut: Bool { architecture.mixers.allSatisfy(isCut) }

    /// `rows` of a weight `[rows, hidden]`, dequantized before it is multiplied.
    private func weight(_ rows: Int) -> Int {
        Processor.cpu.unpacksInside ? 0 : rows * architecture.hiddenSize * 4
    }

    /// p of a block with embeddings for each layer.
    private var perLayer: Int { activation(architecture.perLayer?.size ?? 0) }

    /// The outputs of the mixer and of the MLP, which the backward pass of post-norms reads.
    private var postNormed: Int { architecture.postNorms ? 2 * hidden : 0 }

    /// The intermediates that the last blocks keep, in bytes: m₁, m₂, m₃, mixed, x_mid, gate and up.
    private func kept(_ blocks: Int) -> Int {
        intermediates[blocks] + blocks * (hidden + postNormed)
    }

    /// The forward pass of a block: x, mixer_in, x_mid and y, with post-norms an output before its norm, what the mixer takes and makes,
    /// and its tiles, of some 256 outputs each. By segments x and x_mid, which y replaces.
    private var forward: Int {
        // Of embeddings for each layer p, u and m.
        ((isCut ? 2 : 4) + (architecture.postNorms ? 1 : 0)) * hidden + largest(forward(of:)) + 3 * weight(256)
            + 2 * (isCut ? ofSegment(activation(256)) : activation(256)) + 3 * perLayer
    }

    /// y; of the tokens at a time h, dh and the running sum before and after a tile, in float32, and where they are not all y's gradient of
    /// all; of the tile, W while it is dequantized, and z and p.
    private func loss(_ tile: Machine) -> Int {
        let (rows, tokens) = (min(tile.vocabulary, architecture.vocabSize), tile.mlpTokens)
        let arrays = tokens < length ? max(3 * length, 2 * length + 5 * tokens) : 5 * length
        return arrays * architecture.hiddenSize * 4 + 3 * weight(rows) + 4 * tokens * rows * 4
    }

    private func backward(_ tile: Machine) -> Int {
        if let baseline { return baseline }
        let a = architecture
        let features = min(tile.mlp, a.widestMLP)
        // x_mid, and dy, which d_x_mid replaces; of the tokens that go through the MLP's derivative at a time x, or a copy of x_mid where
        // these are not all.
        let some = hidden / length * tile.mlpTokens
        let before = 2 * hidden + some
        let hasFactor = a.mlps.contains { $0.experts?.mlpGate != nil }
        return max(
            // d waits while the block function runs again; by segments there is no y, nor all of mixer_in.
            (isCut ? 0 : hidden) + forward + postNormed,
            // The mixer's intermediates; of some tokens, with post-norms the gradient by mlp_out, mlp_in and its gradient, which a product that
            // unpacks W is added to in its place, or else before a tile and with the tile's gate, and the gradient by its output where that
            // has a factor; of the tile, three weights, one of them while it is dequantized, and its arrays.
            largest(intermediates(of:)) + before + (Processor.cpu.unpacksInside ? 2 : 3) * some
                + (a.postNorms || hasFactor ? some : 0) + 5 * weight(features)
                + tileArrays * (activation(features) / length * tile.mlpTokens) + gradientBytes + postNormed,
            // The same without the tile, but with the temporaries of the norm's derivative.
            largest(intermediates(of:)) + before + 9 * some / 2 + gradientBytes + postNormed,
            // Of embeddings for each layer h, z and dz, dh₁ and dh; p, u, m, dm and du.
            a.perLayer == nil
                ? 0 : largest(intermediates(of:)) + before + 5 * some + 5 * perLayer + gradientBytes + postNormed,
            // With post-norms also the gradient by mixer_out.
            largest { backward(of: $0, tile) } + (a.postNorms ? hidden : 0) + 2 * gradientBytes)
    }

    /// The update of a block's parameters: x, d and their like, and arrays as long as the gradient, of which it is made, unless gradients are
    /// gathered, and the optimizer makes others; where A is frozen, whole vectors. It counts where experts are trained: fitted to two blocks
    /// of LFM2.5-8B-A1B (`tools/fit_planner.py`).
    private func update(_ plan: Plan) -> Int {
        guard method.hasBackwardPass else { return 0 }
        let arrays =
            switch settings.optimizer {
            case .sgd: 6
            case .adamw: 7
            case .adamw8bit: 8
            }
        return 3 * hidden + (arrays - (plan.gathersGradients(of: settings) ? 2 : 0)) * gradientBytes
            + (settings.freezeA ? 3 * loraBytes : 0)
    }

    /// The number of arrays of a tile's size that the MLP's derivative has at once. Fused: gate, up, d_act and d_gate, with the second product that
    /// gate or up is the sum of where it has an adapter, and act where down has one. Otherwise also these sums and the parts of the
    /// activation's derivative, of which gelu has more, with its tanh.
    private var tileArrays: Int {
        Processor.cpu.fuses
            ? 4 + adaptedInMLP : (architecture.hiddenAct == .gelu ? 10 : 5) + 2 * adaptedInMLP
    }
}

/// Bytes in megabytes (10⁶), rounded up.
private func rounded(_ bytes: Int) -> Int { (bytes + 999_999) / 1_000_000 }
