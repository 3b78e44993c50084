import MLX

func softCap(_ s: MLXArray, _ c: Float) -> MLXArray { tanh(s / c) * c }

func softCapSlope(_ capped: MLXArray, _ c: Float) -> MLXArray { 1 - (capped / c).square() }
