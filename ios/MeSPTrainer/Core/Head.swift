import MLX

/// Token ids `[T]` to embeddings `[1, T, hidden]`. Only the rows of the tokens are read.
func embed(_ tokens: MLXArray, _ embedding: PackedWeights) -> MLXArray {
    embedding.matrix("").take(tokens).asType(embedding["scales"].dtype).expandedDimensions(axis: 0)
}

/// Cross-entropy of the output projection, and its gradient, in one pass over the vocabulary.
///
///     h = RMSNorm(y),   z = h Wᵀ,   loss = mean(logsumexp(z) − z[target])
///     dh = (softmax(z) W − W[target]) / T
///
/// The sum `softmax(z) W` has the form of attention with K = V = W, so it goes like flash attention: a tile of W at a time, with a
/// running maximum `m`, a running sum `l` of exponentials and a running `Σ exp(z − m) W`, rescaled as the maximum moves. The logits
/// `[T, vocabulary]` never exist, and each row of W is read once.
struct Head {
    let weights: PackedWeights
    let eps: Float
    let tile: Int

    /// - Parameters:
    ///   - y: the last block's output, `[1, T, hidden]`
    ///   - targets: token ids, `[T]` int32
    /// - Returns: the mean loss in nats a token (a float32 scalar) and dy `[1, T, hidden]`, nil where it is not wanted; evaluated.
    func callAsFunction(_ y: MLXArray, targets: MLXArray, wantsGradient: Bool) -> (loss: MLXArray, dy: MLXArray?) {
        let shape = y.shape
        let y = y.reshaped([shape[1], shape[2]])
        let (w, norm) = (weights.matrix(""), weights["norm"])
        let h = rmsNorm(y, weight: norm, eps: eps)

        var m = MLXArray.full([shape[1], 1], values: MLXArray(-Float.infinity))
        var l = MLXArray.zeros([shape[1], 1])
        var sum = MLXArray.zeros([shape[1], shape[2]])
        for rows in tiles(of: w.rows, size: tile) {
            let wTile = w.rows(rows)
            let z = wTile.apply(h).asType(.float32)
            let mNew = maximum(m, z.max(axis: -1, keepDims: true))
            let p = exp(z - mNew)
            let rescale = exp(m - mNew)
            l = l * rescale + p.sum(axis: -1, keepDims: true)
            if wantsGradient { sum = wTile.applyTransposed(p, addedTo: sum * rescale) }
            m = mNew
            eval(m, l, sum)
        }

        let wTarget = w.take(targets)
        let zTarget = (h.asType(.float32) * wTarget).sum(axis: -1, keepDims: true)
        let loss = (m + log(l) - zTarget).mean()
        guard wantsGradient else {
            eval(loss)
            return (loss, nil)
        }
        let dh = ((sum / l - wTarget) / Float(shape[1])).asType(h.dtype)
        let dy = rmsNormBackward(y, weight: norm, eps: eps, dy: dh).reshaped(shape)
        eval(loss, dy)
        return (loss, dy)
    }
}
