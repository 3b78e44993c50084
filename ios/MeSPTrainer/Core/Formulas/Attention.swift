import MLX
import MeSPBundle

/// Grouped-query attention, causal, a tile of query rows at a time over the keys that they see:
///
///     S = cap(q̂ k̂ᵀ · scale) + mask,   P = softmax(S),   attn_out = P v̂
///
/// Keys and values may be those of another block, which are k̂ and v̂.
struct Attention {
    let mixer: AttentionMixer
    let qNorm: RMSNorm?
    let kNorm: RMSNorm?
    let vNorm: RMSNorm?

    private var hasOwnKeys: Bool { mixer.keysOf == nil }
    private var scale: Float { mixer.attentionScale }

    /// q̂ = RoPE(norm(q)), in float32.
    /// - Parameter q: `[heads, n, d]`, positions `start ..< start + n`
    func query(_ q: MLXArray, start: Int) -> MLXArray { positioned(q, qNorm, start) }

    /// k̂ = RoPE(norm(k)), in float32.
    func key(_ k: MLXArray, start: Int) -> MLXArray {
        hasOwnKeys ? positioned(k, kNorm, start) : k.asType(.float32)
    }

    /// v̂ = norm(v), in float32.
    func value(_ v: MLXArray) -> MLXArray {
        let v = v.asType(.float32)
        return hasOwnKeys ? vNorm.map { $0(v) } ?? v : v
    }

    private func positioned(_ x: MLXArray, _ norm: RMSNorm?, _ start: Int) -> MLXArray {
        let x = x.asType(.float32)
        return mixer.rope(norm.map { $0(x) } ?? x, start: start)
    }

    // MARK: - One operation

    /// Whether MLXFast's attention serves, whose scores this program's operation and its derivative make a tile at a time.
    var isOneOperation: Bool {
        CPUProducts.current.attendsByTiles && Device.isCPU && !TF32.isEmulated && mixer.attnLogitSoftcapping == nil
    }

    /// attn_out `[heads, n, d]` of the last n queries over the keys that these see.
    /// - Parameters:
    ///   - q: q̂ · scale `[heads, n, d]`
    ///   - k, v: k̂ and v `[kv_heads, keys, d]`
    private func whole(_ q: MLXArray, _ k: MLXArray, _ v: MLXArray) -> MLXArray {
        var mask = MLXFast.ScaledDotProductAttentionMaskMode.causal
        if let window = mixer.slidingWindow, k.dim(1) > window {
            mask = .array(visible(from: k.dim(1) - q.dim(1)..<k.dim(1), 0..<k.dim(1)))
        }
        return MLXFast.scaledDotProductAttention(
            queries: q.expandedDimensions(axis: 0), keys: k.expandedDimensions(axis: 0),
            values: v.expandedDimensions(axis: 0), scale: 1, mask: mask
        ).squeezed(axis: 0)
    }

    // MARK: - One token of each of several sequences

    /// q̂ or k̂ `[n, heads, 1, d]` of n sequences, each at a position of its own, in float32.
    func query(_ q: MLXArray, positions: MLXArray) -> MLXArray { positioned(q, qNorm, positions) }
    func key(_ k: MLXArray, positions: MLXArray) -> MLXArray { positioned(k, kNorm, positions) }

    private func positioned(_ x: MLXArray, _ norm: RMSNorm?, _ positions: MLXArray) -> MLXArray {
        let x = x.asType(.float32)
        return mixer.rope(norm.map { $0(x) } ?? x, positions: positions)
    }

    /// attn_out `[1, heads, 1, d]` in float32 of q̂, alike, the last of N positions, over k̂ and v `[kv_heads, N, d]`.
    func ofOne(q: MLXArray, _ cache: MixerState.KeyValues) -> MLXArray {
        let keys = seen(by: cache.count - 1..<cache.count)
        return MLXFast.scaledDotProductAttention(
            queries: q, keys: cache.keys[0..., keys].expandedDimensions(axis: 0).asType(.float32),
            values: cache.values[0..., keys].expandedDimensions(axis: 0).asType(.float32), scale: scale, mask: nil)
    }

    // MARK: - Backward

    /// dq or dk from the gradient of q̂ or k̂, in float32.
    private func positionedBackward(_ x: MLXArray, _ norm: RMSNorm?, dy: MLXArray, start: Int) -> MLXArray {
        let d = mixer.ropeBackward(dy: dy, start: start)
        return norm.map { $0.backward(x.asType(.float32), dy: d) } ?? d
    }

    /// - Parameters:
    ///   - q: q̂ `[heads, n, d]`, the last n of N positions; k, v: k̂ and v `[kv_heads, N, d]`
    /// - Returns: attn_out `[n, heads·d]`, in float32; evaluated where there is more than one tile.
    func callAsFunction(q: MLXArray, k: MLXArray, v: MLXArray, tile: TileSizes) -> MLXArray {
        let (heads, length, d, perGroup) = (q.dim(0), q.dim(1), q.dim(2), q.dim(0) / k.dim(0))
        let start = k.dim(1) - length
        let (k, v) = (k.asType(.float32), v.asType(.float32))
        if isOneOperation {
            let keys = seen(by: start..<start + length)
            let q = q.asType(.float32) * scale
            tile.pace.finish([q, k, v])
            let out = whole(q, k[0..., keys], v[0..., keys])
            return out.swappedAxes(0, 1).reshaped([length, heads * d])
        }
        let parts = tiles(of: length, size: tile.attention).map { rows in
            let positions = start + rows.lowerBound..<start + rows.upperBound
            let keys = seen(by: positions)
            let byHead = tiles(of: k.dim(0), size: tile.keyHeads).map { groups in
                let q = stacked(q, groups, perGroup, rows).asType(.float32)
                let (p, _) = probabilities(q * scale, k[groups, keys], positions, keys)
                let out = matmul(p, v[groups, keys]).reshaped([groups.count * perGroup, rows.count, d])
                if groups.count * perGroup < heads { submit([out]) }
                return out
            }
            let part = concatenated(byHead).swappedAxes(0, 1).reshaped([rows.count, heads * d])
            if rows.count < length { submit([part]) }
            return part
        }
        return concatenated(parts)
    }

    /// Some rows of x `[heads, n, d]`, `[groups, m, d]`: the query heads that share one of the key-value heads `groups` lie below each other,
    /// so that a sum over them is a matrix product.
    private func stacked(_ x: MLXArray, _ groups: Range<Int>, _ perGroup: Int, _ rows: Range<Int>) -> MLXArray {
        x[groups.lowerBound * perGroup..<groups.upperBound * perGroup, rows].reshaped([groups.count, -1, x.dim(2)])
    }

    /// The positions that some query at a position of `rows` sees.
    private func seen(by rows: Range<Int>) -> Range<Int> {
        max(0, rows.lowerBound + 1 - (mixer.slidingWindow ?? rows.upperBound))..<rows.upperBound
    }

    /// Whether the queries at positions `rows` see the `keys`, `[rows, keys]`.
    private func visible(from rows: Range<Int>, _ keys: Range<Int>) -> MLXArray {
        let (queries, positions) = (
            MLXArray.arange(rows.lowerBound, rows.upperBound)[0..., .newAxis],
            MLXArray.arange(keys.lowerBound, keys.upperBound)
        )
        let isBefore = queries .>= positions
        return mixer.slidingWindow.map { logicalAnd(isBefore, queries .< positions + $0) } ?? isBefore
    }

    /// P of the queries at positions `rows` over the `keys`.
    /// - Parameters:
    ///   - q: q̂ · scale `[kv_heads, m, d]`; the query heads that share a key-value head lie below each other
    ///   - k: k̂ `[kv_heads, keys, d]`
    /// - Returns: P `[kv_heads, m, keys]`, and cap′ of the scores, alike, nil where they are not capped.
    private func probabilities(_ q: MLXArray, _ k: MLXArray, _ rows: Range<Int>, _ keys: Range<Int>)
        -> (p: MLXArray, slope: MLXArray?)
    {
        var scores = matmul(q, k.swappedAxes(-1, -2)).reshaped([k.dim(0), -1, rows.count, keys.count])
        var slope: MLXArray?
        if let c = mixer.attnLogitSoftcapping {
            scores = softCap(scores, c)
            slope = softCapSlope(scores, c).reshaped([k.dim(0), -1, keys.count])
        }
        let visible = visible(from: rows, keys)
        let p =
            Device.isCPU && Fused.isAvailable
            ? Self.maskedSoftmax([scores, which(visible, Float(0), -Float.infinity)])
            : softmax(which(visible, scores, -Float.infinity), axis: -1)
        return (p.reshaped([k.dim(0), -1, keys.count]), slope)
    }

    private static let maskedSoftmax = Fused {
        let masked = $0[0] + $0[1]
        let e = exp(masked - masked.max(axis: -1, keepDims: true))
        return e / e.sum(axis: -1, keepDims: true)
    }

    /// The derivative from what the forward pass left, a tile of query rows at a time, the last first:
    ///
    ///     dv = Pᵀ dO      dP = dO vᵀ      dS = P (dP − rowsum(P ∘ dP)) cap′      dq̂ = dS k̂ · scale      dk̂ = dSᵀ q̂ · scale
    ///
    /// P is made again for each tile and never kept. dq̂ and dk̂ are turned back through RoPE and the norms. rowsum(P ∘ dP) is
    /// rowsum(dO ∘ O) but for the rounding of O: with a stored O in bfloat16 a row of dS would not add up to 0, and what all keys have
    /// in common, as with large biases of k, would come into dq̂.
    /// - Parameters:
    ///   - q: `[heads, T, d]`; k, v: `[kv_heads, T, d]`; before the norms and RoPE
    ///   - dOut: the gradient of attn_out by head, `[heads, T, d]`
    ///   - start: the position of the first row
    ///   - sum: the gradients by k̂ and v̂ of other blocks that take them, which those of this one are added to
    /// - Returns: dq `[T, heads·d]`, dk and dv `[T, kv_heads·d]`, in float32, evaluated; in place of these the sums `[kv_heads, T, d]` of
    ///   the gradients by k̂ and v̂ where they are another block's.
    func backward(
        q: MLXArray, k: MLXArray, v: MLXArray, dOut: MLXArray, tile: TileSizes, start: Int = 0,
        addedTo sum: MixerState.KeyValues? = nil
    ) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
        var behind: (dk: MLXArray, dv: MLXArray)?
        return backward(
            q: q, k: k, v: v, key(k, start: start), value(v), start: start, dOut: dOut, addedTo: sum, behind: &behind,
            tile: tile)
    }

    /// The same of a segment of the positions, of which the last were differentiated before.
    /// - Parameters:
    ///   - q, k, v: of the segment
    ///   - kHat, vHat: k̂ and v̂ up to its end, `[kv_heads, N, d]`
    ///   - behind: see `Behind`; becomes that for the segment before
    func backward(
        q: MLXArray, k: MLXArray, v: MLXArray, _ kHat: MLXArray, _ vHat: MLXArray, start: Int, dOut: MLXArray,
        addedTo sum: MixerState.KeyValues? = nil, behind: inout (dk: MLXArray, dv: MLXArray)?, tile: TileSizes
    ) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
        var parts = tilesBackward(q: q, kHat, vHat, start: start, dOut: dOut, behind: &behind, tile: tile)
        /// By token, and before that some heads at a time through `backward`.
        func joined(_ parts: inout [MLXArray], _ backward: (MLXArray, _ heads: Range<Int>) -> MLXArray) -> MLXArray {
            let whole = concatenated(parts.reversed(), axis: 1)
            parts = []
            let byHead = tiles(of: whole.dim(0), size: tile.rows(of: whole)).map { heads in
                let d = backward(whole[heads], heads)
                tile.pace.finish([d])
                return d
            }
            let byToken = concatenated(byHead.map { $0.swappedAxes(0, 1) }, axis: 1).reshaped([whole.dim(1), -1])
            tile.pace.finish([byToken])
            return byToken
        }
        /// With the gradients of other blocks.
        func whole(_ parts: inout [MLXArray], _ sum: MLXArray?) -> MLXArray {
            let whole = concatenated(parts.reversed(), axis: 1)
            parts = []
            return sum.map { $0 + whole } ?? whole
        }
        let dq = joined(&parts.dq) { positionedBackward(q[$1], qNorm, dy: $0 * scale, start: start) }
        guard hasOwnKeys else {
            let (dk, dv) = (whole(&parts.dk, sum?.keys), whole(&parts.dv, sum?.values))
            eval(dq, dk, dv)
            return (dq, dk, dv)
        }
        let dk = joined(&parts.dk) { d, heads in
            positionedBackward(k[heads], kNorm, dy: sum.map { d + $0.keys[heads] } ?? d, start: start)
        }
        let dv = joined(&parts.dv) { d, heads in
            let d = sum.map { d + $0.values[heads] } ?? d
            return vNorm.map { $0.backward(v[heads].asType(.float32), dy: d) } ?? d
        }
        submit([dq, dk, dv] + (behind.map { [$0.dk, $0.dv] } ?? []))
        return (dq, dk, dv)
    }

    /// dq̂ / scale, dk̂ and dv by the derivative of the one operation.
    /// - Parameter q: q̂ · scale
    private func wholeBackward(
        _ q: MLXArray, _ kHat: MLXArray, _ v: MLXArray, _ dOut: MLXArray, _ behind: inout (dk: MLXArray, dv: MLXArray)?
    ) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
        let keys = seen(by: kHat.dim(1) - q.dim(1)..<kHat.dim(1))
        let (k, v) = (kHat[0..., keys].asType(.float32), v[0..., keys].asType(.float32))
        var (_, d) = Device.withGlobal(.cpu) {
            vjp({ [whole($0[0], $0[1], $0[2])] }, primals: [q, k, v], cotangents: [dOut])
        }
        let own = kHat.dim(1) - q.dim(1) - keys.lowerBound  // where the segment's own positions begin
        /// The sum with what later segments add to the last keys: the segment's own part, and what is before that.
        func parted(_ d: MLXArray, _ later: MLXArray?) -> (own: MLXArray, before: MLXArray) {
            var d = d
            if let later = later?.swappedAxes(1, 2) {
                let missing = keys.count - later.dim(1)
                let sum = d[0..., missing...] + later
                d = missing > 0 ? concatenated([d[0..., ..<missing], sum], axis: 1) : sum
            }
            // A copy, as a view would keep what is before it.
            return (contiguous(d[0..., own...]), d[0..., ..<own].swappedAxes(1, 2))
        }
        // A sum takes the place of what nobody else has.
        let (dv, dk) = (parted(d.removeLast(), behind?.dv), parted(d.removeLast(), behind?.dk))
        behind = own > 0 ? (dk.before, dv.before) : nil
        submit([d[0], dk.own, dv.own] + (own > 0 ? [dk.before, dv.before] : []))
        return (d[0], dk.own, dv.own)
    }

    /// P (dP − rowsum(P ∘ dP))
    private static let scoresGradient = Fused { $0[0] * ($0[1] - ($0[0] * $0[1]).sum(axis: -1, keepDims: true)) }

    /// The tiles of dq̂ / scale, dk̂ and dv, `[…heads, n, d]`, the last first.
    private func tilesBackward(
        q: MLXArray, _ kHat: MLXArray, _ v: MLXArray, start: Int, dOut: MLXArray,
        behind: inout (dk: MLXArray, dv: MLXArray)?, tile: TileSizes
    ) -> (dq: [MLXArray], dk: [MLXArray], dv: [MLXArray]) {
        let (length, d, perGroup, before) = (q.dim(1), q.dim(2), q.dim(0) / kHat.dim(0), kHat.dim(1) - q.dim(1))
        if isOneOperation {
            let q = query(q, start: start) * scale
            tile.pace.finish([q, kHat, v])
            let (dq, dk, dv) = wholeBackward(q, kHat, v, dOut, &behind)
            return ([dq], [dk], [dv])
        }
        let allGroups = tiles(of: kHat.dim(0), size: tile.keyHeads)
        var (dqTiles, dkTiles, dvTiles) = ([MLXArray](), [MLXArray](), [MLXArray]())
        // What the tiles so far add to the keys and values that earlier tiles see too, up to the next tile's last row, transposed.
        var sums = allGroups.map { groups in behind.map { (dk: $0.dk[groups], dv: $0.dv[groups]) } }
        behind = nil
        var (qHat, kHat, v, dOut) = (query(q, start: start) * scale, kHat.asType(.float32), v.asType(.float32), dOut)
        tile.pace.finish([qHat, kHat, v])

        for rows in tiles(of: length, size: tile.attention).reversed() {
            let positions = before + rows.lowerBound..<before + rows.upperBound
            let keys = seen(by: positions)
            /// Pᵀ dO or dSᵀ q̂ of the `keys`, transposed, which BLAS computes half again as fast, as its wide side is then P's or dS's own;
            /// plus the sum so far, of the last of them.
            func added(_ sum: MLXArray?, to a: MLXArray, _ b: MLXArray) -> MLXArray {
                guard let sum else { return matmul(b.swappedAxes(-1, -2), a) }
                let missing = keys.count - sum.dim(2)
                let zeros = missing > 0 ? [MLXArray.zeros([sum.dim(0), d, missing])] : []
                return addMM(concatenated(zeros + [sum], axis: 2), b.swappedAxes(-1, -2), a)
            }

            /// dq̂ / scale, and dk̂ᵀ and dvᵀ of the `keys` with what later tiles add; with the function's end, the scores go.
            func scoresBackward(_ groups: Range<Int>, _ sum: (dk: MLXArray, dv: MLXArray)?)
                -> (dq: MLXArray, dk: MLXArray, dv: MLXArray)
            {
                let (kTile, vTile) = (kHat[groups, keys], v[groups, keys])
                let (qTile, dO) = (stacked(qHat, groups, perGroup, rows), stacked(dOut, groups, perGroup, rows))

                let (p, slope) = probabilities(qTile, kTile, positions, keys)
                let dP = matmul(dO, vTile.swappedAxes(-1, -2))
                var dS = Self.scoresGradient([p, dP])
                if let slope { dS = dS * slope }

                let dq = matmul(dS, kTile).reshaped([groups.count * perGroup, rows.count, d])
                let (dv, dk) = (added(sum?.dv, to: p, dO), added(sum?.dk, to: dS, qTile))
                tile.pace.finish([dq, dk, dv])
                return (dq, dk, dv)
            }

            let own = positions.lowerBound - keys.lowerBound  // where in dk and dv the tile's own positions begin
            var (dqs, dks, dvs) = ([MLXArray](), [MLXArray](), [MLXArray]())
            for (i, groups) in allGroups.enumerated() {
                let new = scoresBackward(groups, sums[i])
                dqs.append(new.dq)
                dks.append(new.dk[.ellipsis, own...].swappedAxes(1, 2))
                dvs.append(new.dv[.ellipsis, own...].swappedAxes(1, 2))
                sums[i] = own > 0 ? (new.dk[.ellipsis, 0..<own], new.dv[.ellipsis, 0..<own]) : nil
            }
            dqTiles.append(concatenated(dqs))
            // Copies, as a view would keep what is before it.
            dkTiles.append(contiguous(concatenated(dks)))
            dvTiles.append(contiguous(concatenated(dvs)))
            let done = sums.flatMap { $0.map { [$0.dk, $0.dv] } ?? [] }
            let next = tile.pace.next(
                [qHat, kHat, v, dOut], after: done + [dqTiles, dkTiles, dvTiles].compactMap(\.last))
            (qHat, kHat, v, dOut) = (next[0], next[1], next[2], next[3])
        }
        let rest = sums.compactMap { $0 }
        behind = rest.isEmpty ? nil : (concatenated(rest.map(\.dk)), concatenated(rest.map(\.dv)))
        return (dqTiles, dkTiles, dvTiles)
    }
}
