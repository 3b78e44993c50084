import MLX
import MeSPBundle

/// Cross-entropy of the output projection, and its gradient, in one pass over the vocabulary.
///
///     h = RMSNorm(y),   z = cap(h Wᵀ),   loss = Σ (logsumexp(z) − z[target])
///     dh = (softmax(z) ∘ cap′) W − cap′[target] W[target]
///
/// in float32. z[target] is the one that went into the sum of exponentials, so that no loss is negative.
///
/// cap(z) = c tanh(z / c) and cap′ = 1 − (z / c)² where the model caps its logits, z and 1 otherwise.
///
/// The sum `softmax(z) W` has the form of attention with K = V = W, so it goes like flash attention: a tile of W at a time, with a
/// running maximum `m`, a running sum `l` of exponentials and a running `Σ exp(z − m) W`, rescaled as the maximum moves. The logits
/// `[T, vocabulary]` never exist, and each row of W is read once.
package struct CrossEntropyHead {
    let weights: PackedWeights
    let architecture: Architecture
    /// Rows of W at a time.
    let tile: Int
    /// Tokens of which h and its gradient are there at once, and of these at a time.
    let part, tokens: Int
    let pace: Pace
    /// Multiplications from one boundary to the next, where a tile has no more.
    let workBetweenBoundaries: Int

    /// Below 0.2 s from 11 GFLOPS on, a multiplication and an addition being two operations.
    package static let defaultWork = 1 << 30
    /// On a GPU, of 350 GFLOPS or more: a boundary is a round trip.
    static let gpuWork = 1 << 35

    package init(
        weights: PackedWeights, architecture: Architecture, tile: Int, part: Int = .max, tokens: Int = .max,
        pace: Pace = .evaluated, workBetweenBoundaries: Int = defaultWork
    ) {
        (self.weights, self.architecture, self.tile, self.pace) = (weights, architecture, tile, pace)
        (self.part, self.tokens) = (part, tokens)
        self.workBetweenBoundaries = workBetweenBoundaries
    }

    private static let largest = Fused { maximum($0[0], $0[1].max(axis: -1, keepDims: true)) }
    private static let exponential = Fused { exp($0[0] - $0[1]) }
    private static let rescaledSum = Fused { $0[0] * $0[1] + $0[2].sum(axis: -1, keepDims: true) }

    private var matrix: QuantizedMatrix { weights.matrix("", inputs: architecture.hiddenSize) }
    private var norm: RMSNorm { RMSNorm(weight: weights["norm"], eps: architecture.rmsNormEps) }

    /// cap(z)
    private func capped(_ z: MLXArray) -> MLXArray { architecture.finalLogitSoftcapping.map { softCap(z, $0) } ?? z }

    /// p cap′, from capped logits.
    private func sloped(_ p: MLXArray, _ z: MLXArray) -> MLXArray {
        architecture.finalLogitSoftcapping.map { p * softCapSlope(z, $0) } ?? p
    }

    /// The logits `[n, vocabulary]` of y `[n, hidden]`, in float32; `tile` rows of W at a time, evaluated where these are not all.
    package func logits(_ y: MLXArray) -> MLXArray {
        let h = norm(y.asType(.float32))
        return capped(LoRALinear(weight: matrix, bias: nil, lora: nil, scale: 0)(h, tile: tile))
    }

    /// The loss of each row's target, with no gradient.
    ///
    /// - Parameters:
    ///   - y: `[n, hidden]`
    ///   - targets: token ids, `[n]` int32
    ///   - atBoundary: as below
    /// - Returns: the losses in nats, float32 `[n]`, and whether no logit is larger than the target's, bool `[n]`; evaluated.
    package func scores(_ y: MLXArray, targets: MLXArray, atBoundary: () throws -> Void) rethrows
        -> (losses: MLXArray, isLargest: MLXArray)
    {
        var h = norm(y.asType(.float32))
        var work = 0
        let parts = try tiles(of: h.dim(0), size: tokens).map { t in
            let (losses, isLargest, _) = try overVocabulary(
                &h, t, targets[t], wantsGradient: false, &work, atBoundary)
            eval(losses, isLargest)
            return (losses, isLargest)
        }
        return (concatenated(parts.map(\.0))[0..., 0], concatenated(parts.map(\.1))[0..., 0])
    }

    /// - Parameters:
    ///   - y: the last block's output, `[1, T, hidden]`
    ///   - targets: token ids of the positions that count, `[n]` int32
    ///   - counted: these n positions in `0 ..< T`, ascending; the others are not read
    ///   - atBoundary: called between tiles, when nothing is being computed; it may wait, or throw
    /// - Returns: the sum of the losses in nats, a float32 scalar, evaluated.
    func loss(_ y: MLXArray, targets: MLXArray, counted: [Int], atBoundary: () throws -> Void) rethrows -> MLXArray {
        let y = rows(counted, of: y)
        var losses = [MLXArray]()
        var work = 0
        for rows in tiles(of: counted.count, size: part) {
            var h = norm(y[rows].asType(.float32))
            for t in tiles(of: rows.count, size: tokens) {
                let own = try overVocabulary(&h, t, targets[rows][t], wantsGradient: false, &work, atBoundary)
                losses.append(own.losses.sum())
            }
        }
        let loss = losses.dropFirst().reduce(losses[0]) { $0 + $1 }
        eval(loss)
        return loss
    }

    /// The loss with its gradient; the parameters as those of `loss`.
    ///
    /// - Parameter scale: what the gradient is multiplied by; that of positions that do not count is zero.
    /// - Returns: the sum of the losses in nats, a float32 scalar, and dy `[1, T, hidden]` times the scale, in y's dtype; evaluated.
    package func lossAndGradient(
        _ y: MLXArray, targets: MLXArray, counted: [Int], scale: Float, atBoundary: () throws -> Void
    ) rethrows -> (loss: MLXArray, dy: MLXArray) {
        let (length, hidden, dtype) = (y.dim(1), y.dim(2), y.dtype)
        let y = rows(counted, of: y)
        var (losses, dys) = ([MLXArray](), [MLXArray]())
        var work = 0
        for rows in tiles(of: counted.count, size: part) {
            let y = y[rows].asType(.float32)
            var h = norm(y)
            var gradients = [MLXArray]()
            for t in tiles(of: rows.count, size: tokens) {
                let own = try overVocabulary(&h, t, targets[rows][t], wantsGradient: true, &work, atBoundary)
                losses.append(own.losses.sum())
                gradients += [own.dh].compactMap { $0 }
            }
            let dh = concatenated(gradients) * scale
            gradients = []
            pace.finish(losses + [dh])
            dys.append(norm.backward(y, dy: dh).asType(dtype))
            if rows.count < counted.count { eval(dys) }
        }
        let loss = losses.dropFirst().reduce(losses[0]) { $0 + $1 }
        var dy = concatenated(dys)
        dys = []
        if counted.count < length {
            // Each position's row, the one of zeros for those that do not count.
            var rows = [Int32](repeating: Int32(counted.count), count: length)
            for (row, position) in counted.enumerated() { rows[position] = Int32(row) }
            dy = concatenated([dy, MLXArray.zeros([1, hidden], dtype: dy.dtype)])[MLXArray(rows)]
        }
        dy = dy.expandedDimensions(axis: 0)
        eval(loss, dy)
        return (loss, dy)
    }

    /// Some rows of y `[1, T, hidden]`, `[n, hidden]`.
    private func rows(_ counted: [Int], of y: MLXArray) -> MLXArray {
        let all = y.reshaped([y.dim(1), y.dim(2)])
        return counted.count < y.dim(1) ? all[MLXArray(counted.map { Int32($0) })] : all
    }

    /// The losses of the tokens t, whether no logit is larger than the target's, `[t, 1]`, and their part of dh `[t, hidden]`.
    ///
    /// - Parameters:
    ///   - h: of all tokens, `[n, hidden]`
    ///   - work: multiplications since the last boundary
    private func overVocabulary(
        _ h: inout MLXArray, _ t: Range<Int>, _ targets: MLXArray, wantsGradient: Bool, _ work: inout Int,
        _ atBoundary: () throws -> Void
    ) rethrows -> (losses: MLXArray, isLargest: MLXArray, dh: MLXArray?) {
        let w = matrix
        var m = MLXArray.full([t.count, 1], values: MLXArray(-Float.infinity))
        var l = MLXArray.zeros([t.count, 1])
        var zTarget = MLXArray.zeros([t.count, 1])
        var sum: MLXArray?
        for rows in tiles(of: w.rows, size: tile) {
            let tileWork = 2 * t.count * h.dim(1) * rows.count
            if work > 0, work + tileWork > workBetweenBoundaries {
                eval([m, l, zTarget] + [sum].compactMap { $0 })
                try atBoundary()
                work = 0
            }
            work += tileWork

            let wTile = w.rows(rows)
            let z = capped(wTile.apply(h[t]))
            let place = (targets - rows.lowerBound)[0..., .newAxis]  // of the target in the tile
            let isHere = logicalAnd(place .>= 0, place .< rows.count)
            zTarget = which(isHere, takeAlong(z, clip(place, min: 0, max: rows.count - 1), axis: 1), zTarget)
            let mNew = Self.largest([m, z])
            let p = Self.exponential([z, mNew])
            let rescale = exp(m - mNew)
            l = Self.rescaledSum([l, rescale, p])
            if wantsGradient { sum = wTile.applyTransposed(sloped(p, z), addedTo: sum.map { $0 * rescale }) }
            m = mNew
            h = pace.next([h], after: [m, l, zTarget] + [sum].compactMap { $0 })[0]
        }

        // l ≥ 1, as the largest z has the term 1 in it.
        let losses = m + log(l) - zTarget
        let isLargest = zTarget .>= m
        pace.finish([losses])
        guard let sum else { return (losses, isLargest, nil) }
        let wTarget = w.take(targets)
        pace.finish([wTarget])
        let dh = sum / l - sloped(wTarget, zTarget)
        h = pace.next([h], after: [dh])[0]
        return (losses, isLargest, dh)
    }
}
