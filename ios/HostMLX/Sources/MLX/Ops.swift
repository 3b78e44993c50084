import CHostMLX

// MARK: - Element by element, one operand

public func abs(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_abs, array, stream) }

public func exp(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_exp, array, stream) }

public func log(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_log, array, stream) }

public func negative(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_negative, array, stream)
}

public func rsqrt(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_rsqrt, array, stream) }

public func sigmoid(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_sigmoid, array, stream)
}

public func sqrt(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_sqrt, array, stream) }

public func square(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_square, array, stream)
}

public func tanh(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_tanh, array, stream) }

// MARK: - Element by element, two operands

public func add(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_add, a, b, stream)
}

public func bitwiseAnd(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray
{ call(host_bitwise_and, a, b, stream) }

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

public func less(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_less, a, b, stream)
}

public func logAddExp(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_logaddexp, a, b, stream)
}

public func logicalAnd(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray
{ call(host_logical_and, a, b, stream) }

public func maximum(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_maximum, a, b, stream)
}

public func multiply(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_multiply, a, b, stream)
}

public func remainder(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_remainder, a, b, stream)
}

public func rightShift(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray
{ call(host_right_shift, a, b, stream) }

public func subtract(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_subtract, a, b, stream)
}

public func which(
    _ condition: MLXArray, _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray {
    let (a, b) = toArrays(a, b)
    return withExtendedLifetime((condition, a, b)) {
        MLXArray(host_where(condition.ctx, a.ctx, b.ctx, stream.ctx))
    }
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

public func sum(
    _ array: MLXArray, axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { reduce(host_sum, array, axes.asInt32, keepDims, stream) }

public func sum(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_sum, array, [axis.int32], keepDims, stream)
}

public func sum(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_sum, array, nil, keepDims, stream)
}

public func argMax(_ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray
{ withExtendedLifetime(array) { MLXArray(host_argmax(array.ctx, HostOptionalInt(axis), keepDims, stream.ctx)) } }

public func argMax(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    withExtendedLifetime(array) { MLXArray(host_argmax(array.ctx, HostOptionalInt(nil), keepDims, stream.ctx)) }
}

/// Returns the softmax over `axes`. With `precise`, 16-bit input is summed in `float32`.
public func softmax(
    _ array: MLXArray, axes: some Collection<Int>, precise: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray { reduce(host_softmax, array, axes.asInt32, precise, stream) }

public func softmax(_ array: MLXArray, axis: Int, precise: Bool = false, stream: StreamOrDevice = .default) -> MLXArray
{ reduce(host_softmax, array, [axis.int32], precise, stream) }

public func softmax(_ array: MLXArray, precise: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_softmax, array, nil, precise, stream)
}

// MARK: - Cumulative operations

public func cumsum(
    _ array: MLXArray, axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default
) -> MLXArray { scan(host_cumsum, array, axis, reverse, inclusive, stream) }

public func cumsum(_ array: MLXArray, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default)
    -> MLXArray
{ scan(host_cumsum, array, nil, reverse, inclusive, stream) }

// MARK: - Sorting

public func argSort(_ array: MLXArray, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_argsort_1, array, axis, stream)
}

public func sorted(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_sort, array, stream)
}

// MARK: - Shapes

/// Changes the shape. One length may be -1, which stands for the length that the array's size and the other lengths imply.
public func reshaped(_ array: MLXArray, _ newShape: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray
{ call(host_reshape_list, array, newShape.asInt32, stream) }

public func reshaped(_ array: MLXArray, _ newShape: Int..., stream: StreamOrDevice = .default) -> MLXArray {
    reshaped(array, newShape, stream: stream)
}

/// Merges the axes from `start` to `end`, inclusive.
public func flattened(_ array: MLXArray, start: Int = 0, end: Int = -1, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_flatten_2, array, start, end, stream)
}

public func squeezed(_ array: MLXArray, axes: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_squeeze_list, array, axes.asInt32, stream)
}

public func squeezed(_ array: MLXArray, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_squeeze_list, array, [axis.int32], stream)
}

public func squeezed(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_squeeze, array, stream)
}

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

public func transposed(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_transpose, array, stream)
}

public func swappedAxes(_ array: MLXArray, _ axis1: Int, _ axis2: Int, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_swapaxes_2, array, axis1, axis2, stream)
}

public func broadcast(
    _ array: MLXArray, to shape: some Collection<Int>, stream: StreamOrDevice = .default
) -> MLXArray {
    call(host_broadcast_to_list, array, shape.asInt32, stream)
}

/// Reinterprets the bytes as another type. The length of the last axis changes with the size of an element.
public func view(_ array: MLXArray, dtype: DType, stream: StreamOrDevice = .default) -> MLXArray {
    withExtendedLifetime(array) { MLXArray(host_view(array.ctx, dtype.code, stream.ctx)) }
}

/// Returns an array that is stored in row-major order or, if allowed, in column-major order.
public func contiguous(_ a: MLXArray, allowColMajor: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    withExtendedLifetime(a) { MLXArray(host_contiguous(a.ctx, allowColMajor, stream.ctx)) }
}

public func concatenated(
    _ arrays: some Collection<MLXArray>, axis: Int = 0, stream: StreamOrDevice = .default
) -> MLXArray {
    withVector(arrays) { MLXArray(host_concatenate($0, axis.int32, stream.ctx)) }
}

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

public func split(_ array: MLXArray, axis: Int = 0, stream: StreamOrDevice = .default) -> (MLXArray, MLXArray) {
    let halves = split(array, parts: 2, axis: axis, stream: stream)
    return (halves[0], halves[1])
}

public func split(
    _ array: MLXArray, indices: some Collection<Int>, axis: Int = 0, stream: StreamOrDevice = .default
) -> [MLXArray] {
    withExtendedLifetime(array) {
        arrays(consuming: host_split_at(array.ctx, indices.asInt32, indices.count, axis.int32, stream.ctx))
    }
}

/// Returns an array equal to `input`. Its evaluation also evaluates the dependencies.
public func depends(input: MLXArray, dependencies: [MLXArray]) -> MLXArray {
    depends(inputs: [input], dependencies: dependencies)[0]
}

/// Returns arrays equal to the inputs. The evaluation of each also evaluates the dependencies.
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

/// Takes elements from the flattened array.
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

/// Takes elements from the flattened array.
public func takeAlong(_ array: MLXArray, _ indices: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    takeAlong(array.reshaped([-1], stream: stream), indices, axis: 0, stream: stream)
}

// MARK: - Products

public func matmul(_ a: MLXArray, _ b: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_matmul, a, b, stream)
}

/// Returns `beta` c + `alpha` a b, where a b is a matrix product.
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

// MARK: - Quantization

public enum QuantizationMode: String, Codable, Sendable {
    case affine
    case mxfp4
    case mxfp8
    case nvfp4
}

/// Quantizes `w` [rows, n]. In affine mode, the results are `wq` [rows, n * bits / 32] of `uint32`, and `scales` and `biases` [rows, n / groupSize].
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

/// Returns x wᵀ or, without `transpose`, x w, for a quantized `w`.
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
