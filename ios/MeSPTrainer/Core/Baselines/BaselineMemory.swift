/// A baseline's memory where it differs from that of the structured backward pass, in bytes.
struct BaselineMemory {
    /// The most that is alive at once while a block is differentiated.
    let derivative: Int
    /// The memory that malloc keeps between arrays as wide as the MLP.
    var gaps = 0
    /// Whether the block functions are called on a CPU too.
    var callsFunctions = false
}

extension GradientMethod {
    /// Whether gradients come from a pass backward through the blocks, which reads their inputs.
    var hasBackwardPass: Bool { self != .mezo }

    /// Whether that pass reads intermediates, which a plan may keep.
    var readsIntermediates: Bool { self == .mesp }
}
