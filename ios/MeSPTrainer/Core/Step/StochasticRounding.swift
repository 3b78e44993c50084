import MLX

/// `x` in bfloat16, rounded up or down at random, so that the expected value is x. To the nearest, an update below 1/256 of a parameter
/// would be lost.
///
/// A float32's upper 16 bits are the bfloat16 below it in magnitude; adding a uniform 16-bit number to the bits carries into them with the
/// probability that the lower 16 ask for.
/// - Parameter x: float32 `[P]`
func stochasticallyRounded(_ x: MLXArray, key: MLXArray) -> MLXArray {
    let noise = MLXRandom.randInt(low: 0, high: 1 << 16, x.shape, type: UInt32.self, key: key)
    let upper = (x.view(dtype: .uint32) + noise) >> 16
    return upper.asType(.uint16).view(dtype: .bfloat16)
}
