import CHostMLX

public func zeros(
    _ shape: some Collection<Int>, type: (some HasDType).Type = Float.self, stream: StreamOrDevice = .default
) -> MLXArray {
    zeros(shape, dtype: type.dtype, stream: stream)
}

public func zeros(_ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default) -> MLXArray {
    MLXArray(host_zeros(shape.asInt32, shape.count, dtype.code, stream.ctx))
}

public func zeros(like array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_zeros_like, array, stream)
}

public func ones(
    _ shape: some Collection<Int>, type: (some HasDType).Type = Float.self, stream: StreamOrDevice = .default
) -> MLXArray {
    ones(shape, dtype: type.dtype, stream: stream)
}

public func ones(_ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default) -> MLXArray {
    MLXArray(host_ones(shape.asInt32, shape.count, dtype.code, stream.ctx))
}

public func ones(like array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_ones_like, array, stream)
}

public func eye(
    _ n: Int, m: Int? = nil, k: Int = 0, type: (some HasDType).Type = Float.self, stream: StreamOrDevice = .default
) -> MLXArray {
    eye(n, m: m, k: k, dtype: type.dtype, stream: stream)
}

public func eye(_ n: Int, m: Int? = nil, k: Int = 0, dtype: DType, stream: StreamOrDevice = .default) -> MLXArray {
    MLXArray(host_eye(n.int32, (m ?? n).int32, k.int32, dtype.code, stream.ctx))
}

public func full(
    _ shape: some Collection<Int>, values: some ScalarOrArray, type: (some HasDType).Type,
    stream: StreamOrDevice = .default
) -> MLXArray {
    full(shape, values: values.asMLXArray(dtype: nil), dtype: type.dtype, stream: stream)
}

public func full(
    _ shape: some Collection<Int>, values: MLXArray, dtype: DType, stream: StreamOrDevice = .default
) -> MLXArray {
    withExtendedLifetime(values) {
        MLXArray(host_full(shape.asInt32, shape.count, values.ctx, dtype.code, stream.ctx))
    }
}

public func full(
    _ shape: some Collection<Int>, values: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray {
    let values = values.asMLXArray(dtype: nil)
    return full(shape, values: values, dtype: values.dtype, stream: stream)
}

public func arange(_ stop: Int, stream: StreamOrDevice = .default) -> MLXArray {
    arange(0, stop, dtype: .int32, stream: stream)
}

public func arange(_ start: Int, _ stop: Int, step: Int = 1, stream: StreamOrDevice = .default) -> MLXArray {
    arange(start, stop, step: step, dtype: .int32, stream: stream)
}

public func arange(_ stop: Int, dtype: DType, stream: StreamOrDevice = .default) -> MLXArray {
    arange(0, stop, dtype: dtype, stream: stream)
}

public func arange(
    _ start: Int, _ stop: Int, step: Int = 1, dtype: DType, stream: StreamOrDevice = .default
) -> MLXArray {
    MLXArray(host_arange(Double(start), Double(stop), Double(step), dtype.code, stream.ctx))
}

public func arange(_ stop: Double, dtype: DType = .float32, stream: StreamOrDevice = .default) -> MLXArray {
    MLXArray(host_arange(0, stop, 1, dtype.code, stream.ctx))
}

public func arange(
    _ start: Double, _ stop: Double, step: Double = 1.0, dtype: DType = .float32, stream: StreamOrDevice = .default
) -> MLXArray {
    MLXArray(host_arange(start, stop, step, dtype.code, stream.ctx))
}

public func repeated(_ array: MLXArray, count: Int, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_repeat_2, array, count, axis, stream)
}

public func repeated(_ array: MLXArray, count: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_repeat_1, array, count, stream)
}

// MARK: - Static functions of MLXArray

extension MLXArray {

    public static func zeros(
        _ shape: some Collection<Int>, type: (some HasDType).Type = Float.self, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.zeros(shape, type: type, stream: stream)
    }

    public static func zeros(
        _ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.zeros(shape, dtype: dtype, stream: stream)
    }

    public static func zeros(like array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.zeros(like: array, stream: stream)
    }

    public static func ones(
        _ shape: some Collection<Int>, type: (some HasDType).Type = Float.self, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.ones(shape, type: type, stream: stream)
    }

    public static func ones(
        _ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.ones(shape, dtype: dtype, stream: stream)
    }

    public static func ones(like array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.ones(like: array, stream: stream)
    }

    public static func eye(
        _ n: Int, m: Int? = nil, k: Int = 0, type: (some HasDType).Type = Float.self,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.eye(n, m: m, k: k, type: type, stream: stream)
    }

    public static func eye(
        _ n: Int, m: Int? = nil, k: Int = 0, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.eye(n, m: m, k: k, dtype: dtype, stream: stream)
    }

    public static func full(
        _ shape: some Collection<Int>, values: MLXArray, type: (some HasDType).Type = Float.self,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.full(shape, values: values, type: type, stream: stream)
    }

    public static func full(
        _ shape: some Collection<Int>, values: MLXArray, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.full(shape, values: values, dtype: dtype, stream: stream)
    }

    public static func full(
        _ shape: some Collection<Int>, values: MLXArray, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.full(shape, values: values, stream: stream)
    }

    public static func arange(_ stop: Int, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.arange(stop, stream: stream)
    }

    public static func arange(
        _ start: Int, _ stop: Int, step: Int = 1, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.arange(start, stop, step: step, stream: stream)
    }

    public static func arange(_ stop: Int, dtype: DType, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.arange(stop, dtype: dtype, stream: stream)
    }

    public static func arange(
        _ start: Int, _ stop: Int, step: Int = 1, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.arange(start, stop, step: step, dtype: dtype, stream: stream)
    }

    public static func arange(
        _ stop: Double, dtype: DType = .float32, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.arange(stop, dtype: dtype, stream: stream)
    }

    public static func arange(
        _ start: Double, _ stop: Double, step: Double = 1.0, dtype: DType = .float32,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.arange(start, stop, step: step, dtype: dtype, stream: stream)
    }
}
