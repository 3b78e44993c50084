import MLX

/// Returns cap(s) = c tanh(s / c).
func softCap(_ s: MLXArray, _ c: Float) -> MLXArray { tanh(s / c) * c }

/// Returns cap′(s) = 1 − (cap(s) / c)², from cap(s).
func softCapSlope(_ capped: MLXArray, _ c: Float) -> MLXArray { 1 - (capped / c).square() }
