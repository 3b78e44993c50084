import MLX
import MeSPBundle

/// Token ids `[T]` to embeddings `[1, T, hidden]` in `dtype`, evaluated. Only the rows of the tokens are read, and by the CPU: for a kernel
/// Metal would hold all of the mapped file in memory.
func embed(_ tokens: [Int32], _ embedding: PackedWeights, _ architecture: Architecture, dtype: DType) -> MLXArray {
    Device.withDefaultDevice(.cpu) {
        let rows = embedding.matrix("", inputs: architecture.hiddenSize).take(MLXArray(tokens)).asType(dtype)
        let x = (architecture.embeddingScale == 1 ? rows : rows * architecture.embeddingScale)
            .expandedDimensions(axis: 0)
        eval(x)
        return x
    }
}
