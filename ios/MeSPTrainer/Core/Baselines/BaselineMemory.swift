/// A baseline's memory where it differs from that of the structured backward pass, in bytes.
struct BaselineMemory {
    /// The most that is alive at once while a block is differentiated.
    let derivative: Int
    /// The memory that malloc keeps between arrays as wide as the MLP.
    var gaps = 0
    /// Whether the block functions are called on a CPU too.
    var callsFunctions = false
}

extension BaselineMemory {
    /// - Parameter intermediate: the bytes of an array as wide as the MLP.
    static func mebp(_ architecture: Architecture, _ mixers: [MixerMemory], intermediate: Int) -> BaselineMemory {
        let weights = architecture.kinds.map { block in
            block.modules.reduce(0) { $0 + block.dimensions($1).inputs * block.dimensions($1).outputs }
        }
        return BaselineMemory(
            // All of the block's weights dequantized, six arrays as wide as the MLP, and what automatic differentiation keeps of the
            // mixer and of gelu.
            derivative: 4 * (weights.max() ?? 0) + (architecture.hiddenAct == .gelu ? 15 : 6) * intermediate
                + (mixers.map(\.automatic).max() ?? 0),
            gaps: (1_600_000..<8 << 20).contains(intermediate) ? 7 * intermediate : 0,
            callsFunctions: true)
    }
}

extension MixerMemory {
    /// The bytes that automatic differentiation keeps.
    var automatic: Int {
        switch mixer {
        case .attention(let a):
            // The scores and P of all heads; and of QK-norm.
            2 * a.numAttentionHeads * length * length * 4
                + (a.qkNorm ? 13 * activation(a.queryWidth + a.keyValueWidth) : 0)
        case .gatedDeltaNet: 10 * whole
        case .shortConvolution: 3 * whole
        case .mamba2: 10 * whole
        }
    }
}

extension GradientMethod {
    /// Whether gradients come from a pass backward through the blocks, which reads their inputs.
    var hasBackwardPass: Bool { self != .mezo }

    /// Whether that pass reads intermediates, which a plan may keep.
    var readsIntermediates: Bool { self == .mesp }
}
