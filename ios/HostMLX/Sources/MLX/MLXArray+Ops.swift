infix operator ** : BitwiseShiftPrecedence
infix operator .&& : LogicalConjunctionPrecedence
infix operator .|| : LogicalDisjunctionPrecedence

// A scalar operand gets the array's type if possible. Most binary operators have three forms, because a single generic form would be ambiguous with
// Swift's own operators.

extension MLXArray {

    // MARK: Arithmetic

    public static func + (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.add(lhs, rhs) }
    public static func + (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.add(lhs, rhs) }
    public static func + (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.add(lhs, rhs) }

    public static func - (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.subtract(lhs, rhs) }
    public static func - (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.subtract(lhs, rhs) }
    public static func - (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.subtract(lhs, rhs) }

    public static func * (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.multiply(lhs, rhs) }
    public static func * (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.multiply(lhs, rhs) }
    public static func * (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.multiply(lhs, rhs) }

    public static func / (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.divide(lhs, rhs) }
    public static func / (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.divide(lhs, rhs) }
    public static func / (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.divide(lhs, rhs) }

    public static func % (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.remainder(lhs, rhs) }
    public static func % (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.remainder(lhs, rhs) }
    public static func % (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.remainder(lhs, rhs) }

    public static prefix func - (lhs: MLXArray) -> MLXArray { MLX.negative(lhs) }

    // MARK: Comparison and logic

    public static func .== (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.equal(lhs, rhs) }
    public static func .== (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.equal(lhs, rhs) }

    public static func .< (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.less(lhs, rhs) }
    public static func .< (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.less(lhs, rhs) }

    public static func .> (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.greater(lhs, rhs) }
    public static func .> (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.greater(lhs, rhs) }

    public static func .>= (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.greaterEqual(lhs, rhs) }
    public static func .>= (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.greaterEqual(lhs, rhs) }

    // MARK: Bits

    public static func & (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.bitwiseAnd(lhs, rhs) }
    public static func & (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.bitwiseAnd(lhs, rhs) }
    public static func & (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.bitwiseAnd(lhs, rhs) }

    public static func >> (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.rightShift(lhs, rhs) }
    public static func >> (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.rightShift(lhs, rhs) }
    public static func >> (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.rightShift(lhs, rhs) }
}

// MARK: - The free functions as methods

extension MLXArray {

    public func abs(stream: StreamOrDevice = .default) -> MLXArray { MLX.abs(self, stream: stream) }

    public func sqrt(stream: StreamOrDevice = .default) -> MLXArray { MLX.sqrt(self, stream: stream) }

    public func square(stream: StreamOrDevice = .default) -> MLXArray { MLX.square(self, stream: stream) }

    public func arrayEqual(
        _ other: some ScalarOrArray, equalNAN: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.arrayEqual(self, other, equalNAN: equalNAN, stream: stream)
    }

    public func logSumExp(axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default)
        -> MLXArray
    { MLX.logSumExp(self, axes: axes, keepDims: keepDims, stream: stream) }

    public func logSumExp(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.logSumExp(self, axis: axis, keepDims: keepDims, stream: stream)
    }

    public func logSumExp(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.logSumExp(self, keepDims: keepDims, stream: stream)
    }

    public func max(axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.max(self, axes: axes, keepDims: keepDims, stream: stream)
    }

    public func max(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.max(self, axis: axis, keepDims: keepDims, stream: stream)
    }

    public func max(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.max(self, keepDims: keepDims, stream: stream)
    }

    public func mean(axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray
    { MLX.mean(self, axes: axes, keepDims: keepDims, stream: stream) }

    public func mean(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.mean(self, axis: axis, keepDims: keepDims, stream: stream)
    }

    public func mean(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.mean(self, keepDims: keepDims, stream: stream)
    }

    public func sum(axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.sum(self, axes: axes, keepDims: keepDims, stream: stream)
    }

    public func sum(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.sum(self, axis: axis, keepDims: keepDims, stream: stream)
    }

    public func sum(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.sum(self, keepDims: keepDims, stream: stream)
    }

    public func argMax(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.argMax(self, axis: axis, keepDims: keepDims, stream: stream)
    }

    public func argMax(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.argMax(self, keepDims: keepDims, stream: stream)
    }

    public func reshaped(_ newShape: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.reshaped(self, newShape, stream: stream)
    }

    public func reshaped(_ newShape: Int..., stream: StreamOrDevice = .default) -> MLXArray {
        MLX.reshaped(self, newShape, stream: stream)
    }

    public func flattened(start: Int = 0, end: Int = -1, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.flattened(self, start: start, end: end, stream: stream)
    }

    public func squeezed(axes: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.squeezed(self, axes: axes, stream: stream)
    }

    public func squeezed(axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.squeezed(self, axis: axis, stream: stream)
    }

    public func squeezed(stream: StreamOrDevice = .default) -> MLXArray { MLX.squeezed(self, stream: stream) }

    public func expandedDimensions(axes: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.expandedDimensions(self, axes: axes, stream: stream)
    }

    public func expandedDimensions(axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.expandedDimensions(self, axis: axis, stream: stream)
    }

    public func transposed(axes: some Collection<Int>, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.transposed(self, axes: axes, stream: stream)
    }

    public func transposed(_ axes: Int..., stream: StreamOrDevice = .default) -> MLXArray {
        MLX.transposed(self, axes: axes, stream: stream)
    }

    public func transposed(axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.transposed(self, axis: axis, stream: stream)
    }

    public func transposed(stream: StreamOrDevice = .default) -> MLXArray { MLX.transposed(self, stream: stream) }

    // swift-format-ignore: AlwaysUseLowerCamelCase
    public var T: MLXArray { transposed() }

    public func swappedAxes(_ axis1: Int, _ axis2: Int, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.swappedAxes(self, axis1, axis2, stream: stream)
    }

    public func split(parts: Int, axis: Int = 0, stream: StreamOrDevice = .default) -> [MLXArray] {
        MLX.split(self, parts: parts, axis: axis, stream: stream)
    }

    public func split(axis: Int = 0, stream: StreamOrDevice = .default) -> (MLXArray, MLXArray) {
        MLX.split(self, axis: axis, stream: stream)
    }

    public func split(
        indices: some Collection<Int>, axis: Int = 0, stream: StreamOrDevice = .default
    ) -> [MLXArray] {
        MLX.split(self, indices: indices, axis: axis, stream: stream)
    }

    public func view(dtype: DType, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.view(self, dtype: dtype, stream: stream)
    }

    public func take(_ indices: MLXArray, axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.take(self, indices, axis: axis, stream: stream)
    }

    public func take(_ indices: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.take(self, indices, stream: stream)
    }

    public func matmul(_ other: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.matmul(self, other, stream: stream)
    }
}
