import MLX
import MeSPBundle

/// Returns the embeddings `[1, T, hidden]` of token ids `[T]`: the tokens' rows of the table, times `embeddingScale`.
func embeddings(_ tokens: [Int32], table: QuantizedMatrix, _ architecture: Architecture, dtype: DType) -> MLXArray {
    let rows = table.take(.of(tokens)).asType(dtype)
    return (architecture.embeddingScale == 1 ? rows : rows * architecture.embeddingScale).expandedDimensions(axis: 0)
}
