import MLX
import MeSPBundle

/// Attention by a single MLX operation if the processor has one that computes the scores in tiles, the mixer does not cap its scores, and TF32 is not
/// emulated. Otherwise attention is computed for some queries and some key-value heads at a time.
extension Tiled where Formula == Attention {
    /// Returns attn_out `[n, heads·d]` in float32.
    /// - Parameters:
    ///   - q: q̂ `[heads, n, d]` at the last n of N positions
    ///   - k, v: k̂ and v̂ `[kv_heads, N, d]`
    func callAsFunction(q: MLXArray, k: MLXArray, v: MLXArray) -> MLXArray {
        let (q, k, v) = schedule.part(q.asType(.float32), k.asType(.float32), v.asType(.float32))
        // Where MLX has no kernel, its operation holds all scores of a GPU at once, so they must be few.
        let isSmall = q.dim(0) * q.dim(1) * k.dim(1) <= 1 << 20
        guard schedule.processor.hasForwardOperation(for: formula.mixer), !TF32.isEmulated,
            isSmall || schedule.processor.hasOperation(for: formula.mixer)
        else {
            return concatenated(
                schedule.each(of: q.dim(1), size: schedule.queryRows) { rows in
                    let byHead = schedule.each(of: k.dim(0), size: schedule.keyHeads) {
                        formula.tile(q: q, k: k, v: v, $0, rows)
                    }
                    return concatenated(byHead).swappedAxes(0, 1).reshaped([rows.count, -1])
                })
        }
        let keys = formula.seen(by: k.dim(1) - q.dim(1)..<k.dim(1))
        let scaled = q * formula.scale
        if schedule.evaluatesTiles { submit([scaled, k, v]) }
        return formula.whole(scaled, k[0..., keys], v[0..., keys]).swappedAxes(0, 1).reshaped([q.dim(1), -1])
    }

    /// Returns attn_out of the last position of `cache`.
    func callAsFunction(q: MLXArray, _ cache: Attention.KeyValues) -> MLXArray {
        let keys = formula.seen(by: cache.count - 1..<cache.count)
        return self(q: q, k: cache.keys[0..., keys], v: cache.values[0..., keys])
    }

    /// Returns the gradients of q, k and v.
    /// - Parameters:
    ///   - q: `[heads, T, d]`, before the norm and RoPE
    ///   - k, v: `[kv_heads, T, d]`, before the norms and RoPE; k̂ and v̂ if they come from another block
    ///   - seen: k̂ and v̂ up to a segment's end, `[kv_heads, N, d]`; nil to compute them from k and v
    ///   - sum: the gradients of k̂ and v̂ from the other blocks that attend to them
    /// - Returns: dq `[T, heads·d]`, dk and dv `[T, kv_heads·d]`, in float32. If k̂ and v̂ come from another block, dk and dv are the gradients of k̂
    ///   and v̂ `[kv_heads, T, d]`, added to `sum`.
    func backward(
        q: MLXArray, k: MLXArray, v: MLXArray, dOut: MLXArray, start: Int = 0,
        seen: Attention.KeyValues? = nil, addedTo sum: Attention.KeyValues? = nil,
        carried: inout Attention.KeyValues?
    ) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
        let (kHat, vHat) = (seen?.keys ?? formula.key(k, at: .from(start)), seen?.values ?? formula.value(v))
        let qHat = formula.query(q, at: .from(start)) * formula.scale
        var parts = positionedBackward(q: qHat, k: kHat, v: vHat, dOut: dOut, carried: &carried)
        func join(_ parts: inout [MLXArray], _ sum: MLXArray? = nil) -> MLXArray {
            let whole = concatenated(parts.reversed(), axis: 1)
            parts = []
            return sum.map { $0 + whole } ?? whole
        }
        func joined(_ parts: inout [MLXArray], _ backward: (MLXArray, _ heads: Range<Int>) -> MLXArray) -> MLXArray {
            let whole = join(&parts)
            let byHead = schedule.rows(of: whole) { backward(whole[$0], $0) }
            return schedule.part(
                concatenated(byHead.map { $0.swappedAxes(0, 1) }, axis: 1).reshaped([whole.dim(1), -1]))
        }
        let dq = joined(&parts.dq) { formula.queryBackward(q[$1], dy: $0, start: start) }
        guard formula.hasOwnKeys else { return (dq, join(&parts.dk, sum?.keys), join(&parts.dv, sum?.values)) }
        let dk = joined(&parts.dk) { d, heads in
            formula.keyBackward(k[heads], dy: sum.map { d + $0.keys[heads] } ?? d, start: start)
        }
        let dv = joined(&parts.dv) { d, heads in
            formula.valueBackward(v[heads], dy: sum.map { d + $0.values[heads] } ?? d)
        }
        return (dq, dk, dv)
    }

    /// Returns the tiles of dq̂ / scale `[heads, n, d]`, and of dk̂ and dv̂ `[kv_heads, n, d]`, from the last to the first.
    /// - Parameter q: q̂ · scale `[heads, n, d]`
    private func positionedBackward(
        q: MLXArray, k: MLXArray, v: MLXArray, dOut: MLXArray,
        carried: inout Attention.KeyValues?
    ) -> (dq: [MLXArray], dk: [MLXArray], dv: [MLXArray]) {
        if schedule.processor.hasOperation(for: formula.mixer), !TF32.isEmulated {
            let (q, k, v) = schedule.part(q, k, v)
            let (dq, dk, dv) = Device.withGlobal(.cpu) { formula.wholeBackward(q, k, v, dOut, carried: &carried) }
            schedule.part(dq, dk, dv, carried)
            return ([dq], [dk], [dv])
        }
        let allGroups = tiles(of: k.dim(0), size: schedule.keyHeads)
        let start = AttentionSums(
            before: allGroups.map { groups in
                carried.map { .init(keys: $0.keys[groups], values: $0.values[groups]) }
            })
        carried = nil
        var inputs = schedule.part([q, k.asType(.float32), v.asType(.float32)]) + [dOut]
        let rowTiles = Array(tiles(of: q.dim(1), size: schedule.queryRows).reversed())
        let all = schedule.reduce(rowTiles, consume start, reading: &inputs) { all, rows, inputs in
            let (q, k, v, dOut) = (inputs[0], inputs[1], inputs[2], inputs[3])
            let positions = formula.positions(rows, q, k)
            let own = positions.lowerBound - formula.seen(by: positions).lowerBound
            var (dqs, dks, dvs) = ([MLXArray](), [MLXArray](), [MLXArray]())
            for (i, groups) in allGroups.enumerated() {
                let d = formula.tileBackward(q: q, k: k, v: v, dOut: dOut, groups, rows, addedTo: all.before[i])
                let (dq, dk, dv) = schedule.part(d.dq, d.dk, d.dv)
                dqs.append(dq)
                dks.append(dk[.ellipsis, own...].swappedAxes(1, 2))
                dvs.append(dv[.ellipsis, own...].swappedAxes(1, 2))
                all.before[i] =
                    own > 0 ? .init(keys: dk[.ellipsis, 0..<own], values: dv[.ellipsis, 0..<own]) : nil
            }
            all.dq.append(concatenated(dqs))
            // A view would keep the whole gradients alive.
            all.dk.append(contiguous(concatenated(dks)))
            all.dv.append(contiguous(concatenated(dvs)))
        }
        let rest = all.before.compactMap { $0 }
        carried =
            rest.isEmpty
            ? nil : .init(keys: concatenated(rest.map(\.keys)), values: concatenated(rest.map(\.values)))
        return (all.dq, all.dk, all.dv)
    }
}

private struct AttentionSums: Arrays {
    var dq = [MLXArray]()
    var dk = [MLXArray]()
    var dv = [MLXArray]()
    /// The gradients of the keys and values at positions before the tile that was processed last, transposed, for each group of key-value heads.
    var before: [Attention.KeyValues?]

    var arrays: [MLXArray] { before.arrays + [dq, dk, dv].compactMap(\.last) }
}
