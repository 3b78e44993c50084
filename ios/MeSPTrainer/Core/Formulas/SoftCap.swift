import MLX

/// cap(s) = c tanh(s / c)
func softCap(_ s: MLXArray, _ c: Float) -> MLXArray { tanh(s / c) * c }

/// cap′(s) = 1 − (cap(s) / c)², from cap(s).
func softCapSlope(_ capped: MLXArray, _ c: Float) -> MLXArray { 1 - (capped / c).square() }
