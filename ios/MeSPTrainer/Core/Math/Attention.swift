import MLX
import MeSPBundle

/// Causal grouped-query attention:
///
///     S = cap(q̂ k̂ᵀ · scale) + mask,   P = softmax(S),   attn_out = P v̂
struct Attention {
    typealias KeyValues = MixerState.KeyValues

    let mixer: AttentionMixer
    let qNorm: RMSNorm?
    let kNorm: RMSNorm?
    let vNorm: RMSNorm?

    var hasOwnKeys: Bool { mixer.keysOf == nil }
    var scale: Float { mixer.attentionScale }

    /// Returns q̂ = RoPE(norm(q)), in float32.
    /// - Parameters:
    ///   - q: `[heads, n, d]`, or `[n, heads, 1, d]` for one token of each of n sequences
    func query(_ q: MLXArray, at place: Positions) -> MLXArray { positioned(q, qNorm, place) }

    /// Returns k̂ = RoPE(norm(k)), in float32, for k in the layout of q.
    func key(_ k: MLXArray, at place: Positions) -> MLXArray {
        hasOwnKeys ? positioned(k, kNorm, place) : k.asType(.float32)
    }

    /// Returns v̂ = norm(v), in float32.
    func value(_ v: MLXArray) -> MLXArray {
        let v = v.asType(.float32)
        return hasOwnKeys ? vNorm.map { $0(v) } ?? v : v
    }

    private func positioned(_ x: MLXArray, _ norm: RMSNorm?, _ place: Positions) -> MLXArray {
        let x = x.asType(.float32)
        return mixer.rope(norm.map { $0(x) } ?? x, at: place)
    }

    private func positionedBackward(_ x: MLXArray, _ norm: RMSNorm?, dy: MLXArray, start: Int) -> MLXArray {
        let d = mixer.ropeBackward(dy: dy, start: start)
        return norm.map { $0.backward(x.asType(.float32), dy: d) } ?? d
    }

    // MARK: - Forward

    /// Returns attn_out `[heads of some groups, m, d]` of the queries at some positions, `rows` of q.
    /// - Parameters:
    ///   - q: q̂ `[heads, n, d]` at the last n of N positions
    ///   - k, v: k̂ and v̂ `[kv_heads, N, d]`
    ///   - groups: some key-value heads
    func tile(q: MLXArray, k: MLXArray, v: MLXArray, _ groups: Range<Int>, _ rows: Range<Int>) -> MLXArray {
        let (positions, perGroup) = (positions(rows, q, k), q.dim(0) / k.dim(0))
        let keys = seen(by: positions)
        let (p, _) = probabilities(stacked(q, groups, perGroup, rows) * scale, k[groups, keys], positions, keys)
        return matmul(p, v[groups, keys]).reshaped([groups.count * perGroup, rows.count, -1])
    }

    func positions(_ rows: Range<Int>, _ q: MLXArray, _ k: MLXArray) -> Range<Int> {
        let before = k.dim(1) - q.dim(1)
        return before + rows.lowerBound..<before + rows.upperBound
    }

    /// Returns attn_out `[heads, n, d]`, computed by MLX's attention operation.
    /// - Parameters:
    ///   - q: q̂ · scale `[heads, n, d]` at the last n positions
    ///   - k, v: k̂ and v̂ at the positions visible to these queries, `[kv_heads, keys, d]`
    func whole(_ q: MLXArray, _ k: MLXArray, _ v: MLXArray) -> MLXArray {
        var mask = MLXFast.ScaledDotProductAttentionMaskMode.causal
        if let window = mixer.slidingWindow, k.dim(1) > window {
            mask = .array(visible(from: k.dim(1) - q.dim(1)..<k.dim(1), 0..<k.dim(1)))
        }
        return MLXFast.scaledDotProductAttention(
            queries: q.expandedDimensions(axis: 0), keys: k.expandedDimensions(axis: 0),
            values: v.expandedDimensions(axis: 0), scale: 1, mask: mask
        ).squeezed(axis: 0)
    }

    /// Returns the given rows of the query heads of some key-value heads, `[groups, m, d]`, from x `[heads, n, d]`. The query heads of a key-value
    /// head are stacked along the second axis.
    private func stacked(_ x: MLXArray, _ groups: Range<Int>, _ perGroup: Int, _ rows: Range<Int>) -> MLXArray {
        x[groups.lowerBound * perGroup..<groups.upperBound * perGroup, rows].reshaped([groups.count, -1, x.dim(2)])
    }

    func seen(by rows: Range<Int>) -> Range<Int> {
        max(0, rows.lowerBound + 1 - (mixer.slidingWindow ?? rows.upperBound))..<rows.upperBound
    }

    private func visible(from rows: Range<Int>, _ keys: Range<Int>) -> MLXArray {
        let (queries, positions) = (
            MLXArray.arange(rows.lowerBound, rows.upperBound)[0..., .newAxis],
            MLXArray.arange(keys.lowerBound, keys.upperBound)
        )
        let isBefore = queries .>= positions
        return mixer.slidingWindow.map { logicalAnd(isBefore, queries .< positions + $0) } ?? isBefore
    }

    /// Returns P of the queries at positions `rows` over the `keys`, and the derivative cap′ of the soft cap.
    /// - Parameters:
    ///   - q: q̂ · scale `[kv_heads, m, d]`; the query heads that share a key-value head are stacked
    /// - Returns: P and cap′, `[kv_heads, m, keys]` each; cap′ is nil if scores are not capped.
    private func probabilities(_ q: MLXArray, _ k: MLXArray, _ rows: Range<Int>, _ keys: Range<Int>)
        -> (p: MLXArray, slope: MLXArray?)
    {
        var scores = matmul(q, k.swappedAxes(-1, -2)).reshaped([k.dim(0), -1, rows.count, keys.count])
        var slope: MLXArray?
        if let c = mixer.attnLogitSoftcapping {
            scores = softCap(scores, c)
            slope = softCapSlope(scores, c).reshaped([k.dim(0), -1, keys.count])
        }
        return (maskedSoftmax(scores, visible(from: rows, keys)).reshaped([k.dim(0), -1, keys.count]), slope)
    }

    // MARK: - Backward

    // The gradients, with O for attn_out:
    //
    //     dv̂ = Pᵀ dO      dP = dO v̂ᵀ      dS = P ∘ (dP − rowsum(P ∘ dP)) ∘ cap′      dq̂ = dS k̂ · scale      dk̂ = dSᵀ q̂ · scale
    //
    // P is recomputed. rowsum(P ∘ dP) equals the cheaper rowsum(dO ∘ O) only in exact arithmetic. With an O rounded to bfloat16, the rows of dS would
    // not add up to 0.

    /// Returns the terms of some queries, at some positions, `rows` of q. The query heads of a key-value head are consecutive.
    /// - Parameters:
    ///   - q: q̂ · scale `[heads, n, d]` at the last n of N positions
    ///   - k, v: k̂ and v̂ `[kv_heads, N, d]`
    ///   - sum: dk̂ᵀ and dv̂ᵀ from later queries, `[groups, d, m]`, for the last m of the keys that these queries see
    /// - Returns: dq̂ / scale `[heads of the groups, rows, d]`, and the sums of dk̂ᵀ and dv̂ᵀ `[groups, d, keys]`.
    func tileBackward(
        q: MLXArray, k: MLXArray, v: MLXArray, dOut: MLXArray, _ groups: Range<Int>, _ rows: Range<Int>,
        addedTo sum: KeyValues?
    ) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
        let (d, perGroup, positions) = (q.dim(2), q.dim(0) / k.dim(0), positions(rows, q, k))
        let keys = seen(by: positions)
        /// Returns sum + bᵀ a `[…, d, keys]`. BLAS computes bᵀ a 1.5 times as fast as aᵀ b.
        func added(_ sum: MLXArray?, to a: MLXArray, _ b: MLXArray) -> MLXArray {
            guard let sum else { return matmul(b.swappedAxes(-1, -2), a) }
            let missing = keys.count - sum.dim(2)
            let zeros = missing > 0 ? [MLXArray.zeros([sum.dim(0), d, missing])] : []
            return addMM(concatenated(zeros + [sum], axis: 2), b.swappedAxes(-1, -2), a)
        }
        let (k, v) = (k[groups, keys], v[groups, keys])
        let (q, dO) = (stacked(q, groups, perGroup, rows), stacked(dOut, groups, perGroup, rows))
        let (p, slope) = probabilities(q, k, positions, keys)
        let dP = matmul(dO, v.swappedAxes(-1, -2))
        var dS = Self.scoresGradient([p, dP])
        if let slope { dS = dS * slope }
        return (
            matmul(dS, k).reshaped([groups.count * perGroup, rows.count, d]), added(sum?.keys, to: dS, q),
            added(sum?.values, to: p, dO)
        )
    }

    private static let scoresGradient = Fused { $0[0] * ($0[1] - ($0[0] * $0[1]).sum(axis: -1, keepDims: true)) }

    /// Returns dq̂ / scale, dk̂ and dv̂, computed by automatic differentiation of MLX's attention operation.
    /// - Parameters:
    ///   - q: q̂ · scale
    ///   - carried: dk̂ᵀ and dv̂ᵀ from later segments; replaced by those for earlier segments
    func wholeBackward(
        _ q: MLXArray, _ k: MLXArray, _ v: MLXArray, _ dOut: MLXArray, carried: inout KeyValues?
    ) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
        let keys = seen(by: k.dim(1) - q.dim(1)..<k.dim(1))
        var (_, d) = vjp(
            { [whole($0[0], $0[1], $0[2])] },
            primals: [q, k[0..., keys].asType(.float32), v[0..., keys].asType(.float32)], cotangents: [dOut])
        let own = k.dim(1) - q.dim(1) - keys.lowerBound  // the index of the segment's first position in `keys`
        /// Adds the gradients from later segments. Returns the gradients at the segment's own positions and at earlier positions.
        func parted(_ d: MLXArray, _ later: MLXArray?) -> (own: MLXArray, before: MLXArray) {
            var d = d
            if let later = later?.swappedAxes(1, 2) {
                let missing = keys.count - later.dim(1)
                let sum = d[0..., missing...] + later
                d = missing > 0 ? concatenated([d[0..., ..<missing], sum], axis: 1) : sum
            }
            // A view would keep the gradients at earlier positions alive.
            return (contiguous(d[0..., own...]), d[0..., ..<own].swappedAxes(1, 2))
        }
        // `removeLast` drops the other reference to the array, so that the sum in `parted` can reuse the array's buffer.
        let (dv, dk) = (parted(d.removeLast(), carried?.values), parted(d.removeLast(), carried?.keys))
        carried = own > 0 ? KeyValues(keys: dk.before, values: dv.before) : nil
        return (d[0], dk.own, dv.own)
    }

    /// Returns dq from dq̂ / scale.
    func queryBackward(_ q: MLXArray, dy: MLXArray, start: Int) -> MLXArray {
        positionedBackward(q, qNorm, dy: dy * scale, start: start)
    }

    func keyBackward(_ k: MLXArray, dy: MLXArray, start: Int) -> MLXArray {
        positionedBackward(k, kNorm, dy: dy, start: start)
    }

    func valueBackward(_ v: MLXArray, dy: MLXArray) -> MLXArray {
        vNorm.map { $0.backward(v.asType(.float32), dy: dy) } ?? dy
    }
}
