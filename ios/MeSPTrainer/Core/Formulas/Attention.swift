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

    private var hasOwnKeys: Bool { mixer.keysOf == nil }
    private var scale: Float { mixer.attentionScale }

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

    /// Returns attn_out `[n, heads·d]`, in float32.
    /// - Parameters:
    ///   - q: q̂ `[heads, n, d]` at the last n of N positions
    ///   - k, v: k̂ and v̂ `[kv_heads, N, d]`
    func callAsFunction(q: MLXArray, k: MLXArray, v: MLXArray, machine: Machine) -> MLXArray {
        machine.attention(self, q: q.asType(.float32), k: k.asType(.float32), v: v.asType(.float32))
    }

    func ofOne(q: MLXArray, _ cache: KeyValues, machine: Machine) -> MLXArray {
        let keys = seen(by: cache.count - 1..<cache.count)
        return self(q: q, k: cache.keys[0..., keys], v: cache.values[0..., keys], machine: machine)
    }

    func byTiles(q: MLXArray, k: MLXArray, v: MLXArray, machine: Machine) -> MLXArray {
        let (length, perGroup) = (q.dim(1), q.dim(0) / k.dim(0))
        let start = k.dim(1) - length
        return concatenated(
            machine.each(of: length, size: machine.queryRows) { rows in
                let positions = start + rows.lowerBound..<start + rows.upperBound
                let keys = seen(by: positions)
                let byHead = machine.each(of: k.dim(0), size: machine.keyHeads) { groups in
                    let q = stacked(q, groups, perGroup, rows)
                    let (p, _) = probabilities(q * scale, k[groups, keys], positions, keys)
                    return matmul(p, v[groups, keys]).reshaped([groups.count * perGroup, rows.count, -1])
                }
                return concatenated(byHead).swappedAxes(0, 1).reshaped([rows.count, -1])
            })
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

    /// Returns the gradients of q, k and v. With O for attn_out:
    ///
    ///     dv̂ = Pᵀ dO      dP = dO v̂ᵀ      dS = P ∘ (dP − rowsum(P ∘ dP)) ∘ cap′      dq̂ = dS k̂ · scale      dk̂ = dSᵀ q̂ · scale
    ///
    /// `tilesBackward` processes one tile of query rows at a time, from the last to the first, and recomputes P for each tile. rowsum(P ∘ dP) equals
    /// the cheaper rowsum(dO ∘ O) only in exact arithmetic. With an O rounded to bfloat16, the rows of dS would not add up to 0.
    /// - Parameters:
    ///   - q: `[heads, T, d]`, before the norm and RoPE
    ///   - k, v: `[kv_heads, T, d]`, before the norms and RoPE; k̂ and v̂ if they come from another block
    ///   - seen: k̂ and v̂ up to a segment's end, `[kv_heads, N, d]`; nil to compute them from k and v
    ///   - sum: the gradients of k̂ and v̂ from the other blocks that attend to them
    /// - Returns: dq `[T, heads·d]`, dk and dv `[T, kv_heads·d]`, in float32. If k̂ and v̂ come from another block, dk and dv are the gradients of k̂
    ///   and v̂ `[kv_heads, T, d]`, added to `sum`.
    func backward(
        q: MLXArray, k: MLXArray, v: MLXArray, dOut: MLXArray, start: Int = 0, seen: KeyValues? = nil,
        addedTo sum: KeyValues? = nil, carried: inout KeyValues?, machine: Machine
    ) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
        let (kHat, vHat) = (seen?.keys ?? key(k, at: .from(start)), seen?.values ?? value(v))
        var parts = machine.attentionBackward(
            self, q: query(q, at: .from(start)) * scale, k: kHat, v: vHat, dOut: dOut, carried: &carried)
        func join(_ parts: inout [MLXArray], _ sum: MLXArray? = nil) -> MLXArray {
            let whole = concatenated(parts.reversed(), axis: 1)
            parts = []
            return sum.map { $0 + whole } ?? whole
        }
        func joined(_ parts: inout [MLXArray], _ backward: (MLXArray, _ heads: Range<Int>) -> MLXArray) -> MLXArray {
            let whole = join(&parts)
            let byHead = machine.rows(of: whole) { backward(whole[$0], $0) }
            return machine.part(
                concatenated(byHead.map { $0.swappedAxes(0, 1) }, axis: 1).reshaped([whole.dim(1), -1]))
        }
        let dq = joined(&parts.dq) { positionedBackward(q[$1], qNorm, dy: $0 * scale, start: start) }
        guard hasOwnKeys else { return (dq, join(&parts.dk, sum?.keys), join(&parts.dv, sum?.values)) }
        let dk = joined(&parts.dk) { d, heads in
            positionedBackward(k[heads], kNorm, dy: sum.map { d + $0.keys[heads] } ?? d, start: start)
        }
        let dv = joined(&parts.dv) { d, heads in
            let d = sum.map { d + $0.values[heads] } ?? d
            return vNorm.map { $0.backward(v[heads].asType(.float32), dy: d) } ?? d
        }
        return (dq, dk, dv)
    }

    /// Returns dq̂ / scale, dk̂ and dv̂, computed by automatic differentiation of MLX's attention operation.
    /// - Parameter q: q̂ · scale
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

    private static let scoresGradient = Fused { $0[0] * ($0[1] - ($0[0] * $0[1]).sum(axis: -1, keepDims: true)) }

    private struct Tiles: Arrays {
        /// dq̂ / scale `[heads, n, d]`, and dk̂ and dv̂ `[kv_heads, n, d]`, of each tile, from the last tile to the first.
        var dq = [MLXArray]()
        var dk = [MLXArray]()
        var dv = [MLXArray]()
        /// The gradients of the keys and values at positions before the tile that was processed last, transposed, for each group of key-value heads.
        var sums: [KeyValues?]

        var arrays: [MLXArray] { sums.arrays + [dq, dk, dv].compactMap(\.last) }
    }

    func tilesBackward(
        q: MLXArray, k: MLXArray, v: MLXArray, dOut: MLXArray, carried: inout KeyValues?, machine: Machine
    ) -> (dq: [MLXArray], dk: [MLXArray], dv: [MLXArray]) {
        let (d, perGroup, before) = (q.dim(2), q.dim(0) / k.dim(0), k.dim(1) - q.dim(1))
        let allGroups = tiles(of: k.dim(0), size: machine.keyHeads)
        var inputs = machine.part([q, k.asType(.float32), v.asType(.float32)]) + [dOut]
        let start = Tiles(
            sums: allGroups.map { groups in
                carried.map { KeyValues(keys: $0.keys[groups], values: $0.values[groups]) }
            })
        carried = nil
        let rowTiles = Array(tiles(of: q.dim(1), size: machine.queryRows).reversed())
        let all = machine.reduce(rowTiles, consume start, reading: &inputs) { all, rows, inputs in
            let (q, k, v, dOut) = (inputs[0], inputs[1], inputs[2], inputs[3])
            let positions = before + rows.lowerBound..<before + rows.upperBound
            let keys = seen(by: positions)
            /// Returns sum + bᵀ a `[…, d, keys]`. `sum` covers the end of the range `keys`. BLAS computes bᵀ a 1.5 times as fast as aᵀ b.
            func added(_ sum: MLXArray?, to a: MLXArray, _ b: MLXArray) -> MLXArray {
                guard let sum else { return matmul(b.swappedAxes(-1, -2), a) }
                let missing = keys.count - sum.dim(2)
                let zeros = missing > 0 ? [MLXArray.zeros([sum.dim(0), d, missing])] : []
                return addMM(concatenated(zeros + [sum], axis: 2), b.swappedAxes(-1, -2), a)
            }
            /// Returns dq̂ / scale, and the sums of dk̂ᵀ and dv̂ᵀ over this tile and later tiles.
            func scoresBackward(_ groups: Range<Int>, _ sum: KeyValues?) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
                let (kTile, vTile) = (k[groups, keys], v[groups, keys])
                let (qTile, dO) = (stacked(q, groups, perGroup, rows), stacked(dOut, groups, perGroup, rows))
                let (p, slope) = probabilities(qTile, kTile, positions, keys)
                let dP = matmul(dO, vTile.swappedAxes(-1, -2))
                var dS = Self.scoresGradient([p, dP])
                if let slope { dS = dS * slope }
                return machine.part(
                    matmul(dS, kTile).reshaped([groups.count * perGroup, rows.count, d]),
                    added(sum?.keys, to: dS, qTile), added(sum?.values, to: p, dO))
            }
            let own = positions.lowerBound - keys.lowerBound  // the index of the tile's first position in `keys`
            var (dqs, dks, dvs) = ([MLXArray](), [MLXArray](), [MLXArray]())
            for (i, groups) in allGroups.enumerated() {
                let new = scoresBackward(groups, all.sums[i])
                dqs.append(new.dq)
                dks.append(new.dk[.ellipsis, own...].swappedAxes(1, 2))
                dvs.append(new.dv[.ellipsis, own...].swappedAxes(1, 2))
                all.sums[i] =
                    own > 0
                    ? KeyValues(keys: new.dk[.ellipsis, 0..<own], values: new.dv[.ellipsis, 0..<own]) : nil
            }
            all.dq.append(concatenated(dqs))
            // A view would keep the whole gradients alive.
            all.dk.append(contiguous(concatenated(dks)))
            all.dv.append(contiguous(concatenated(dvs)))
        }
        let rest = all.sums.compactMap { $0 }
        carried =
            rest.isEmpty
            ? nil : KeyValues(keys: concatenated(rest.map(\.keys)), values: concatenated(rest.map(\.values)))
        return (all.dq, all.dk, all.dv)
    }
}
