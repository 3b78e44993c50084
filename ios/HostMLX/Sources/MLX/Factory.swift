import CHostMLX

extension MLXArray {

    public static func zeros(
        _ shape: some Collection<Int>, type: (some HasDType).Type = Float.self, stream: StreamOrDevice = .default
    ) -> MLXArray {
        zeros(shape, dtype: type.dtype, stream: stream)
    }

    public static func zeros(
        _ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLXArray(host_zeros(shape.asInt32, shape.count, dtype.code, stream.ctx))
    }

    public static func zeros(like array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
        call(host_zeros_like, array, stream)
    }

    public static func ones(
        _ shape: some Collection<Int>, type: (some HasDType).Type = Float.self, stream: StreamOrDevice = .default
    ) -> MLXArray {
        ones(shape, dtype: type.dtype, stream: stream)
    }

    public static func ones(
        _ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLXArray(host_ones(shape.asInt32, shape.count, dtype.code, stream.ctx))
    }

    public static func eye(
        _ n: Int, m: Int? = nil, k: Int = 0, type: (some HasDType).Type = Float.self,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLXArray(host_eye(n.int32, (m ?? n).int32, k.int32, type.dtype.code, stream.ctx))
    }

    public static func full(
        _ shape: some Collection<Int>, values: MLXArray, stream: StreamOrDevice = .default
    ) -> MLXArray {
        withExtendedLifetime(values) {
            MLXArray(host_full(shape.asInt32, shape.count, values.ctx, values.dtype.code, stream.ctx))
        }
    }

    public static func arange(_ stop: Int, stream: StreamOrDevice = .default) -> MLXArray {
        arange(0, stop, stream: stream)
    }

    public static func arange(
        _ start: Int, _ stop: Int, step: Int = 1, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLXArray(host_arange(Double(start), Double(stop), Double(step), DType.int32.code, stream.ctx))
    }
}

public func repeated(_ array: MLXArray, count: Int, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_repeat, array, count, axis, stream)
}
