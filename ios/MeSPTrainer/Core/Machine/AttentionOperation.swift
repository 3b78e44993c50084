import MLX
import MeSPBundle

/// Attention by a single MLX operation if the processor has one that computes the scores in tiles, the mixer does not cap its scores, and TF32 is not
/// emulated. Otherwise attention is computed in tiles here.
extension Machine {
    /// Returns attn_out `[n, heads·d]` in float32, of q̂ `[heads, n, d]` at the last n of N positions, over k̂ and v̂ `[kv_heads, N, d]`.
    func attention(_ attention: Attention, q: MLXArray, k: MLXArray, v: MLXArray) -> MLXArray {
        // Where MLX has no kernel, its operation holds all scores of a GPU at once, so they must be few.
        let isSmall = q.dim(0) * q.dim(1) * k.dim(1) <= 1 << 20
        guard processor.hasForwardOperation(for: attention.mixer), !TF32.isEmulated,
            isSmall || processor.hasOperation(for: attention.mixer)
        else {
            return attention.byTiles(q: q, k: k, v: v, machine: self)
        }
        let start = k.dim(1) - q.dim(1)
        let keys = attention.seen(by: start..<k.dim(1))
        let q = q * attention.mixer.attentionScale
        if evaluatesTiles { submit([q, k, v]) }
        return attention.whole(q, k[0..., keys], v[0..., keys]).swappedAxes(0, 1).reshaped([q.dim(1), -1])
    }

    /// Returns the tiles of dq̂ / scale `[heads, n, d]`, and of dk̂ and dv̂ `[kv_heads, n, d]`, from the last to the first.
    /// - Parameter q: q̂ · scale `[heads, n, d]`
    func attentionBackward(
        _ attention: Attention, q: MLXArray, k: MLXArray, v: MLXArray, dOut: MLXArray,
        carried: inout Attention.KeyValues?
    ) -> (dq: [MLXArray], dk: [MLXArray], dv: [MLXArray]) {
        guard processor.hasOperation(for: attention.mixer), !TF32.isEmulated else {
            return attention.tilesBackward(q: q, k: k, v: v, dOut: dOut, carried: &carried, machine: self)
        }
        let (q, k, v) = part(q, k, v)
        let (dq, dk, dv) = Device.withGlobal(.cpu) { attention.wholeBackward(q, k, v, dOut, carried: &carried) }
        part(dq, dk, dv, carried)
        return ([dq], [dk], [dv])
    }
}
