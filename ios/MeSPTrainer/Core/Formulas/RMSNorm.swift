import MLX

/// y = x r w,  r = 1 / √(mean(x²) + ε)
struct RMSNorm {
    /// `[D]`
    let weight: MLXArray
    let eps: Float

    /// `[…, D]` to `[…, D]`, computed in float32.
    func callAsFunction(_ x: MLXArray) -> MLXArray {
        let x32 = x.asType(.float32)
        return weight * (x32 * r(x32)).asType(x.dtype)
    }

    /// dx = r (dy w − x r² mean(dy w x)), in dy's dtype.
    func backward(_ x: MLXArray, dy: MLXArray) -> MLXArray {
        let x32 = x.asType(.float32)
        let r = r(x32)
        let dyw = (dy * weight).asType(.float32)
        let projection = (dyw * x32).mean(axis: -1, keepDims: true)
        return (r * (dyw - x32 * (r.square() * projection))).asType(dy.dtype)
    }

    private func r(_ x: MLXArray) -> MLXArray { rsqrt(x.square().mean(axis: -1, keepDims: true) + eps) }
}
