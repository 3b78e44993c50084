import MLX

/// Token ids `[T]` to embeddings `[1, T, hidden]` in `dtype`. Only the rows of the tokens are read.
func embed(_ tokens: MLXArray, _ embedding: PackedWeights, _ architecture: Architecture, dtype: DType) -> MLXArray {
    let rows = embedding.matrix("", inputs: architecture.hiddenSize).take(tokens).asType(dtype)
    let x = architecture.embeddingScale == 1 ? rows : rows * architecture.embeddingScale
    return x.expandedDimensions(axis: 0)
}
