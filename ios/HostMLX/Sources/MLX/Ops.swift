import CHostMLX

// MARK: - Element by element, one operand

public func abs(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_abs, array, stream) }

public func acos(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_arccos, array, stream) }

public func acosh(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_arccosh, array, stream)
}

public func asin(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_arcsin, array, stream) }

public func asinh(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_arcsinh, array, stream)
}

public func atan(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_arctan, array, stream) }

public func atanh(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_arctanh, array, stream)
}

public func bitwiseInvert(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_bitwise_invert, array, stream)
}

public func ceil(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_ceil, array, stream) }

public func conjugate(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_conjugate, array, stream)
}

public func cos(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_cos, array, stream) }

public func cosh(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_cosh, array, stream) }

public func degrees(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_degrees, array, stream)
}

public func erf(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_erf, array, stream) }

public func erfInverse(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_erfinv, array, stream)
}

public func exp(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_exp, array, stream) }

public func expm1(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_expm1, array, stream) }

public func floor(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_floor, array, stream) }

public func isFinite(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_isfinite, array, stream)
}

public func isInf(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_isinf, array, stream) }

public func isNaN(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_isnan, array, stream) }

public func isNegInf(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_isneginf, array, stream)
}

public func isPosInf(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_isposinf, array, stream)
}

public func log(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_log, array, stream) }

public func log10(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_log10, array, stream) }

public func log1p(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_log1p, array, stream) }

public func log2(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_log2, array, stream) }

public func logicalNot(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_logical_not, array, stream)
}

public func negative(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_negative, array, stream)
}

public func radians(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_radians, array, stream)
}

public func reciprocal(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_reciprocal, array, stream)
}

public func rsqrt(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_rsqrt, array, stream) }

public func sigmoid(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_sigmoid, array, stream)
}

public func sign(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_sign, array, stream) }

public func sin(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_sin, array, stream) }

public func sinh(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_sinh, array, stream) }

public func sqrt(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_sqrt, array, stream) }

public func square(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_square, array, stream)
}

public func stopGradient(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_stop_gradient, array, stream)
}

public func tan(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_tan, array, stream) }

public func tanh(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_tanh, array, stream) }

/// Rounds half to even.
public func round(_ array: MLXArray, decimals: Int = 0, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_round_1, array, decimals, stream)
}

// MARK: - Element by element, two operands

public func add(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_add, a, b, stream)
}

public func bitwiseAnd(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray
{ call(host_bitwise_and, a, b, stream) }

public func bitwiseOr(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_bitwise_or, a, b, stream)
}

public func bitwiseXOr(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray
{ call(host_bitwise_xor, a, b, stream) }

public func divide(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_divide, a, b, stream)
}

public func equal(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_equal, a, b, stream)
}

public func greater(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_greater, a, b, stream)
}

public func greaterEqual(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default)
    -> MLXArray
{ call(host_greater_equal, a, b, stream) }

public func leftShift(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_left_shift, a, b, stream)
}

public func less(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_less, a, b, stream)
}

public func lessEqual(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_less_equal, a, b, stream)
}

public func logAddExp(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_logaddexp, a, b, stream)
}

public func logicalAnd(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray
{ call(host_logical_and, a, b, stream) }

public func logicalOr(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_logical_or, a, b, stream)
}

public func maximum(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_maximum, a, b, stream)
}

public func minimum(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_minimum, a, b, stream)
}

public func multiply(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_multiply, a, b, stream)
}

public func notEqual(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_not_equal, a, b, stream)
}

public func remainder(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_remainder, a, b, stream)
}

public func rightShift(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray
{ call(host_right_shift, a, b, stream) }

public func subtract(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_subtract, a, b, stream)
}

public func atan2(_ a: MLXArray, _ b: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_arctan2, a, b, stream)
}

public func floorDivide(_ array: MLXArray, _ other: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_floor_divide, array, other, stream)
}

public func pow(_ array: MLXArray, _ other: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_power, array, other, stream)
}

public func pow(_ array: MLXArray, _ other: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_power, array, other, stream)
}

public func pow(_ array: some ScalarOrArray, _ other: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_power, array, other, stream)
}

/// `a` where `condition` holds, `b` elsewhere.
public func which(
    _ condition: MLXArray, _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray {
    let (a, b) = toArrays(a, b)
    return withExtendedLifetime((condition, a, b)) {
        MLXArray(host_where(condition.ctx, a.ctx, b.ctx, stream.ctx))
    }
}

/// `a` where `condition` holds, `b` elsewhere.
public func `where`(
    _ condition: MLXArray, _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray {
    which(condition, a, b, stream: stream)
}

private func clip(_ array: MLXArray, _ min: MLXArray?, _ max: MLXArray?, _ stream: StreamOrDevice) -> MLXArray {
    withExtendedLifetime((array, min, max)) {
        MLXArray(host_clip(array.ctx, min?.ctx, max?.ctx, stream.ctx))
    }
}

public func clip(_ array: MLXArray, min: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    clip(array, min.asMLXArray(dtype: array.dtype), nil, stream)
}

public func clip(
    _ array: MLXArray, min: some ScalarOrArray, max: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray {
    clip(array, min.asMLXArray(dtype: array.dtype), max.asMLXArray(dtype: array.dtype), stream)
}

public func clip(_ array: MLXArray, max: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    clip(array, nil, max.asMLXArray(dtype: array.dtype), stream)
}

public func allClose(
    _ array: MLXArray, _ other: some ScalarOrArray, rtol: Double = 1e-5, atol: Double = 1e-8, equalNaN: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray {
    let other = other.asMLXArray(dtype: array.dtype)
    return withExtendedLifetime((array, other)) {
        MLXArray(host_allclose(array.ctx, other.ctx, rtol, atol, equalNaN, stream.ctx))
    }
}

public func isClose(
    _ a: MLXArray, _ b: MLXArray, rtol: Double = 1e-5, atol: Double = 1e-8, equalNaN: Bool = false,
    stream: StreamOrDevice = .default
) -> MLXArray {
    withExtendedLifetime((a, b)) { MLXArray(host_isclose(a.ctx, b.ctx, rtol, atol, equalNaN, stream.ctx)) }
}

/// Whether shapes and elements agree, a truth value.
public func arrayEqual(
    _ array: MLXArray, _ other: some ScalarOrArray, equalNAN: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray {
    let other = other.asMLXArray(dtype: array.dtype)
    return withExtendedLifetime((array, other)) {
        MLXArray(host_array_equal(array.ctx, other.ctx, equalNAN, stream.ctx))
    }
}

// MARK: - Reductions

public func all(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { reduce(host_all, array, axes.asInt32, keepDims, stream) }

public func all(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_all, array, [axis.int32], keepDims, stream)
}

public func all(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_all, array, nil, keepDims, stream)
}

public func any(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { reduce(host_any, array, axes.asInt32, keepDims, stream) }

public func any(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_any, array, [axis.int32], keepDims, stream)
}

public func any(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_any, array, nil, keepDims, stream)
}

public func logSumExp(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { reduce(host_logsumexp, array, axes.asInt32, keepDims, stream) }

public func logSumExp(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default)
    -> MLXArray
{ reduce(host_logsumexp, array, [axis.int32], keepDims, stream) }

public func logSumExp(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_logsumexp, array, nil, keepDims, stream)
}

public func max(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { reduce(host_max, array, axes.asInt32, keepDims, stream) }

public func max(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_max, array, [axis.int32], keepDims, stream)
}

public func max(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_max, array, nil, keepDims, stream)
}

public func mean(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { reduce(host_mean, array, axes.asInt32, keepDims, stream) }

public func mean(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_mean, array, [axis.int32], keepDims, stream)
}

public func mean(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_mean, array, nil, keepDims, stream)
}

public func min(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { reduce(host_min, array, axes.asInt32, keepDims, stream) }

public func min(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_min, array, [axis.int32], keepDims, stream)
}

public func min(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_min, array, nil, keepDims, stream)
}

public func product(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { reduce(host_prod, array, axes.asInt32, keepDims, stream) }

public func product(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray
{ reduce(host_prod, array, [axis.int32], keepDims, stream) }

public func product(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_prod, array, nil, keepDims, stream)
}

public func sum(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { reduce(host_sum, array, axes.asInt32, keepDims, stream) }

public func sum(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_sum, array, [axis.int32], keepDims, stream)
}

public func sum(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_sum, array, nil, keepDims, stream)
}

public func std(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false, ddof: Int = 0,
    stream: StreamOrDevice = .default
) -> MLXArray { reduce({ host_std($0, $1, $2, $3, ddof.int32, $4) }, array, axes.asInt32, keepDims, stream) }

public func std(_ array: MLXArray, axis: Int, keepDims: Bool = false, ddof: Int = 0, stream: StreamOrDevice = .default)
    -> MLXArray
{ reduce({ host_std($0, $1, $2, $3, ddof.int32, $4) }, array, [axis.int32], keepDims, stream) }

public func std(_ array: MLXArray, keepDims: Bool = false, ddof: Int = 0, stream: StreamOrDevice = .default) -> MLXArray
{ reduce({ host_std($0, $1, $2, $3, ddof.int32, $4) }, array, nil, keepDims, stream) }

public func variance(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false, ddof: Int = 0,
    stream: StreamOrDevice = .default
) -> MLXArray { reduce({ host_var($0, $1, $2, $3, ddof.int32, $4) }, array, axes.asInt32, keepDims, stream) }

public func variance(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, ddof: Int = 0, stream: StreamOrDevice = .default
) -> MLXArray { reduce({ host_var($0, $1, $2, $3, ddof.int32, $4) }, array, [axis.int32], keepDims, stream) }

public func variance(_ array: MLXArray, keepDims: Bool = false, ddof: Int = 0, stream: StreamOrDevice = .default)
    -> MLXArray
{ reduce({ host_var($0, $1, $2, $3, ddof.int32, $4) }, array, nil, keepDims, stream) }

public func argMax(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray
{ withExtendedLifetime(array) { MLXArray(host_argmax(array.ctx, HostOptionalInt(axis), keepDims, stream.ctx)) } }

public func argMax(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    withExtendedLifetime(array) { MLXArray(host_argmax(array.ctx, HostOptionalInt(nil), keepDims, stream.ctx)) }
}

public func argMin(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray
{ withExtendedLifetime(array) { MLXArray(host_argmin(array.ctx, HostOptionalInt(axis), keepDims, stream.ctx)) } }

public func argMin(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    withExtendedLifetime(array) { MLXArray(host_argmin(array.ctx, HostOptionalInt(nil), keepDims, stream.ctx)) }
}

/// With `precise`, half-width input is summed in `float32`.
public func softmax(
    _ array: MLXArray, axes: some Collection<Int>, precise: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { reduce(host_softmax, array, axes.asInt32, precise, stream) }

public func softmax(_ array: MLXArray, axis: Int, precise: Bool = false, stream: StreamOrDevice = .default) -> MLXArray
{ reduce(host_softmax, array, [axis.int32], precise, stream) }

public func softmax(_ array: MLXArray, precise: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_softmax, array, nil, precise, stream)
}

// MARK: - Cumulative operations

public func cummax(
    _ array: MLXArray, axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default
) -> MLXArray { scan(host_cummax, array, axis, reverse, inclusive, stream) }

public func cummax(_ array: MLXArray, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default)
    -> MLXArray
{ scan(host_cummax, array, nil, reverse, inclusive, stream) }

public func cummin(
    _ array: MLXArray, axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default
) -> MLXArray { scan(host_cummin, array, axis, reverse, inclusive, stream) }

public func cummin(_ array: MLXArray, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default)
    -> MLXArray
{ scan(host_cummin, array, nil, reverse, inclusive, stream) }

public func cumprod(
    _ array: MLXArray, axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default
) -> MLXArray { scan(host_cumprod, array, axis, reverse, inclusive, stream) }

public func cumprod(_ array: MLXArray, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default)
    -> MLXArray
{ scan(host_cumprod, array, nil, reverse, inclusive, stream) }

public func cumsum(
    _ array: MLXArray, axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default
) -> MLXArray { scan(host_cumsum, array, axis, reverse, inclusive, stream) }

public func cumsum(_ array: MLXArray, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default)
    -> MLXArray
{ scan(host_cumsum, array, nil, reverse, inclusive, stream) }

public func logCumsumExp(
    _ array: MLXArray, axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default
) -> MLXArray { scan(host_logcumsumexp, array, axis, reverse, inclusive, stream) }

public func logCumsumExp(
    _ array: MLXArray, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default
) -> MLXArray { scan(host_logcumsumexp, array, nil, reverse, inclusive, stream) }

// MARK: - Sorting

public func argSort(_ array: MLXArray, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_argsort_1, array, axis, stream)
}

public func argSort(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_argsort, array, stream)
}

public func sorted(_ array: MLXArray, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_sort_1, array, axis, stream)
}

public func sorted(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_sort, array, stream) }

public func argPartition(_ array: MLXArray, kth: Int, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_argpartition_2, array, kth, axis, stream)
}

public func argPartition(_ array: MLXArray, kth: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_argpartition_1, array, kth, stream)
}

public func partitioned(_ array: MLXArray, kth: Int, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_partition_2, array, kth, axis, stream)
}

public func partitioned(_ array: MLXArray, kth: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_partition_1, array, kth, stream)
}

/// The `k` largest, in no particular order.
public func top(_ array: MLXArray, k: Int, axis: Int = -1, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_topk_2, array, k, axis, stream)
}

public func top(_ array: MLXArray, k: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_topk_1, array, k, stream)
}

// MARK: - Shapes

/// One length may be -1.
public func reshaped(_ array: MLXArray, _ newShape: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray
{ call(host_reshape_list, array, newShape.asInt32, stream) }

public func reshaped(_ array: MLXArray, _ newShape: Int..., stream: StreamOrDevice = .default) -> MLXArray {
    reshaped(array, newShape, stream: stream)
}

/// Merges the axes from `start` to `end`.
public func flattened(_ array: MLXArray, start: Int = 0, end: Int = -1, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_flatten_2, array, start, end, stream)
}

/// Drops axes of length 1.
public func squeezed(_ array: MLXArray, axes: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_squeeze_list, array, axes.asInt32, stream)
}

public func squeezed(_ array: MLXArray, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_squeeze_list, array, [axis.int32], stream)
}

public func squeezed(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_squeeze, array, stream)
}

/// Adds axes of length 1.
public func expandedDimensions(_ array: MLXArray, axes: some Collection<Int>, stream: StreamOrDevice = .default)
    -> MLXArray
{ call(host_expand_dims_list, array, axes.asInt32, stream) }

public func expandedDimensions(_ array: MLXArray, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_expand_dims_list, array, [axis.int32], stream)
}

public func transposed(_ array: MLXArray, axes: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_transpose_list, array, axes.asInt32, stream)
}

public func transposed(_ array: MLXArray, _ axes: Int..., stream: StreamOrDevice = .default) -> MLXArray {
    transposed(array, axes: axes, stream: stream)
}

public func transposed(_ array: MLXArray, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
    transposed(array, axes: [axis], stream: stream)
}

/// Reverses the axes.
public func transposed(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_transpose, array, stream)
}

// swift-format-ignore: AlwaysUseLowerCamelCase
public func T(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { transposed(array, stream: stream) }

public func swappedAxes(_ array: MLXArray, _ axis1: Int, _ axis2: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_swapaxes_2, array, axis1, axis2, stream)
}

public func movedAxis(_ array: MLXArray, source: Int, destination: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_moveaxis_2, array, source, destination, stream)
}

public func broadcast(
    _ array: MLXArray, to shape: some Collection<Int>, stream: StreamOrDevice = .default
) -> MLXArray {
    call(host_broadcast_to_list, array, shape.asInt32, stream)
}

/// The bytes as another type; the last axis grows or shrinks with the elements' size.
public func view(_ array: MLXArray, dtype: DType, stream: StreamOrDevice = .default) -> MLXArray {
    withExtendedLifetime(array) { MLXArray(host_view(array.ctx, dtype.code, stream.ctx)) }
}

/// The array in row-major (or column-major) order in memory.
public func contiguous(_ a: MLXArray, allowColMajor: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    withExtendedLifetime(a) { MLXArray(host_contiguous(a.ctx, allowColMajor, stream.ctx)) }
}

public func concatenated(
    _ arrays: some Collection<MLXArray>, axis: Int = 0, stream: StreamOrDevice = .default
) -> MLXArray {
    withVector(arrays) { MLXArray(host_concatenate($0, axis.int32, stream.ctx)) }
}

/// Joins along a new axis.
public func stacked(
    _ arrays: some Collection<MLXArray>, axis: Int = 0, stream: StreamOrDevice = .default
) -> MLXArray {
    withVector(arrays) { MLXArray(host_stack($0, axis.int32, stream.ctx)) }
}

public func split(
    _ array: MLXArray, parts: Int, axis: Int = 0, stream: StreamOrDevice = .default
) -> [MLXArray] {
    withExtendedLifetime(array) {
        arrays(consuming: host_split_parts(array.ctx, parts.int32, axis.int32, stream.ctx))
    }
}

/// Two halves.
public func split(_ array: MLXArray, axis: Int = 0, stream: StreamOrDevice = .default) -> (MLXArray, MLXArray) {
    let halves = split(array, parts: 2, axis: axis, stream: stream)
    return (halves[0], halves[1])
}

/// The pieces before, between and after `indices`.
public func split(
    _ array: MLXArray, indices: some Collection<Int>, axis: Int = 0, stream: StreamOrDevice = .default
) -> [MLXArray] {
    withExtendedLifetime(array) {
        arrays(consuming: host_split_at(array.ctx, indices.asInt32, indices.count, axis.int32, stream.ctx))
    }
}

public func tiled(
    _ array: MLXArray, repetitions: some Collection<Int>, stream: StreamOrDevice = .default
) -> MLXArray {
    call(host_tile_list, array, repetitions.asInt32, stream)
}

public func tiled(_ array: MLXArray, repetitions: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_tile_list, array, [repetitions.int32], stream)
}

/// Zeros above diagonal `k`.
public func tril(_ array: MLXArray, k: Int = 0, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_tril_1, array, k, stream)
}

/// Zeros below diagonal `k`.
public func triu(_ array: MLXArray, k: Int = 0, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_triu_1, array, k, stream)
}

/// `input`, computed only after the dependencies.
public func depends(input: MLXArray, dependencies: [MLXArray]) -> MLXArray {
    depends(inputs: [input], dependencies: dependencies)[0]
}

/// The inputs, computed only after the dependencies.
public func depends(inputs: [MLXArray], dependencies: [MLXArray]) -> [MLXArray] {
    withVector(inputs) { inputs in
        withVector(dependencies) { arrays(consuming: host_depends(inputs, $0)) }
    }
}

// MARK: - Elements by index

public func take(
    _ array: MLXArray, _ indices: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray {
    withExtendedLifetime((array, indices)) {
        MLXArray(host_take_axis(array.ctx, indices.ctx, axis.int32, stream.ctx))
    }
}

/// From the flattened array.
public func take(_ array: MLXArray, _ indices: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_take, array.reshaped([-1], stream: stream), indices, stream)
}

public func takeAlong(
    _ array: MLXArray, _ indices: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray {
    withExtendedLifetime((array, indices)) {
        MLXArray(host_take_along_axis(array.ctx, indices.ctx, axis.int32, stream.ctx))
    }
}

/// From the flattened array.
public func takeAlong(_ array: MLXArray, _ indices: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    takeAlong(array.reshaped([-1], stream: stream), indices, axis: 0, stream: stream)
}

public func putAlong(
    _ array: MLXArray, _ indices: MLXArray, values: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray {
    withExtendedLifetime((array, indices, values)) {
        MLXArray(host_put_along_axis(array.ctx, indices.ctx, values.ctx, axis.int32, stream.ctx))
    }
}

/// Into the flattened array.
public func putAlong(
    _ array: MLXArray, _ indices: MLXArray, values: MLXArray, stream: StreamOrDevice = .default
) -> MLXArray {
    putAlong(array.reshaped([-1], stream: stream), indices, values: values, axis: 0, stream: stream)
        .reshaped(array.shape, stream: stream)
}

// MARK: - Products

/// [..., m, k] by [..., k, n].
public func matmul(_ a: MLXArray, _ b: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_matmul, a, b, stream)
}

/// beta c + alpha a b.
public func addMM(
    _ c: some ScalarOrArray, _ a: some ScalarOrArray, _ b: some ScalarOrArray, alpha: Float = 1.0, beta: Float = 1.0,
    stream: StreamOrDevice = .default
) -> MLXArray {
    let (a, b) = toArrays(a, b)
    let (_, c) = toArrays(a, c)
    return withExtendedLifetime((a, b, c)) {
        MLXArray(host_addmm(c.ctx, a.ctx, b.ctx, alpha, beta, stream.ctx))
    }
}

public func inner(_ a: MLXArray, _ b: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_inner, a, b, stream)
}

public func outer(_ a: MLXArray, _ b: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_outer, a, b, stream)
}

public func kron(_ a: MLXArray, _ b: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_kron, a, b, stream)
}

// MARK: - Quantization

public enum QuantizationMode: String, Codable, Sendable {
    case affine
    case mxfp4
    case mxfp8
    case nvfp4
}

/// [rows, n] to `wq` [rows, n * bits / 32] of `uint32`, `scales` and `biases` [rows, n / groupSize].
public func quantized(
    _ w: MLXArray, groupSize: Int? = nil, bits: Int? = nil, mode: QuantizationMode = .affine,
    globalScale: MLXArray? = nil, stream: StreamOrDevice = .default
) -> (wq: MLXArray, scales: MLXArray, biases: MLXArray?) {
    let parts = withExtendedLifetime((w, globalScale)) {
        arrays(
            consuming: host_quantize(
                w.ctx, HostOptionalInt(groupSize), HostOptionalInt(bits), mode.rawValue, globalScale?.ctx,
                stream.ctx))
    }
    return (parts[0], parts[1], parts.count > 2 ? parts[2] : nil)
}

/// The inverse of ``quantized(_:groupSize:bits:mode:globalScale:stream:)``.
public func dequantized(
    _ w: MLXArray, scales: MLXArray, biases: MLXArray?, groupSize: Int? = nil, bits: Int? = nil,
    mode: QuantizationMode = .affine, globalScale: MLXArray? = nil, dtype: DType? = nil,
    stream: StreamOrDevice = .default
) -> MLXArray {
    withExtendedLifetime((w, scales, biases, globalScale)) {
        MLXArray(
            host_dequantize(
                w.ctx, scales.ctx, biases?.ctx, HostOptionalInt(groupSize), HostOptionalInt(bits), mode.rawValue,
                globalScale?.ctx, HostOptionalInt(dtype.map { Int($0.code) }), stream.ctx))
    }
}

/// x wᵀ (or x w) with a quantized `w`.
public func quantizedMM(
    _ x: MLXArray, _ w: MLXArray, scales: MLXArray, biases: MLXArray?, transpose: Bool = true, groupSize: Int? = nil,
    bits: Int? = nil, mode: QuantizationMode = .affine, stream: StreamOrDevice = .default
) -> MLXArray {
    withExtendedLifetime((x, w, scales, biases)) {
        MLXArray(
            host_quantized_matmul(
                x.ctx, w.ctx, scales.ctx, biases?.ctx, transpose, HostOptionalInt(groupSize), HostOptionalInt(bits),
                mode.rawValue, stream.ctx))
    }
}
