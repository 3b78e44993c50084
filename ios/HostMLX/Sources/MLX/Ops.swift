import CHostMLX

// MARK: - Element by element, one operand

public func abs(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_abs, array, stream) }

public func exp(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_exp, array, stream) }

public func log(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_log, array, stream) }

public func rsqrt(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_rsqrt, array, stream) }

public func sigmoid(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_sigmoid, array, stream)
}

public func sqrt(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_sqrt, array, stream) }

public func tanh(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray { call(host_tanh, array, stream) }

// MARK: - Element by element, two operands

public func logAddExp(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_logaddexp, a, b, stream)
}

public func logicalAnd(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray
{ call(host_logical_and, a, b, stream) }

public func maximum(_ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_maximum, a, b, stream)
}

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

public func arrayEqual(
    _ array: MLXArray, _ other: some ScalarOrArray, equalNAN: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray {
    let other = other.asMLXArray(dtype: array.dtype)
    return withExtendedLifetime((array, other)) {
        MLXArray(host_array_equal(array.ctx, other.ctx, equalNAN, stream.ctx))
    }
}

// MARK: - Reductions

public func all(_ array: MLXArray, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
    reduce(host_all, array, nil, keepDims, stream)
}

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
    call(host_argsort, array, axis, stream)
}

public func sorted(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    call(host_sort, array, stream)
}

// MARK: - Shapes

public func broadcast(
    _ array: MLXArray, to shape: some Collection<Int>, stream: StreamOrDevice = .default
) -> MLXArray {
    call(host_broadcast_to_list, array, shape.asInt32, stream)
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

/// Returns arrays equal to the inputs. The evaluation of each also evaluates the dependencies.
public func depends(inputs: [MLXArray], dependencies: [MLXArray]) -> [MLXArray] {
    withVector(inputs) { inputs in
        withVector(dependencies) { arrays(consuming: host_depends(inputs, $0)) }
    }
}

// MARK: - Elements by index

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
