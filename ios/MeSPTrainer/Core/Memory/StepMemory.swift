import MeSPBundle

/// The prediction: what is alive at once in each phase of a step, in bytes. The counts of arrays have the names of docs/method.md; whatever
/// depends on the machine is in `machineMemory`.
extension Planner {
    /// The predicted peak footprint of a step, in bytes.
    package func peak(_ plan: Plan) -> Int { max(peakOfPasses(plan), sampling(plan) + answerCaches(plan)) }

    /// Where the step's answers are there already, or are the data's.
    private func peakOfPasses(_ plan: Plan) -> Int { process + arrays(plan) }

    /// What MLX's arrays and its cache take at a step's peak, in bytes, with what the allocator keeps.
    package func arrays(_ plan: Plan) -> Int { lasting(plan) + machineMemory.working(self, plan) }

    /// The part of a predicted peak that is Metal's, in bytes; nil where MLX does not start it.
    package var metalBytes: Int? { machineMemory.metal }

    /// The process with MLX started and, where they are called, the block functions imported, whose graphs take several times the files.
    var processBytes: Int {
        let functions = Set(
            manifest.lengths(settings).flatMap { length in manifest.blocks.compactMap { $0.functions["\(length)"] } })
        let files = manifest.files.filter { functions.contains($0.path) }.reduce(0) { $0 + $1.size }
        let calls = settings.needsFormulas ? 0 : max(machineMemory.functions, method == .mebp ? 1 : 0)
        return machineMemory.process + (machineMemory.metal ?? 0) + calls * 15 * files / 2
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
    /// float32 matrices of every module in memory. A prompt goes through a block as in a step; of the texts there are the logits, of one also
    /// those that a token is drawn from, with its noise.
    private func sampling(_ plan: Plan) -> Int {
        guard settings.groupSize != nil else { return 0 }
        let isWhole = plan.offload != .all && settings.loraDtype == .float32 && settings.projections == nil
        let logits = 4 * architecture.vocabSize * (min(settings.sequences, CachedModel.mostTexts) + 4)
        return process + (plan.offload == .all ? 0 : vectors) + (isWhole ? 0 : sum { 4 * $0.whole })
            + max(forwardBytes, logits)
    }

    // MARK: - What lives through a step

    /// Parameters, optimizer state and sums of gradients; block inputs.
    func lasting(_ plan: Plan) -> Int {
        let (sequences, goesBack) = (plan.sequences(of: settings), method.hasBackwardPass)
        let vectors = plan.offload == .all ? 0 : vectors + (plan.gathersGradients(of: settings) ? gradients : 0)
        let inputs = goesBack && plan.offload == .none ? sequences * trainedBlocks * hidden : 0
        // The last block's outputs of the other sequences, then their d.
        let waiting = (sequences - 1) * hidden + sequences * (context + (goesBack ? sharedSums : 0))
        // Of a block, until the last sequence's gradient is there.
        return vectors + inputs + waiting + examples + (plan.order == .blocks ? gradientBytes : 0)
    }

    /// The intermediates of the last blocks, or of all but one of them.
    func held(_ plan: Plan, but missing: Int = 0) -> Int {
        kept[max(0, plan.keptBlocks - missing)] * (plan.order == .blocks ? settings.sequences : 1)
    }

    /// Of all blocks.
    private func sum(_ bytes: (Parameters) -> Int) -> Int { parameters.reduce(0) { $0 + bytes($1) } }

    /// The parameters and the optimizer's state. A step can be taken back while the old values are there.
    var vectorBytes: Int {
        let state = Optimizer.state(settings)
        let values = sum {
            settings.loraDtype.dtype.size * $0.count + state.count * state.shape($0.trained).reduce(state.dtype.size, *)
        }
        return values * (settings.skipBadSteps ? 2 : 1) + (settings.keepsStart ? sum { 4 * $0.count } : 0)
            + 4 * magnitudes
    }

    /// The gradient of all blocks; of DP-SGD the gradient of an example and their sum.
    private var gradients: Int { sum { 4 * $0.trained } * (settings.dpClip == nil ? 1 : 2) }

    /// The largest gradient of a block, and the most parameters of one.
    var gradientBytes: Int { parameters.map { 4 * $0.trained }.max() ?? 0 }
    private var loraBytes: Int { parameters.map { 4 * $0.count }.max() ?? 0 }

    /// The inputs of blocks besides the output of the block before: of embeddings for each layer the tokens' rows of the table, as they are
    /// quantized, and the first block's input; the keys and values that several blocks take.
    var context: Int {
        let row = 4 * (manifest.perLayerEmbedding?.words ?? 0) / architecture.vocabSize
        return (architecture.perLayer == nil ? 0 : length * row + hidden) + activation(sharedWidth(from: 0))
    }

    /// The sums of the gradients by these keys and values. The block that has them takes what the sums were into those of its own.
    var sharedSums: Int { 4 * length * sharedWidth(from: parameters.count - trainedBlocks) }

    private func sharedWidth(from first: Int) -> Int {
        architecture.owners.filter { $0 >= first }.reduce(0) { width, block in
            guard case .attention(let mixer) = architecture.block(block).mixer else { return width }
            return width + 2 * mixer.keyValueWidth
        }
    }

    /// The tokens of a step's sequences, and the positions that count, which are all there when the step begins; of DP-SGD one by one.
    private var examples: Int {
        let arrays = (length + 1) * MemoryLayout<Int32>.size + length * MemoryLayout<Int>.size
        return (settings.dpClip == nil ? settings.sequences : 1) * (settings.objective == nil ? 1 : 2) * (arrays + 256)
    }

    // MARK: - A phase of a step

    /// The phase that takes most, on a CPU. In the forward pass of a block that is kept gate, up and the product of them are whole.
    func phase(_ plan: Plan) -> Int {
        let machine = makeMachine(plan)
        let ofMLP = plan.keptBlocks > 0 ? 3 * intermediate : 0
        return max(
            held(plan, but: 1) + forwardBytes + ofMLP, held(plan) + loss(machine), baseline ?? backward(plan, machine),
            update(plan))
    }

    /// Temporaries of the plan's size.
    func makeMachine(_ plan: Plan) -> Machine {
        Machine(
            architecture, group: manifest.featureGroup, length: length, bytes: plan.tileBytes,
            processor: manifest.device.processor)
    }

    /// While a baseline differentiates a block; nil for the structured backward pass.
    var baseline: Int? {
        switch method {
        case .mesp: return nil
        case .mebp:
            // All of the block's weights dequantized, arrays as wide as the MLP, and what automatic differentiation keeps of the mixer.
            let weights = architecture.kinds.map { block in
                block.modules.reduce(0) { $0 + block.dimensions($1).inputs * block.dimensions($1).outputs }
            }
            return 4 * (weights.max() ?? 0) + (architecture.hiddenAct == .gelu ? 13 : 11) * intermediate
                + largest(automatic)
        // z, its multiple and the parameters moved by that, on the way into a block.
        case .mezo: return forwardBytes + 2 * gradientBytes + loraBytes
        }
    }

    /// The forward pass of a block: x, mixer_in, x_mid and y, by segments x and x_mid, which y replaces; with post-norms an output before its
    /// norm; what the mixer takes and makes; three weights of its tiles; of embeddings for each layer p, u and m.
    private var forwardBytes: Int {
        (isCut ? 2 : 4) * hidden + normed + largest(forwardBytes(of:)) + 3 * weight(256) + 3 * perLayer
    }

    /// y and, in float32, d of all tokens; of the tokens at a time h, dh, and the running sum before and after a tile; of the tile W while it is
    /// dequantized, and z and p.
    private func loss(_ machine: Machine) -> Int {
        let (rows, tokens) = (min(machine.vocabularyRows, architecture.vocabSize), machine.mlpTokens)
        return 4 * (2 * length + 3 * tokens) * architecture.hiddenSize + 3 * weight(rows) + 4 * 4 * tokens * rows
    }

    /// The backward pass of a block: while d waits and it runs again, by segments without y; the derivative of its MLP, and its mixer's.
    private func backward(_ plan: Plan, _ machine: Machine) -> Int {
        max(
            forwardBytes + (isCut ? 0 : hidden) + 2 * normed,
            max(held(plan), largest(recomputed)) + mlpBackward(machine),
            largest { backward(of: $0, machine) } + normed + gradientBytes)
    }

    /// Those of `MixerIntermediates`, and x_mid; of post-norms the outputs of mixer and MLP.
    private func recomputed(_ mixer: Mixer) -> Int { intermediates(of: mixer) + hidden + 2 * normed }

    /// The intermediates of a block that is kept: those that it recomputes otherwise, and without DoRA gate and up.
    func intermediates(of block: BlockShape) -> Int {
        recomputed(block.mixer) + (magnitudes > 0 ? 0 : activation(2 * block.mlp.intermediateSize))
    }

    /// The derivative of the MLP, beside what was kept or recomputed: dy; in float32 of the tokens at a time x_mid, mlp_in and d_mlp_in; a tile's arrays and
    /// weights, or the norm's derivative with p, u, m, dm and du of embeddings for each layer.
    private func mlpBackward(_ machine: Machine) -> Int {
        let features = min(machine.features, architecture.widestMLP)
        let some = 4 * machine.mlpTokens * architecture.hiddenSize
        let arrays = machineMemory.tileArrays(architecture.hiddenAct, adapted: adaptedInMLP)
        // With DoRA the products with g are arrays too where W is dequantized.
        let ofTile =
            4 * arrays * machine.mlpTokens * features + 5 * weight(features)
            + machineMemory.dequantized * some * (magnitudes > 0 ? 3 : 1)
        return hidden + 3 * some + max(ofTile, 2 * some + 5 * perLayer) + gradientBytes
    }

    /// The update of a block's parameters: x, d and their like, and arrays as long as the gradient, of which it is made, unless gradients are
    /// gathered, and the optimizer makes others; where A is frozen, whole vectors.
    func update(_ plan: Plan) -> Int {
        guard method.hasBackwardPass else { return 0 }
        let arrays =
            switch settings.effectiveOptimizer {
            case .sgd: 6
            case .adamw: 7
            case .adamw8bit: 8
            }
        return 3 * hidden + (arrays - (plan.gathersGradients(of: settings) ? 2 : 0)) * gradientBytes
            + (settings.freezeA ? 3 * loraBytes : 0)
    }

    // MARK: - Arrays

    /// The size of a stored number, in bytes.
    var itemSize: Int { manifest.dtype.dtype.size }
    /// One array `[T, features]`.
    func activation(_ features: Int) -> Int { length * features * itemSize }
    var hidden: Int { activation(architecture.hiddenSize) }
    var intermediate: Int { activation(architecture.widestMLP) }
    /// An output before its post-norm, which the derivative of the norm reads.
    var normed: Int { architecture.postNorms ? hidden : 0 }
    /// p of a block with embeddings for each layer.
    private var perLayer: Int { activation(architecture.perLayer?.size ?? 0) }
    /// `rows` of a weight `[rows, hidden]`, where they are dequantized before they are multiplied.
    private func weight(_ rows: Int) -> Int { machineMemory.dequantized * rows * architecture.hiddenSize * 4 }
    /// The bytes of the mixer that takes most.
    func largest(_ bytes: (Mixer) -> Int) -> Int { architecture.mixers.map(bytes).max() ?? 0 }
}
