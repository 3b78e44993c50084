import MLX

/// RMSNorm:  y = x r w,  r = 1 / √(mean(x²) + ε)
struct RMSNorm {
    let weight: MLXArray
    let eps: Float

    /// Returns y for x `[…, D]`, in x's dtype. The mean square is computed in float32.
    func callAsFunction(_ x: MLXArray) -> MLXArray {
        MLXFast.rmsNorm(x, weight: weight.asType(x.dtype), eps: eps)
    }

    /// Returns dx = r (dy w − x r² mean(dy w x)), in dy's dtype. If `sum` is given, returns sum + dx.
    func backward(_ x: MLXArray, dy: MLXArray, addedTo sum: MLXArray? = nil) -> MLXArray {
        let r = Self.r([Self.square([x]).mean(axis: -1, keepDims: true), MLXArray(eps)])
        let projection = Self.product([dy, weight, x]).mean(axis: -1, keepDims: true)
        return Self.dx([x, dy, weight, r, projection] + (sum.map { [$0] } ?? [])).asType(dy.dtype)
    }

    private static let square = Fused { $0[0].asType(.float32).square() }
    private static let r = Fused { rsqrt($0[0] + $0[1]) }
    private static let product = Fused { ($0[0] * $0[1]).asType(.float32) * $0[2].asType(.float32) }
    private static let dx = Fused {
        let (x, dy, weight, r, projection) = ($0[0], $0[1], $0[2], $0[3], $0[4])
        let dx = r * ((dy * weight).asType(.float32) - x.asType(.float32) * (r.square() * projection))
        return $0.count > 5 ? $0[5] + dx : dx
    }
}
