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

    init(_ tokens: [Int32], x0: MLXArray, table: PackedWeights, _ architecture: Architecture, size: Int) {
        (self.x0, self.size) = (x0, size)
        rows = readRows { table.matrix("", inputs: architecture.numHiddenLayers * size).packedRows(.of(tokens)) }
    }

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

extension ModelBundle {
    func layerEmbeddings(_ tokens: [Int32], x0: MLXArray) throws -> LayerEmbeddings? {
        guard let size = architecture.perLayer?.size, let file = manifest.perLayerEmbedding else { return nil }
        return try withWeights(file) {
            LayerEmbeddings(tokens, x0: x0, table: $0, architecture, size: size)
        }
    }

    func part(of embeddings: LayerEmbeddings?, layer: Int) throws -> MLXArray? {
        guard let embeddings, let file = manifest.perLayerProjection else { return nil }
        return try computed(with: file) { embeddings(layer, projection: $0, eps: architecture.rmsNormEps) }
    }
}
