import MLX
import MeSPBundle

/// The cross-entropy of the output projection, and its gradient, in one pass over the vocabulary:
///
///     h = RMSNorm(y),   z = cap(h Wᵀ),   ℒ = Σ (logsumexp(z) − z[target])
///     dh = (softmax(z) ∘ cap′) W − cap′[target] W[target]
///
/// If the model caps its logits, cap(u) = c tanh(u / c) and cap′ = 1 − (z / c)². Otherwise cap(u) = u and cap′ = 1.
///
/// `(softmax(z) ∘ cap′) W` is computed as in flash attention, one tile of W at a time. A running maximum m, a running sum s = Σ exp(z − m) and a
/// running sum a = Σ exp(z − m) cap′ W are kept. s and a are rescaled when m grows.
package struct CrossEntropyHead {
    let weights: PackedWeights
    let architecture: Architecture
    let machine: Machine

    package init(weights: PackedWeights, architecture: Architecture, machine: Machine) {
        (self.weights, self.architecture, self.machine) = (weights, architecture, machine)
    }

    private static let largest = Fused { maximum($0[0], $0[1].max(axis: -1, keepDims: true)) }
    private static let exponential = Fused { exp($0[0] - $0[1]) }
    private static let rescaledSum = Fused { $0[0] * $0[1] + $0[2].sum(axis: -1, keepDims: true) }

    private var matrix: QuantizedMatrix { weights.matrix("", inputs: architecture.hiddenSize) }
    private var norm: RMSNorm { RMSNorm(weight: weights["norm"], eps: architecture.rmsNormEps) }

    private func capped(_ z: MLXArray) -> MLXArray { architecture.finalLogitSoftcapping.map { softCap(z, $0) } ?? z }

    private func sloped(_ p: MLXArray, _ z: MLXArray) -> MLXArray {
        architecture.finalLogitSoftcapping.map { p * softCapSlope(z, $0) } ?? p
    }

    package func logits(_ y: MLXArray) -> MLXArray {
        let (h, w) = (norm(y.asType(.float32)), LoRALinear(weight: matrix, bias: nil, lora: nil, scale: 0))
        return capped(
            concatenated(machine.each(of: matrix.rows, size: machine.vocabularyRows) { w.outputs($0)(h) }, axis: -1))
    }

    /// - Returns: the losses in nats, float32 `[n]`, and whether the target has the largest logit, bool `[n]`.
    package func scores(_ y: MLXArray, targets: [Int32], atBoundary: () throws -> Void) rethrows
        -> (losses: MLXArray, isLargest: MLXArray)
    {
        var (h, work) = ([norm(y.asType(.float32))], 0)
        let parts = try machine.each(of: y.dim(0), size: machine.lossTokens) {
            try overVocabulary(&h, $0, Array(targets[$0]), wantsGradient: false, &work, atBoundary)
        }
        return (concatenated(parts.map(\.losses))[0..., 0], concatenated(parts.map(\.isLargest))[0..., 0])
    }

    func loss(_ y: MLXArray, targets: [Int32], counted: [Int], atBoundary: () throws -> Void) rethrows -> MLXArray {
        try lossAndRows(rows(counted, of: y), targets, scale: nil, atBoundary).loss
    }

    /// - Parameters:
    ///   - counted: the n positions with a loss, in `0 ..< T` and ascending
    ///   - atBoundary: called between tiles, while nothing is being computed; it may wait, or throw
    /// - Returns: the sum of the losses in nats, a float32 scalar, and dy `[1, T, hidden]` times the scale, in y's dtype. dy is 0 at positions that
    ///   are not counted.
    package func lossAndGradient(
        _ y: MLXArray, targets: [Int32], counted: [Int], scale: Float, atBoundary: () throws -> Void
    ) rethrows -> (loss: MLXArray, dy: MLXArray) {
        var (loss, dy) = try lossAndRows(rows(counted, of: y), targets, scale: scale, atBoundary)
        if counted.count < y.dim(1) {
            // `rows` maps each position to its row of dy. Positions that are not counted map to an appended row of zeros.
            var rows = [Int32](repeating: Int32(counted.count), count: y.dim(1))
            for (row, position) in counted.enumerated() { rows[position] = Int32(row) }
            dy = concatenated([dy, MLXArray.zeros([1, y.dim(2)], dtype: dy.dtype)])[MLXArray.of(rows)]
        }
        return (loss, dy.expandedDimensions(axis: 0))
    }

    private func rows(_ counted: [Int], of y: MLXArray) -> MLXArray {
        let all = y.reshaped([y.dim(1), y.dim(2)])
        return counted.count < y.dim(1) ? all[MLXArray.of(counted.map { Int32($0) })] : all
    }

    /// Returns the sum of the losses of y's rows `[n, hidden]`, and dy times the scale. Without a scale, dy is not computed and must not be used.
    private func lossAndRows(
        _ y: MLXArray, _ targets: [Int32], scale: Float?, _ atBoundary: () throws -> Void
    ) rethrows -> (loss: MLXArray, dy: MLXArray) {
        var work = 0
        let dtype = y.dtype
        let parts = try machine.each(of: y.dim(0), size: machine.mlpTokens) { rows in
            let y = y[rows].asType(.float32)
            var h = [norm(y)]
            let targets = Array(targets[rows])
            let parts = try tiles(of: rows.count, size: machine.lossTokens).map {
                try overVocabulary(&h, $0, Array(targets[$0]), wantsGradient: scale != nil, &work, atBoundary)
            }
            let losses = parts.dropFirst().reduce(parts[0].losses.sum()) { $0 + $1.losses.sum() }
            guard let scale else { return [losses] }
            let (dh, loss) = machine.part(concatenated(parts.compactMap(\.dh)) * scale, losses)
            return [loss, norm.backward(y, dy: dh).asType(dtype)]
        }
        let loss = parts.dropFirst().reduce(parts[0][0]) { $0 + $1[0] }
        return (loss, scale == nil ? loss : concatenated(parts.map { $0[1] }))
    }

    private struct Sums: Arrays {
        /// m, s and the target's logit of some tokens, `[t, 1]` each.
        var m, expSum, zTarget: MLXArray
        /// The running sum a, `[t, hidden]`. It is nil before the first tile, and if no gradient is wanted.
        var weighted: MLXArray?

        var arrays: [MLXArray] { [m, expSum, zTarget] + weighted.arrays }
    }

    /// The losses `[t, 1]` of some tokens, whether the target has the largest logit `[t, 1]`, and dh `[t, hidden]`, which is nil if no gradient is
    /// wanted.
    private struct Scores: Arrays {
        let losses, isLargest: MLXArray
        var dh: MLXArray?

        var arrays: [MLXArray] { [losses, isLargest] + dh.arrays }
    }

    /// Returns the scores of the tokens `t`.
    ///
    /// - Parameters:
    ///   - h: one array, RMSNorm(y) of all tokens, `[n, hidden]`
    private func overVocabulary(
        _ h: inout [MLXArray], _ t: Range<Int>, _ targets: [Int32], wantsGradient: Bool, _ work: inout Int,
        _ atBoundary: () throws -> Void
    ) rethrows -> Scores {
        let w = matrix
        let none = Sums(
            m: MLXArray.full([t.count, 1], values: MLXArray(-Float.infinity)),
            expSum: MLXArray.zeros([t.count, 1]), zTarget: MLXArray.zeros([t.count, 1]))
        let vocabulary = tiles(of: w.rows, size: machine.vocabularyRows)
        let sums = try machine.reduce(vocabulary, none, reading: &h) { sums, rows, inputs in
            let h = inputs[0]
            try machine.work(2 * t.count * h.dim(1) * rows.count, since: &work, leaving: sums, atBoundary)
            let wTile = w.rows(rows)
            let z = capped(wTile.apply(h[t]))
            // The targets' indices in the tile. They are not computed on a GPU, where an error would leave garbage, and an address outside of z.
            let (isHere, places) = (
                MLXArray.of(targets.map { rows.contains(Int($0)) }, [t.count, 1]),
                MLXArray.of(
                    targets.map { Int32(min(max(Int($0) - rows.lowerBound, 0), rows.count - 1)) }, [t.count, 1])
            )
            sums.zTarget = which(isHere, takeAlong(z, places, axis: 1), sums.zTarget)
            let m = Self.largest([sums.m, z])
            let p = Self.exponential([z, m])
            let rescale = exp(sums.m - m)
            sums.expSum = Self.rescaledSum([sums.expSum, rescale, p])
            if wantsGradient {
                sums.weighted = wTile.applyTransposed(sloped(p, z), addedTo: sums.weighted.map { $0 * rescale })
            }
            sums.m = m
        }
        // s ≥ 1, because the largest logit adds exp(0) = 1.
        var scores = Scores(losses: sums.m + log(sums.expSum) - sums.zTarget, isLargest: sums.zTarget .>= sums.m)
        guard let weighted = sums.weighted else { return scores }
        let wTarget = machine.part(w.take(.of(targets)), scores.losses).0
        let dh = weighted / sums.expSum - sloped(wTarget, sums.zTarget)
        h = machine.inputs(h, after: [dh])
        scores.dh = dh
        return scores
    }
}
