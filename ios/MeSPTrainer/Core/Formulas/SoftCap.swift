import MLX

/// cap(s) = c tanh(s / c)
struct SoftCap {
    let c: Float

    func callAsFunction(_ s: MLXArray) -> MLXArray { tanh(s / c) * c }

    /// cap′(s) = 1 − (cap(s) / c)², from cap(s).
    func slope(_ capped: MLXArray) -> MLXArray { 1 - (capped / c).square() }
}
