import MLX

/// Token ids `[T]` to embeddings `[1, T, hidden]`. Only the rows of the tokens are read.
func embed(_ tokens: MLXArray, _ embedding: PackedWeights) -> MLXArray {
    embedding.matrix("").take(tokens).asType(embedding["scales"].dtype).expandedDimensions(axis: 0)
}

/// Cross-entropy of the output projection, and its gradient, in one pass over the vocabulary.
///
///     h = RMSNorm(y),   z = h Wᵀ,   loss = Σ (logsumexp(z) − z[target])
///     dh = softmax(z) W − W[target]
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
    ///   - targets: token ids of the positions that count, `[n]` int32
    ///   - counted: these n positions in `0 ..< T`; the others are not read, and their gradient is zero
    ///   - gradientScale: what the gradient is multiplied by; nil where it is not wanted
    /// - Returns: the sum of the losses in nats (a float32 scalar), and dy `[1, T, hidden]` times the scale; evaluated.
    func callAsFunction(_ y: MLXArray, targets: MLXArray, counted: Range<Int>, gradientScale: Float?)
        -> (loss: MLXArray, dy: MLXArray?)
    {
        let (length, shape) = (y.dim(1), [counted.count, y.dim(2)])
        let y = y.reshaped([length, shape[1]])[counted]
        let (w, norm) = (weights.matrix(""), weights["norm"])
        let h = rmsNorm(y, weight: norm, eps: eps)

        var m = MLXArray.full([shape[0], 1], values: MLXArray(-Float.infinity))
        var l = MLXArray.zeros([shape[0], 1])
        var sum = MLXArray.zeros(shape)
        for rows in tiles(of: w.rows, size: tile) {
            let wTile = w.rows(rows)
            let z = wTile.apply(h).asType(.float32)
            let mNew = maximum(m, z.max(axis: -1, keepDims: true))
            let p = exp(z - mNew)
            let rescale = exp(m - mNew)
            l = l * rescale + p.sum(axis: -1, keepDims: true)
            if gradientScale != nil { sum = wTile.applyTransposed(p, addedTo: sum * rescale) }
            m = mNew
            eval(m, l, sum)
        }

        let wTarget = w.take(targets)
        let loss = (m + log(l) - (h.asType(.float32) * wTarget).sum(axis: -1, keepDims: true)).sum()
        eval(loss, wTarget)
        guard let gradientScale else { return (loss, nil) }
        sum = (sum / l - wTarget) * gradientScale  // dh
        eval(sum)
        var dy = rmsNormBackward(y, weight: norm, eps: eps, dy: sum.asType(h.dtype))
        if counted.count < length {
            func zeros(_ count: Int) -> MLXArray { MLXArray.zeros([count, shape[1]], dtype: dy.dtype) }
            dy = concatenated([zeros(counted.lowerBound), dy, zeros(length - counted.upperBound)])
        }
        dy = dy.expandedDimensions(axis: 0)
        eval(dy)
        return (loss, dy)
    }
}
