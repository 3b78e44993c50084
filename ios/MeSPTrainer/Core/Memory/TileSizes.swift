/// How much of a matrix is worked on at once.
struct TileSizes {
    /// Rows of a projection's weight.
    let projection: Int
    /// Intermediate features of the MLP, a multiple of the quantization group.
    let mlp: Int
    /// Query rows of attention.
    let attention: Int
    /// Rows of the vocabulary in the loss.
    let vocabulary: Int

    /// Sizes that keep each temporary near `bytes`, for sequences of `length` tokens.
    init(_ a: Architecture, group: Int, length: Int, bytes: Int) {
        let floats = bytes / 4
        projection = max(64, floats / max(a.hiddenSize, a.numAttentionHeads * a.headDim, length))
        mlp = max(1, floats / max(a.hiddenSize, length) / group) * group
        attention = max(8, floats / (a.numAttentionHeads * length))
        vocabulary = max(64, floats / max(a.hiddenSize, length))
    }
}

/// `0..<count` in pieces of `size`, the last perhaps shorter.
func tiles(of count: Int, size: Int) -> [Range<Int>] {
    stride(from: 0, to: count, by: size).map { $0..<min($0 + size, count) }
}
