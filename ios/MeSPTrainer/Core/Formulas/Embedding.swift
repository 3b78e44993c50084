import MLX
import MeSPBundle

/// Token ids `[T]` to embeddings `[1, T, hidden]` in `dtype`, evaluated. Only the rows of the tokens are read.
func embed(_ tokens: [Int32], _ embedding: PackedWeights, _ architecture: Architecture, dtype: DType) -> MLXArray {
    readRows {
        let rows = embedding.matrix("", inputs: architecture.hiddenSize).take(MLXArray(tokens)).asType(dtype)
        return (architecture.embeddingScale == 1 ? rows : rows * architecture.embeddingScale)
            .expandedDimensions(axis: 0)
    }
}
