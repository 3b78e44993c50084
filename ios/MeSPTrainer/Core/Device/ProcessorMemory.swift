import MeSPBundle

/// A processor's memory in addition to the arrays that `Planner` counts.
struct ProcessorMemory: Sendable {
    /// The memory of the process once MLX has started, in bytes.
    let process: Int
    /// 1 if W is dequantized before a product, 0 if the product unpacks it.
    let dequantized: Int
    /// 1 if each operation writes an array, 0 if elementwise operations are fused.
    let unfused: Int
    let isOneOperation: @Sendable (AttentionMixer) -> Bool
    let metal: Int?
    /// Whether mapped weights are clean pages, which the system can reclaim. A GPU's driver may count them as memory.
    let mapsAreClean: Bool
    let working: @Sendable (Planner, Plan) -> Int

    func roomForMaps(after peak: Int, limit: Int?, room: Int) -> Int {
        mapsAreClean ? room : min(limit ?? .max, room) - peak
    }

    /// Returns the number of arrays of a tile's size that the MLP's backward pass holds at once: gate, up, d_act and d_gate, and further arrays for
    /// adapters and for gelu. Unfused operations add temporary arrays.
    func tileArrays(_ activation: Activation, adapted: Int) -> Int {
        let gelu = activation == .gelu ? 1 : 0
        return 4 + gelu + adapted + unfused * (1 + 4 * gelu + adapted)
    }

    func outputs(_ a: AttentionMixer) -> Int { isOneOperation(a) ? 1 : 2 }

    /// Returns the bytes that attention's backward pass takes for scores. If attention is computed in tiles, the scores are P and dP of a tile's
    /// query rows, and the sums of dk and dv are included. Without fusion, two more arrays have P's size.
    func scores(_ a: AttentionMixer, _ schedule: Schedule, length: Int) -> Int {
        if isOneOperation(a) { return 2 * min(32 * a.numAttentionHeads * length, 128 * max(length, 2048)) * 4 }
        let heads = a.numAttentionHeads / a.numKeyValueHeads * min(schedule.keyHeads, a.numKeyValueHeads)
        return ((2 + 2 * unfused) * heads * min(schedule.queryRows, length) + 4 * a.keyValueWidth) * length * 4
    }
}

extension Processor {
    var memory: ProcessorMemory {
        ProcessorMemory(
            process: backend == .gpu
                ? Planner.processOnGPU : Planner.processOnCPU.base + Planner.processOnCPU.ofThread * threads,
            dequantized: dequantizesInProduct ? 0 : 1, unfused: fuses ? 0 : 1, isOneOperation: hasOperation,
            metal: startsMetal ? MetalMemory[backend] ?? MetalMemory.assumed : nil, mapsAreClean: backend == .cpu,
            working: { [backend, startsMetal] planner, plan in
                guard backend == .cpu else { return planner.workingOnGPU(plan) }
                return planner.phase(plan) + (startsMetal ? planner.pagesOfMetal : planner.gapsOfMalloc(plan))
            })
    }
}

extension Planner {
    /// Returns an estimate of the bytes that malloc keeps on Linux because of fragmentation. An array of 8 MiB or more leaves no gap, as it has its
    /// own mapping.
    fileprivate func gapsOfMalloc(_ plan: Plan) -> Int {
        func gaps(_ array: Int) -> Int { array < 8 << 20 ? Self.gaps.ofArray * max(0, array - Self.gaps.small) : 0 }
        let mixer = largest(lastInput)
        let ofMLP =
            architecture.hasExperts
            ? 4 * gaps(hidden) / 3 : min(Self.gaps.ofMLP, gaps(hidden / length * makeSchedule(plan).mlpTokens))
        return min(Self.gaps.ofKept, (lasting(plan) + held(plan)) / Self.gaps.partOfKept)
            + max(ofMLP, mixer > hidden ? gaps(mixer) : 0)
            + (plan.tileBytes < tileSizes[0] ? Self.gaps.ofSmallTiles : 0)
    }

    fileprivate var pagesOfMetal: Int { MetalMemory.beyondArrays(blocks: architecture.numHiddenLayers) }

    /// Returns the bytes of a GPU's working arrays. MLX waits when the arrays of a phase fill its workspace (`withWorkspace`), but can exceed the
    /// workspace by about one command buffer.
    fileprivate func workingOnGPU(_ plan: Plan) -> Int {
        let workspaces =
            MLXSupport.hasShortCommandBuffers
            ? workspace(plan) + phaseOnGPU(plan) * Self.excess / 10 : max(phaseOnGPU(plan), workspace(plan))
        // The dy of a block is kept until the block's gradient is confirmed (`MLXErrors`), because the block may have to be repeated.
        let d = settings.method.hasBackwardPass ? hidden : 0
        return held(plan) + (plan.keptBlocks > 0 ? 2 * intermediate : 0) + max(workspaces, baseline ?? 0) + d
    }

    private func phaseOnGPU(_ plan: Plan) -> Int {
        let (ofMixer, ofMLP) = (Self.mixerOnGPU, Self.mlpOnGPU)
        let arrays = largest { mixer in
            guard case .attention(let a) = mixer else { return ofMixer.others * intermediates(of: mixer) }
            return ofMixer.queries * activation(a.queryWidth) + ofMixer.keysOrValues * activation(a.keyValueWidth)
        }
        let mixer = ofMixer.tiles * plan.tileBytes + arrays + ofMixer.postNorms * normed
        // With DoRA another vector of a block's parameters has the products of B with g.
        let vectors = (settings.dora ? ofMLP.vectorsOfDoRA : ofMLP.vectors) * gradientBytes
        let mlp = ofMLP.tiles * plan.tileBytes + ofMLP.hidden * hidden + vectors + ofMLP.postNorms * normed
        return max(mixer, mlp, 10 * update(plan)) / 10
    }

    func workspace(_ plan: Plan) -> Int {
        (MLXSupport.hasShortCommandBuffers ? phaseOnGPU(plan) : phaseOnGPU(plan) * Self.longWorkspace / 10)
            + plan.cacheBytes
    }

    package func keepingCache(_ plan: Plan) -> Plan {
        var kept = plan
        kept.cacheBytes = 3 * phaseOnGPU(plan)
        return kept
    }
}
