import MeSPBundle

/// The memory that a machine adds to the arrays that `Planner` counts.
///
/// The constants of a CPU were fitted on Linux (`tools/studies/predicted_peaks.py`), those of a GPU to what docs/ledger.md counts.
struct MachineMemory: Sendable {
    /// The process with MLX started, in bytes.
    let process: Int
    /// The calls of a block function in a step of the structured backward pass: 1 or none.
    let functions: Int
    /// 1 where W is dequantized before a product, 0 where the product unpacks it.
    let dequantized: Int
    /// 1 where each operation writes an array, 0 where those that go through arrays element by element are fused.
    let unfused: Int
    /// Whether attention is one operation.
    let isOneOperation: @Sendable (AttentionMixer) -> Bool
    /// The bytes of Metal in the process; nil where MLX does not start it. See `MetalMemory`.
    let metal: Int?
    /// Whether weights that stay mapped are clean pages, which the system takes back by itself. A GPU's driver may count them.
    let mapsAreClean: Bool
    /// What MLX's arrays take beyond those that live through a step, and what the allocator keeps, in bytes.
    let working: @Sendable (Planner, Plan) -> Int

    /// What of the memory may go to weights that stay mapped, in bytes.
    func roomForMaps(after peak: Int, limit: Int?, room: Int) -> Int {
        mapsAreClean ? room : min(limit ?? .max, room) - peak
    }

    /// The arrays of a tile's size that the derivative of the MLP has at once: gate, up, d_act and d_gate, with the second product that gate
    /// or up is the sum of where it has an adapter, act where down has one, and of gelu one more. Not fused also these sums and the parts of
    /// the activation's derivative, of which gelu has more.
    func tileArrays(_ activation: Activation, adapted: Int) -> Int {
        let gelu = activation == .gelu ? 1 : 0
        return 4 + gelu + adapted + unfused * (1 + 4 * gelu + adapted)
    }

    /// The arrays as long as attn_out while attention runs: itself and, where it is not one operation, the tiles that it is joined of.
    func outputs(_ a: AttentionMixer) -> Int { isOneOperation(a) ? 1 : 2 }

    /// Of the query rows that are in attention's derivative at a time P and dP, in whose place dS comes where it is fused, or P ∘ dP and
    /// its difference too, in bytes; of tiles also the sums of dk and dv before and after one. The operation has
    /// up to 32 rows of each head, 128 in all of 2,048 positions.
    func scores(_ a: AttentionMixer, _ machine: Machine, length: Int) -> Int {
        if isOneOperation(a) { return 2 * min(32 * a.numAttentionHeads * length, 128 * max(length, 2048)) * 4 }
        let heads = a.numAttentionHeads / a.numKeyValueHeads * min(machine.keyHeads, a.numKeyValueHeads)
        return ((2 + 2 * unfused) * heads * min(machine.queryRows, length) + 4 * a.keyValueWidth) * length * 4
    }
}

extension Processor {
    var memory: MachineMemory {
        MachineMemory(
            process: backend == .gpu ? 6_750_000 : 5_000_000 + 1_000_000 * threads, functions: backend == .gpu ? 1 : 0,
            dequantized: dequantizesInProduct ? 0 : 1, unfused: fuses ? 0 : 1, isOneOperation: hasOperation,
            metal: startsMetal ? MetalMemory[backend] ?? MetalMemory.assumed : nil, mapsAreClean: backend == .cpu,
            working: { [backend, startsMetal] planner, plan in
                guard backend == .cpu else { return planner.workingOnGPU(plan) }
                return planner.phase(plan) + (startsMetal ? planner.pagesOfMetal : planner.gapsOfMalloc(plan))
            })
    }
}

extension Planner {
    /// What malloc keeps on Linux: a sixteenth of what lasts, at most 2 MB, and gaps of the size of the widest arrays. Arrays of less than 0.9 MB
    /// fill these, and arrays of 8 MiB leave none, as each is mapped by itself. There are three gaps of the tokens that go through the MLP at a
    /// time, at most 3 MB; with experts four of all tokens; or three of a mixer that is wider than the model. Smaller tiles leave as much
    /// as they save.
    fileprivate func gapsOfMalloc(_ plan: Plan) -> Int {
        func gaps(_ array: Int) -> Int { array < 8 << 20 ? 3 * max(0, array - 900_000) : 0 }
        let mixer = largest(lastInput)
        let ofMLP =
            architecture.hasExperts
            ? 4 * gaps(hidden) / 3 : min(3_000_000, gaps(hidden / length * makeMachine(plan).mlpTokens))
        return min(2_000_000, (lasting(plan) + held(plan)) / 16)
            + max(ofMLP, mixer > hidden ? gaps(mixer) : 0)
            + (plan.tileBytes < tileSizes[0] ? 4_000_000 : 0)
    }

    /// What Metal's allocator, that of an Apple device, has beyond the arrays.
    fileprivate var pagesOfMetal: Int { MetalMemory.beyondArrays(blocks: architecture.numHiddenLayers) }

    /// Back-pressure keeps each phase in its workspace. With short command buffers two things exceed it: the buffer that is encoded, and
    /// arrays of a finished one whose completion handler has not run yet.
    fileprivate func workingOnGPU(_ plan: Plan) -> Int {
        let workspaces =
            MLXSupport.hasShortCommandBuffers
            ? workspace(plan) + phaseOnGPU(plan) * 3 / 10 : max(phaseOnGPU(plan), workspace(plan))
        // d before a block's backward pass, until its gradient is confirmed.
        let d = settings.method.hasBackwardPass ? hidden : 0
        return held(plan) + (plan.keptBlocks > 0 ? 2 * intermediate : 0) + max(workspaces, baseline ?? 0) + d
    }

    /// The memory of the arrays of one block, or of the head: those that live through a tile, and those that some 21 kernels write, the
    /// longest command buffer, for while it is encoded nothing of it can go. Whichever derivative takes more, the mixer's or the MLP's.
    private func phaseOnGPU(_ plan: Plan) -> Int {
        let tenMixers = largest { mixer in
            guard case .attention(let a) = mixer else { return 40 * intermediates(of: mixer) }
            return 142 * activation(a.queryWidth) + 157 * activation(a.keyValueWidth)
        }
        let mixer = 51 * plan.tileBytes + tenMixers + 17 * normed
        let mlp = 34 * plan.tileBytes + 180 * hidden + 38 * gradientBytes + 46 * normed
        return max(mixer, mlp, 10 * update(plan)) / 10
    }

    /// Above what there is when a phase begins, what it may take on a GPU before MLX waits; and a cache. See `withWorkspace`. With short
    /// command buffers, what lets several of them run. With long ones, less than half of what the phase takes at its peak, so that only the
    /// buffer that is being encoded goes beyond.
    func workspace(_ plan: Plan) -> Int {
        (MLXSupport.hasShortCommandBuffers ? phaseOnGPU(plan) : phaseOnGPU(plan) * 2 / 5) + plan.cacheBytes
    }

    /// The plan with a cache, on a GPU, for the self-check to measure. A smaller one would stay empty: while the GPU is behind, freed
    /// buffers are still in use.
    package func keepingCache(_ plan: Plan) -> Plan {
        var kept = plan
        kept.cacheBytes = 3 * phaseOnGPU(plan)
        return kept
    }
}
