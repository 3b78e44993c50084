import MLX
import MeSPBundle

/// The cross-entropy of the output projection, and its gradient, in one pass over the vocabulary:
///
///     h = RMSNorm(y),   z = cap(h Wᵀ),   ℒ = Σ (logsumexp(z) − z[target])
///     dh = (softmax(z) ∘ cap′) W − cap′[target] W[target]
///
/// If the model caps its logits, cap(u) = c tanh(u / c) and cap′ = 1 − (z / c)². Otherwise cap(u) = u and cap′ = 1.
///
/// `(softmax(z) ∘ cap′) W` is computed as in flash attention, for some rows of W at a time. A running maximum m, a running sum s = Σ exp(z − m) and a
/// running sum a = Σ exp(z − m) cap′ W are kept. s and a are rescaled when m grows.
struct CrossEntropy {
    let weight: QuantizedMatrix
    let norm: RMSNorm
    let cap: Float?

    struct Sums: Arrays {
        /// m, s and the target's logit of some tokens, `[t, 1]` each.
        var m, expSum, zTarget: MLXArray
        /// The running sum a, `[t, hidden]`. It is nil before the first rows, and if no gradient is wanted.
        var weighted: MLXArray?

        var arrays: [MLXArray] { [m, expSum, zTarget] + weighted.arrays }
    }

    func start(tokens: Int) -> Sums {
        Sums(
            m: MLXArray.full([tokens, 1], values: MLXArray(-Float.infinity)), expSum: MLXArray.zeros([tokens, 1]),
            zTarget: MLXArray.zeros([tokens, 1]))
    }

    /// Returns the logits of some words `[t, words]`.
    func logits(_ h: MLXArray, _ words: Range<Int>) -> MLXArray { capped(weight.rows(words).apply(h)) }

    /// Adds the terms of some words.
    ///
    /// - Parameter h: RMSNorm(y) of some tokens, `[t, hidden]`
    func addTerms(of words: Range<Int>, _ h: MLXArray, _ targets: [Int32], wantsGradient: Bool, to sums: inout Sums) {
        let w = weight.rows(words)
        let z = capped(w.apply(h))
        // The targets' indices among the words. They are not computed on a GPU, where an error would leave garbage, and an address outside of z.
        let (isHere, places) = (
            MLXArray.of(targets.map { words.contains(Int($0)) }, [targets.count, 1]),
            MLXArray.of(
                targets.map { Int32(min(max(Int($0) - words.lowerBound, 0), words.count - 1)) }, [targets.count, 1])
        )
        sums.zTarget = which(isHere, takeAlong(z, places, axis: 1), sums.zTarget)
        let m = Self.largest([sums.m, z])
        let p = Self.exponential([z, m])
        let rescale = exp(sums.m - m)
        sums.expSum = Self.rescaledSum([sums.expSum, rescale, p])
        if wantsGradient {
            sums.weighted = w.applyTransposed(sloped(p, z), addedTo: sums.weighted.map { $0 * rescale })
        }
        sums.m = m
    }

    /// Returns the losses `[t, 1]`, and whether the target has the largest logit `[t, 1]`.
    func losses(_ sums: Sums) -> (losses: MLXArray, isLargest: MLXArray) {
        // s ≥ 1, because the largest logit adds exp(0) = 1.
        (sums.m + log(sums.expSum) - sums.zTarget, sums.zTarget .>= sums.m)
    }

    /// Returns dh `[t, hidden]` from W[target]; nil if no gradient is wanted.
    func dh(_ sums: Sums, wTarget: MLXArray) -> MLXArray? {
        sums.weighted.map { $0 / sums.expSum - sloped(wTarget, sums.zTarget) }
    }

    /// The sums of KL(p ‖ q) = Σ p (z − z′) − logsumexp(z) + logsumexp(z′) over some words, for p = softmax(z) and q = softmax(z′).
    struct DivergenceSums: Arrays {
        /// m and Σ exp(z − m), the same of z′, and Σ exp(z − m) (z − z′), `[t, 1]` each.
        var m, expSum, mOther, expSumOther, weighted: MLXArray

        init(tokens: Int) {
            (m, expSum) = (MLXArray.full([tokens, 1], values: MLXArray(-Float.infinity)), MLXArray.zeros([tokens, 1]))
            (mOther, expSumOther, weighted) = (m, expSum, expSum)
        }

        var arrays: [MLXArray] { [m, expSum, mOther, expSumOther, weighted] }

        /// KL(p ‖ q) `[t, 1]`, in nats.
        var divergence: MLXArray { weighted / expSum - (m + log(expSum)) + (mOther + log(expSumOther)) }
    }

    /// Adds the terms of some words.
    ///
    /// - Parameters:
    ///   - h, other: RMSNorm(y) of some tokens, from which z and z′ are computed, `[t, hidden]` each
    func addTerms(of words: Range<Int>, _ h: MLXArray, _ other: MLXArray, to sums: inout DivergenceSums) {
        let (z, zOther) = (logits(h, words), logits(other, words))
        let (m, mOther) = (Self.largest([sums.m, z]), Self.largest([sums.mOther, zOther]))
        let (p, rescale) = (Self.exponential([z, m]), exp(sums.m - m))
        sums.expSum = Self.rescaledSum([sums.expSum, rescale, p])
        sums.weighted = Self.rescaledSum([sums.weighted, rescale, p * (z - zOther)])
        sums.expSumOther = Self.rescaledSum([
            sums.expSumOther, exp(sums.mOther - mOther), Self.exponential([zOther, mOther]),
        ])
        (sums.m, sums.mOther) = (m, mOther)
    }

    private func capped(_ z: MLXArray) -> MLXArray { cap.map { softCap(z, $0) } ?? z }

    private func sloped(_ p: MLXArray, _ z: MLXArray) -> MLXArray { cap.map { p * softCapSlope(z, $0) } ?? p }

    private static let largest = Fused { maximum($0[0], $0[1].max(axis: -1, keepDims: true)) }
    private static let exponential = Fused { exp($0[0] - $0[1]) }
    private static let rescaledSum = Fused { $0[0] * $0[1] + $0[2].sum(axis: -1, keepDims: true) }
}
