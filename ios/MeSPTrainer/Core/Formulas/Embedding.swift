import MLX
import MeSPBundle

/// Returns the embeddings `[1, T, hidden]` of token ids `[T]` in `dtype`, evaluated.
func embed(_ tokens: [Int32], _ embedding: PackedWeights, _ architecture: Architecture, dtype: DType) -> MLXArray {
    readRows {
        let rows = embedding.matrix("", inputs: architecture.hiddenSize).take(.of(tokens)).asType(dtype)
        return (architecture.embeddingScale == 1 ? rows : rows * architecture.embeddingScale)
            .expandedDimensions(axis: 0)
    }
}
