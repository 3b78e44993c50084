import MLX
import MeSPBundle

/// The output projection, for some tokens and some words at a time.
package struct CrossEntropyHead {
    let formula: CrossEntropy
    private let schedule: Schedule

    package init(weights: PackedWeights, architecture: Architecture, schedule: Schedule) {
        formula = CrossEntropy(
            weight: weights.matrix("", inputs: architecture.hiddenSize),
            norm: RMSNorm(weight: weights["norm"], eps: architecture.rmsNormEps),
            cap: architecture.finalLogitSoftcapping)
        self.schedule = schedule
    }

    package func logits(_ y: MLXArray) -> MLXArray {
        let h = formula.norm(y.asType(.float32))
        return concatenated(
            schedule.each(of: formula.weight.rows, size: schedule.vocabularyRows) { formula.logits(h, $0) }, axis: -1)
    }

    /// Returns KL(p ‖ q) in nats, float32 `[n]`, of the words' probabilities p after y and q after `other`, `[n, hidden]` each.
    func divergences(_ y: MLXArray, _ other: MLXArray, atBoundary: () throws -> Void) rethrows -> MLXArray {
        var (h, work) = ([y, other].map { formula.norm($0.asType(.float32)) }, 0)
        let vocabulary = tiles(of: formula.weight.rows, size: schedule.vocabularyRows)
        let parts = try schedule.each(of: y.dim(0), size: schedule.lossTokens) { t in
            try schedule.reduce(vocabulary, CrossEntropy.DivergenceSums(tokens: t.count), reading: &h) {
                sums, words, h in
                try count(4 * t.count * y.dim(1) * words.count, since: &work, leaving: sums, atBoundary)
                formula.addTerms(of: words, h[0][t], h[1][t], to: &sums)
            }.divergence
        }
        return concatenated(parts)[0..., 0]
    }

    /// - Returns: the losses in nats, float32 `[n]`, and whether the target has the largest logit, bool `[n]`.
    package func scores(_ y: MLXArray, targets: [Int32], atBoundary: () throws -> Void) rethrows
        -> (losses: MLXArray, isLargest: MLXArray)
    {
        var (h, work) = ([formula.norm(y.asType(.float32))], 0)
        let parts = try schedule.each(of: y.dim(0), size: schedule.lossTokens) {
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
        let parts = try schedule.each(of: y.dim(0), size: schedule.mlpTokens) { rows in
            let y = y[rows].asType(.float32)
            var h = [formula.norm(y)]
            let targets = Array(targets[rows])
            let parts = try tiles(of: rows.count, size: schedule.lossTokens).map {
                try overVocabulary(&h, $0, Array(targets[$0]), wantsGradient: scale != nil, &work, atBoundary)
            }
            let losses = parts.dropFirst().reduce(parts[0].losses.sum()) { $0 + $1.losses.sum() }
            guard let scale else { return [losses] }
            let (dh, loss) = schedule.part(concatenated(parts.compactMap(\.dh)) * scale, losses)
            return [loss, formula.norm.backward(y, dy: dh).asType(dtype)]
        }
        let loss = parts.dropFirst().reduce(parts[0][0]) { $0 + $1[0] }
        return (loss, scale == nil ? loss : concatenated(parts.map { $0[1] }))
    }

    /// Counts multiplications. Before the count would exceed the limit, evaluates the earlier results and calls `atBoundary`.
    private func count(
        _ multiplications: Int, since work: inout Int, leaving results: some Arrays, _ atBoundary: () throws -> Void
    ) rethrows {
        if work > 0, work + multiplications > Schedule.mostWork ?? schedule.processor.workBetweenBoundaries {
            eval(results.arrays)
            try atBoundary()
            work = 0
        }
        work += multiplications
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
        let vocabulary = tiles(of: formula.weight.rows, size: schedule.vocabularyRows)
        let sums = try schedule.reduce(vocabulary, formula.start(tokens: t.count), reading: &h) { sums, words, inputs in
            let h = inputs[0]
            try count(2 * t.count * h.dim(1) * words.count, since: &work, leaving: sums, atBoundary)
            formula.addTerms(of: words, h[t], targets, wantsGradient: wantsGradient, to: &sums)
        }
        let (losses, isLargest) = formula.losses(sums)
        guard wantsGradient else { return Scores(losses: losses, isLargest: isLargest) }
        let wTarget = schedule.part(formula.weight.take(.of(targets)), losses).0
        let dh = formula.dh(sums, wTarget: wTarget)
        h = schedule.inputs(h, after: dh.arrays)
        return Scores(losses: losses, isLargest: isLargest, dh: dh)
    }
}
