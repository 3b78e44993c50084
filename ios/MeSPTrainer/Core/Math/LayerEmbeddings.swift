import MLX
import MeSPBundle

/// The per-layer embeddings of a sequence's tokens:
///
///     p = (RMSNorm(x₀ Wᵀ / √hidden) + √size e) / √2
///
/// x₀ is the first block's input. e holds the tokens' rows of the embedding table, at the layer's columns. W holds the layer's rows of the
/// projection's matrix. These weights are frozen. p is computed for one layer at a time.
package struct LayerEmbeddings {
    private let rows: QuantizedMatrix
    private let x0: MLXArray
    private let size: Int

    /// - Parameter rows: the tokens' rows of the table
    init(rows: QuantizedMatrix, x0: MLXArray, size: Int) { (self.rows, self.x0, self.size) = (rows, x0, size) }

    /// Returns p `[T, size]` of a layer.
    ///
    /// - Parameter projection: W of all layers, and the weight of the norm.
    func callAsFunction(_ layer: Int, projection: PackedWeights, eps: Float) -> MLXArray {
        let ofLayer = layer * size..<(layer + 1) * size
        let (hidden, dtype) = (x0.dim(1), x0.dtype)
        let product = projection.matrix("", inputs: hidden).rows(ofLayer).apply(x0, as: .float32)
        let norm = RMSNorm(weight: projection["norm"].asType(.float32), eps: eps)
        let r = norm(product * (1 / Float(hidden).squareRoot()))
        let p = (r + rows.columns(ofLayer).inFloat32 * Float(size).squareRoot()) * Float(0.5).squareRoot()
        return p.asType(dtype)
    }
}
