import MLX
import MeSPBundle

extension ModelBundle {
    /// Returns the embeddings `[1, T, hidden]` of token ids `[T]`, evaluated. The rows of `images` take the place of those at their positions.
    func embed(_ tokens: [Int32], images: ImageRows.Slice? = nil) throws -> MLXArray {
        try withEmbedding { weights in
            readRows {
                let x = embeddings(
                    tokens, table: weights.matrix("", inputs: architecture.hiddenSize), architecture, dtype: dtype)
                guard let images else { return x }
                let rows = MLXArray.of(
                    images.bytes, [images.rows.count, architecture.hiddenSize], images.dtype.dtype)
                var places = (0..<tokens.count).map { Int32($0) }
                for (row, position) in images.positions.enumerated() { places[position] = Int32(tokens.count + row) }
                return concatenated([x[0], rows.asType(dtype)])[MLXArray.of(places)].expandedDimensions(axis: 0)
            }
        }
    }

    func layerEmbeddings(_ tokens: [Int32], x0: MLXArray) throws -> LayerEmbeddings? {
        guard let size = architecture.perLayer?.size, let file = manifest.perLayerEmbedding else { return nil }
        return try withWeights(file) { table in
            let rows = readRows {
                table.matrix("", inputs: architecture.numHiddenLayers * size).packedRows(.of(tokens))
            }
            return LayerEmbeddings(rows: rows, x0: x0, size: size)
        }
    }

    /// Returns p of a layer, evaluated.
    func part(of embeddings: LayerEmbeddings?, layer: Int) throws -> MLXArray? {
        guard let embeddings, let file = manifest.perLayerProjection else { return nil }
        return try withWeights(file) {
            let p = embeddings(layer, projection: $0, eps: architecture.rmsNormEps)
            eval(p)
            return p
        }
    }
}

/// Computes and evaluates arrays from some rows of a mapped file, on the CPU. For a GPU kernel, Metal would hold the whole file in memory.
private func readRows<R: Arrays>(_ body: () -> R) -> R {
    Device.withDefaultDevice(.cpu) {
        let rows = body()
        eval(rows.arrays)
        return rows
    }
}
