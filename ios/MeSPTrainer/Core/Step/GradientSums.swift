import MLX

/// Sums of the gradients of several sequences, a flat float32 vector a trained block.
struct GradientSums {
    private(set) var arrays: BlockArrays
    /// The blocks whose sum has begun since `reset`.
    private var begun = Set<Int>()

    init(_ arrays: BlockArrays) { self.arrays = arrays }

    /// The sums begin with the next gradients.
    mutating func reset() { begun = [] }

    mutating func add(_ gradient: MLXArray, _ block: Int) throws {
        try arrays.write(begun.insert(block).inserted ? gradient : arrays.read(block) + gradient, block)
    }

    func read(_ block: Int) throws -> MLXArray { try arrays.read(block) }
}
