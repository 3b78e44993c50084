import CHostMLX

infix operator ** : BitwiseShiftPrecedence
infix operator .&& : LogicalConjunctionPrecedence
infix operator .|| : LogicalDisjunctionPrecedence

// A scalar operand gets the array's type if possible. Most binary operators have three forms, because a single generic form would be ambiguous with
// Swift's own operators.

extension MLXArray {

    // MARK: Arithmetic

    public static func + (lhs: MLXArray, rhs: MLXArray) -> MLXArray { call(host_add, lhs, rhs) }
    public static func + (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { call(host_add, lhs, rhs) }
    public static func + (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { call(host_add, lhs, rhs) }

    public static func - (lhs: MLXArray, rhs: MLXArray) -> MLXArray { call(host_subtract, lhs, rhs) }
    public static func - (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { call(host_subtract, lhs, rhs) }
    public static func - (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { call(host_subtract, lhs, rhs) }

    public static func * (lhs: MLXArray, rhs: MLXArray) -> MLXArray { call(host_multiply, lhs, rhs) }
    public static func * (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { call(host_multiply, lhs, rhs) }
    public static func * (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { call(host_multiply, lhs, rhs) }

    public static func / (lhs: MLXArray, rhs: MLXArray) -> MLXArray { call(host_divide, lhs, rhs) }
    public static func / (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { call(host_divide, lhs, rhs) }

    public static func % (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { call(host_remainder, lhs, rhs) }

    public static prefix func - (lhs: MLXArray) -> MLXArray { call(host_negative, lhs) }

    // MARK: Comparison and logic

    public static func .== (lhs: MLXArray, rhs: MLXArray) -> MLXArray { call(host_equal, lhs, rhs) }
    public static func .== (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { call(host_equal, lhs, rhs) }

    public static func .< (lhs: MLXArray, rhs: MLXArray) -> MLXArray { call(host_less, lhs, rhs) }
    public static func .< (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { call(host_less, lhs, rhs) }

    public static func .> (lhs: MLXArray, rhs: MLXArray) -> MLXArray { call(host_greater, lhs, rhs) }
    public static func .> (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { call(host_greater, lhs, rhs) }

    public static func .>= (lhs: MLXArray, rhs: MLXArray) -> MLXArray { call(host_greater_equal, lhs, rhs) }

    // MARK: Bits

    public static func & (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { call(host_bitwise_and, lhs, rhs) }

    public static func >> (lhs: MLXArray, rhs: MLXArray) -> MLXArray { call(host_right_shift, lhs, rhs) }
    public static func >> (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { call(host_right_shift, lhs, rhs) }
}

// MARK: - The free functions as methods

extension MLXArray {

    public func abs(stream: StreamOrDevice = .default) -> MLXArray { MLX.abs(self, stream: stream) }

    public func sqrt(stream: StreamOrDevice = .default) -> MLXArray { MLX.sqrt(self, stream: stream) }

    public func square(stream: StreamOrDevice = .default) -> MLXArray { call(host_square, self, stream) }

    public func arrayEqual(
        _ other: some ScalarOrArray, equalNAN: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.arrayEqual(self, other, equalNAN: equalNAN, stream: stream)
    }

    public func logSumExp(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.reduce(host_logsumexp, self, [axis.int32], keepDims, stream)
    }

    public func logSumExp(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.reduce(host_logsumexp, self, nil, keepDims, stream)
    }

    public func max(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.reduce(host_max, self, [axis.int32], keepDims, stream)
    }

    public func max(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.reduce(host_max, self, nil, keepDims, stream)
    }

    public func mean(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.reduce(host_mean, self, [axis.int32], keepDims, stream)
    }

    public func mean(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.reduce(host_mean, self, nil, keepDims, stream)
    }

    public func sum(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.reduce(host_sum, self, [axis.int32], keepDims, stream)
    }

    public func sum(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.reduce(host_sum, self, nil, keepDims, stream)
    }

    public func argMax(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLXArray(host_argmax(ctx, HostOptionalInt(axis), keepDims, stream.ctx))
    }

    public func argMax(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLXArray(host_argmax(ctx, HostOptionalInt(nil), keepDims, stream.ctx))
    }

    public func reshaped(_ newShape: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray {
        call(host_reshape_list, self, newShape.asInt32, stream)
    }

    public func flattened(start: Int = 0, end: Int = -1, stream: StreamOrDevice = .default) -> MLXArray {
        call(host_flatten, self, start, end, stream)
    }

    public func squeezed(axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
        call(host_squeeze_list, self, [axis.int32], stream)
    }

    public func expandedDimensions(axes: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray {
        call(host_expand_dims_list, self, axes.asInt32, stream)
    }

    public func expandedDimensions(axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
        call(host_expand_dims_list, self, [axis.int32], stream)
    }

    public func transposed(axes: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray {
        call(host_transpose_list, self, axes.asInt32, stream)
    }

    public func transposed(_ axes: Int..., stream: StreamOrDevice = .default) -> MLXArray {
        transposed(axes: axes, stream: stream)
    }

    public func transposed(stream: StreamOrDevice = .default) -> MLXArray { call(host_transpose, self, stream) }

    // swift-format-ignore: AlwaysUseLowerCamelCase
    public var T: MLXArray { transposed() }

    public func swappedAxes(_ axis1: Int, _ axis2: Int, stream: StreamOrDevice = .default) -> MLXArray {
        call(host_swapaxes, self, axis1, axis2, stream)
    }

    public func split(parts: Int, axis: Int = 0, stream: StreamOrDevice = .default) -> [MLXArray] {
        arrays(consuming: host_split_parts(ctx, parts.int32, axis.int32, stream.ctx))
    }

    public func view(dtype: DType, stream: StreamOrDevice = .default) -> MLXArray {
        MLXArray(host_view(ctx, dtype.code, stream.ctx))
    }

    public func take(_ indices: MLXArray, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
        withExtendedLifetime(indices) { MLXArray(host_take_axis(ctx, indices.ctx, axis.int32, stream.ctx)) }
    }

    public func matmul(_ other: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.matmul(self, other, stream: stream)
    }
}
