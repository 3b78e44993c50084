/// How a step trades time for memory. No choice changes the mathematics, only the order of sums.
public struct Plan: Sendable, Equatable {
    /// The size that temporaries are cut to, in bytes.
    public var tileBytes: Int
    /// The last blocks, whose intermediates stay in memory from the forward to the backward pass and aren't recomputed (MeSP).
    public var keptBlocks = 0
    /// Whether the block inputs wait for the backward pass in a file instead of in memory.
    public var offload = false
}

/// Predicts the peak footprint of a step, and chooses the plan.
public struct Planner: Sendable {
    private let architecture: Architecture
    private let method: Method
    private let length: Int
    private let rank: Int
    private let itemSize: Int

    /// From the largest, which the default plan takes: larger ones are no faster.
    static let tileSizes = [2 << 20, 1 << 20, 512 << 10, 256 << 10]

    public init(_ manifest: Manifest, method: Method, length: Int, rank: Int) {
        architecture = manifest.architecture
        (self.method, self.length, self.rank) = (method, length, rank)
        itemSize = manifest.dtype == "float32" ? 4 : 2
    }

    /// The fastest plan that stays within `limit` bytes; without a limit, large tiles and everything in memory.
    ///
    /// - Parameter offload: whether the block inputs go to a file; nil leaves it to the planner, whose last resort it is.
    /// - Throws: `MeSPError` with the least possible peak, where the limit is below it.
    public func plan(limit: Int? = nil, offload: Bool? = nil) throws -> Plan {
        let choices = offload.map { [$0] } ?? [false, true]
        guard let limit else { return Plan(tileBytes: Self.tileSizes[0], offload: choices[0]) }
        for offload in choices {
            for tileBytes in Self.tileSizes {
                var plan = Plan(tileBytes: tileBytes, offload: offload)
                let room = limit - peak(plan)
                guard room >= 0 else { continue }
                if method == .mesp { plan.keptBlocks = min(architecture.numHiddenLayers, room / keptBytes) }
                return plan
            }
        }
        let least = megabytes(leastPeak(offload: offload))
        throw MeSPError(
            "A memory limit of \(megabytes(limit)) MB is too low: sequences of \(length) tokens at rank \(rank) need at least \(least) MB; raise it or take shorter sequences."
        )
    }

    /// The lowest peak that any plan reaches, in bytes.
    public func leastPeak(offload: Bool? = nil) -> Int {
        peak(Plan(tileBytes: Self.tileSizes.last ?? 0, offload: offload ?? true))
    }

    /// The predicted peak footprint of a step, in bytes.
    public func peak(_ plan: Plan) -> Int {
        let a = architecture
        let held = method == .mezo || plan.offload ? 0 : a.numHiddenLayers * hidden
        return process + a.numHiddenLayers * loraBytes + held + plan.keptBlocks * keptBytes
            + max(forward, loss(plan), backward(plan))
    }

    // MARK: - What is alive at once

    /// The process with MLX started and a bundle open: measured on Linux.
    private var process: Int { 10_500_000 }

    /// One array `[T, features]`.
    private func activation(_ features: Int) -> Int { length * features * itemSize }
    private var hidden: Int { activation(architecture.hiddenSize) }
    private var query: Int { activation(architecture.numAttentionHeads * architecture.headDim) }
    private var keyValue: Int { activation(architecture.numKeyValueHeads * architecture.headDim) }
    private var intermediate: Int { activation(architecture.intermediateSize) }

    /// The LoRA parameters of a block, or their gradient.
    private var loraBytes: Int { LoRALayout(architecture: architecture, rank: rank).count * 4 }

    /// q, k, v, attn_out, x_mid, gate and up.
    private var keptBytes: Int { 2 * query + 2 * keyValue + hidden + 2 * intermediate }

    /// The block function: x, attn_in, q, k, v, attn_out, x_mid and y, and the tiles of its trace.
    private var forward: Int { 3 * hidden + 2 * query + 2 * keyValue + 8_000_000 }

    /// y, h, its gradient and the running sum before and after a tile.
    private func loss(_ plan: Plan) -> Int { 5 * hidden + 4 * plan.tileBytes }

    private func backward(_ plan: Plan) -> Int {
        switch method {
        case .mesp:
            // Of the MLP: q, k, v, attn_out and x_mid wait, with dy, mlp_in and its gradient before and after a tile.
            return 2 * query + 2 * keyValue + 5 * hidden + 8 * plan.tileBytes + 2 * loraBytes
        case .mebp:
            return 0
        case .mezo:
            return 0
        }
    }
}

/// Bytes in megabytes (10⁶), rounded up.
private func megabytes(_ bytes: Int) -> Int { (bytes + 999_999) / 1_000_000 }
