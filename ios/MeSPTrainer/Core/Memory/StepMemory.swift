import MeSPBundle

/// The prediction of a step's memory: the bytes of the arrays that are alive at once in each phase of the step. docs/method.md defines the arrays'
/// names.
extension Planner {
    package func peak(_ plan: Plan) -> Int { max(peakOfPasses(plan), sampling(plan) + answerCaches(plan)) }

    private func peakOfPasses(_ plan: Plan) -> Int { process + arrays(plan) }

    package func arrays(_ plan: Plan) -> Int { lasting(plan) + processorMemory.working(self, plan) }

    package var metalBytes: Int? { processorMemory.metal }

    /// The bytes of the process once MLX has started and has imported the run's block functions.
    var processBytes: Int {
        let functions = manifest.functions(of: settings)
        let files = manifest.files.filter { functions.contains($0.path) }.reduce(0) { $0 + $1.size }
        return processorMemory.process + (processorMemory.metal ?? 0) + Self.halfFilesOfGraph * files / 2
    }

    // MARK: - Answers that are sampled (`Core/Rewards`)

    /// Returns the bytes for the caches of the answers that are sampled together: half of the difference between the peaks of the passes and of
    /// sampling, but at least the cache of one answer. Without sampled answers, returns 0. The number depends only on the bundle, the plan and the
    /// settings, so that a resumed run samples the same answers.
    func answerCaches(_ plan: Plan) -> Int {
        guard settings.groupSize != nil else { return 0 }
        let one = architecture.cacheSize(tokens: length, itemSize: itemSize)
        return max((peakOfPasses(plan) - sampling(plan)) / 2, one)
    }

    /// Returns the peak while answers are sampled, without their caches, in bytes; 0 without sampled answers. Sampling needs the parameters of all
    /// modules in memory, in float32. If they are stored otherwise, a copy is made.
    private func sampling(_ plan: Plan) -> Int {
        guard settings.groupSize != nil else { return 0 }
        let isWhole = plan.offload != .all && settings.loraDtype == .float32 && settings.projections == nil
        let logits = 4 * architecture.vocabSize * (min(settings.sequences, CachedModel.mostTexts) + 4)
        return process + (plan.offload == .all ? 0 : vectors) + (isWhole ? 0 : sum { 4 * $0.whole })
            + max(forwardBytes, logits)
    }

    // MARK: - What lives through a step

    func lasting(_ plan: Plan) -> Int {
        let (sequences, goesBack) = (plan.sequences(of: settings), method.hasBackwardPass)
        let vectors = plan.offload == .all ? 0 : vectors + (plan.gathersGradients(of: settings) ? gradients : 0)
        let inputs = goesBack && plan.offload == .none ? sequences * trainedBlocks * hidden : 0
        // While one sequence is processed, the other sequences keep the last block's output or its gradient. All sequences keep their side inputs and
        // the gradients of shared keys and values.
        let waiting = (sequences - 1) * hidden + sequences * (context + (goesBack ? sharedSums : 0))
        // With the order `blocks`, the sum of a block's gradients lasts until the last sequence's gradient is added.
        return vectors + inputs + waiting + examples + (plan.order == .blocks ? gradientBytes : 0)
    }

    func held(_ plan: Plan, but missing: Int = 0) -> Int {
        kept[max(0, plan.keptBlocks - missing)] * (plan.order == .blocks ? settings.sequences : 1)
    }

    private func sum(_ bytes: (Parameters) -> Int) -> Int { parameters.reduce(0) { $0 + bytes($1) } }

    var vectorBytes: Int {
        let state = Optimizer.state(settings)
        let values = sum {
            settings.loraDtype.dtype.size * $0.count + state.count * state.shape($0.trained).reduce(state.dtype.size, *)
        }
        return values * (settings.skipBadSteps ? 2 : 1) + (settings.keepsStart ? sum { 4 * $0.count } : 0)
            + 4 * magnitudes + (settings.dora ? loraBytes : 0)
    }

    /// The bytes of the gradients of all blocks. With DP-SGD there are an example's gradient and the sum.
    private var gradients: Int { sum { 4 * $0.trained } * (settings.dpClip == nil ? 1 : 2) }

    var gradientBytes: Int { parameters.map { 4 * $0.trained }.max() ?? 0 }
    private var loraBytes: Int { parameters.map { 4 * $0.count }.max() ?? 0 }

    /// The bytes of the side inputs: the shared keys and values, the norms of DoRA and, with per-layer embeddings, the tokens' rows of the embedding
    /// table and the first block's input.
    var context: Int {
        let row = 4 * (manifest.perLayerEmbedding?.words ?? 0) / architecture.vocabSize
        return (architecture.perLayer == nil ? 0 : length * row + hidden) + activation(sharedWidth(from: 0))
            + 4 * magnitudes
    }

    var sharedSums: Int { 4 * length * sharedWidth(from: parameters.count - trainedBlocks) }

    private func sharedWidth(from first: Int) -> Int {
        architecture.owners.filter { $0 >= first }.reduce(0) { width, block in
            guard case .attention(let mixer) = architecture.block(block).mixer else { return width }
            return width + 2 * mixer.keyValueWidth
        }
    }

    private var examples: Int {
        let arrays = (length + 1) * MemoryLayout<Int32>.size + length * MemoryLayout<Int>.size
        return (settings.dpClip == nil ? settings.sequences : 1) * (settings.objective == nil ? 1 : 2) * (arrays + 256)
    }

    // MARK: - A phase of a step

    func phase(_ plan: Plan) -> Int {
        let schedule = makeSchedule(plan)
        let ofMLP = plan.keptBlocks > 0 ? (settings.dropout > 0 ? 5 : 3) * intermediate : 0
        return max(
            held(plan, but: 1) + forwardBytes + ofMLP, held(plan) + loss(schedule),
            baseline ?? backward(plan, schedule),
            update(plan))
    }

    func makeSchedule(_ plan: Plan) -> Schedule {
        Schedule(
            architecture, group: manifest.featureGroup, length: length, bytes: plan.tileBytes,
            processor: settings.processor)
    }

    var baseline: Int? {
        switch method {
        case .mesp: return nil
        case .mebp:
            // MeBP holds the block's dequantized weights, 11 arrays as wide as the MLP (13 with gelu), and the mixer's arrays that automatic
            // differentiation keeps.
            let weights = architecture.kinds.map { block in
                block.modules.reduce(0) { $0 + block.dimensions($1).inputs * block.dimensions($1).outputs }
            }
            return 4 * (weights.max() ?? 0) + (architecture.hiddenAct == .gelu ? 13 : 11) * intermediate
                + largest(automatic)
        // MeZO holds the arrays of a block's forward pass, z, ε z, and the perturbed parameters.
        case .mezo: return forwardBytes + 2 * gradientBytes + loraBytes
        }
    }

    /// The bytes of a block's forward pass: the mixer's arrays, three dequantized tiles of weights, and x, mixer_in, x_mid and y. With segments, only
    /// x and x_mid of these four count. Post-norms and per-layer embeddings add arrays.
    private var forwardBytes: Int {
        (isCut ? 2 : 4) * hidden + normed + largest(forwardBytes(of:)) + 3 * weight(256) + 3 * perLayer
    }

    /// Some arrays have all tokens, some have the tokens that are processed at a time, and some have a tile of the vocabulary.
    private func loss(_ schedule: Schedule) -> Int {
        let (rows, tokens) = (min(schedule.vocabularyRows, architecture.vocabSize), schedule.mlpTokens)
        return 4 * (2 * length + 3 * tokens) * architecture.hiddenSize + 3 * weight(rows) + 4 * 4 * tokens * rows
    }

    private func backward(_ plan: Plan, _ schedule: Schedule) -> Int {
        let masked = settings.dropout > 0 ? inSegment(4 * length * architecture.hiddenSize) : 0
        return max(
            forwardBytes + (isCut ? 0 : hidden) + 2 * normed,
            max(held(plan), largest(recomputed)) + mlpBackward(schedule) + masked,
            largest { backward(of: $0, schedule) } + normed + gradientBytes + masked)
    }

    private func recomputed(_ mixer: Mixer) -> Int { intermediates(of: mixer) + hidden + 2 * normed }

    /// Returns the bytes of a kept block's intermediates: those that other blocks recompute and, without DoRA, gate and up.
    func intermediates(of block: BlockShape) -> Int {
        recomputed(block.mixer) + (magnitudes > 0 ? 0 : activation(2 * block.mlp.intermediateSize))
    }

    private func mlpBackward(_ schedule: Schedule) -> Int {
        let features = min(schedule.features, architecture.widestMLP)
        let some = 4 * schedule.mlpTokens * architecture.hiddenSize
        let arrays = processorMemory.tileArrays(architecture.hiddenAct, adapted: adaptedInMLP)
        // With DoRA, if W is dequantized, the products with g are arrays too.
        let ofTile =
            4 * arrays * schedule.mlpTokens * features + 5 * weight(features)
            + processorMemory.dequantized * some * (magnitudes > 0 ? 3 : 1)
        return hidden + 3 * some + max(ofTile, 2 * some + 5 * perLayer) + gradientBytes
    }

    func update(_ plan: Plan) -> Int {
        guard method.hasBackwardPass else { return 0 }
        let arrays =
            switch settings.effectiveOptimizer {
            case .sgd: 6
            case .adamw: 7
            case .adamw8bit: 8
            }
        let factors = settings.loraplusLrRatio == 1 ? 0 : 1
        return 3 * hidden + (arrays + factors - (plan.gathersGradients(of: settings) ? 2 : 0)) * gradientBytes
            + (settings.freezeA ? 3 * loraBytes : 0)
    }

    // MARK: - Arrays

    var itemSize: Int { settings.processor.dtype.size }
    func activation(_ features: Int) -> Int { length * features * itemSize }
    var hidden: Int { activation(architecture.hiddenSize) }
    var intermediate: Int { activation(architecture.widestMLP) }
    var normed: Int { architecture.postNorms ? hidden : 0 }
    private var perLayer: Int { activation(architecture.perLayer?.size ?? 0) }
    /// Returns the bytes of `rows` of a weight `[rows, hidden]`, if they are dequantized before a product; 0 otherwise.
    private func weight(_ rows: Int) -> Int { processorMemory.dequantized * rows * architecture.hiddenSize * 4 }
    func largest(_ bytes: (Mixer) -> Int) -> Int { architecture.mixers.map(bytes).max() ?? 0 }
}
