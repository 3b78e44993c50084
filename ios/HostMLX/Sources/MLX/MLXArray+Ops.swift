infix operator ** : BitwiseShiftPrecedence
infix operator .&& : LogicalConjunctionPrecedence
infix operator .|| : LogicalDisjunctionPrecedence

// A scalar operand takes the array's type, see ``ScalarOrArray``. Three forms of each operator, because one on any two
// operands would be ambiguous with Swift's own.

extension MLXArray {

    // MARK: Arithmetic

    public static func + (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.add(lhs, rhs) }
    public static func + (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.add(lhs, rhs) }
    public static func + (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.add(lhs, rhs) }
    public static func += (lhs: inout MLXArray, rhs: MLXArray) { lhs._updateInternal(lhs + rhs) }
    public static func += (lhs: inout MLXArray, rhs: some ScalarOrArray) { lhs._updateInternal(lhs + rhs) }

    public static func - (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.subtract(lhs, rhs) }
    public static func - (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.subtract(lhs, rhs) }
    public static func - (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.subtract(lhs, rhs) }
    public static func -= (lhs: inout MLXArray, rhs: MLXArray) { lhs._updateInternal(lhs - rhs) }
    public static func -= (lhs: inout MLXArray, rhs: some ScalarOrArray) { lhs._updateInternal(lhs - rhs) }

    public static func * (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.multiply(lhs, rhs) }
    public static func * (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.multiply(lhs, rhs) }
    public static func * (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.multiply(lhs, rhs) }
    public static func *= (lhs: inout MLXArray, rhs: MLXArray) { lhs._updateInternal(lhs * rhs) }
    public static func *= (lhs: inout MLXArray, rhs: some ScalarOrArray) { lhs._updateInternal(lhs * rhs) }

    public static func / (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.divide(lhs, rhs) }
    public static func / (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.divide(lhs, rhs) }
    public static func / (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.divide(lhs, rhs) }
    public static func /= (lhs: inout MLXArray, rhs: MLXArray) { lhs._updateInternal(lhs / rhs) }
    public static func /= (lhs: inout MLXArray, rhs: some ScalarOrArray) { lhs._updateInternal(lhs / rhs) }

    public static func % (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.remainder(lhs, rhs) }
    public static func % (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.remainder(lhs, rhs) }
    public static func % (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.remainder(lhs, rhs) }

    public static func ** (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.pow(lhs, rhs) }
    public static func ** (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.pow(lhs, rhs) }
    public static func ** (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.pow(lhs, rhs) }

    public static prefix func - (lhs: MLXArray) -> MLXArray { MLX.negative(lhs) }

    // MARK: Comparison and logic

    public static func .== (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.equal(lhs, rhs) }
    public static func .== (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.equal(lhs, rhs) }

    public static func .!= (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.notEqual(lhs, rhs) }
    public static func .!= (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.notEqual(lhs, rhs) }

    public static func .< (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.less(lhs, rhs) }
    public static func .< (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.less(lhs, rhs) }

    public static func .<= (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.lessEqual(lhs, rhs) }
    public static func .<= (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.lessEqual(lhs, rhs) }

    public static func .> (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.greater(lhs, rhs) }
    public static func .> (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.greater(lhs, rhs) }

    public static func .>= (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.greaterEqual(lhs, rhs) }
    public static func .>= (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.greaterEqual(lhs, rhs) }

    public static func .&& (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.logicalAnd(lhs, rhs) }
    public static func .|| (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.logicalOr(lhs, rhs) }
    public static prefix func .! (lhs: MLXArray) -> MLXArray { MLX.logicalNot(lhs) }

    // MARK: Bits

    public static func & (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.bitwiseAnd(lhs, rhs) }
    public static func & (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.bitwiseAnd(lhs, rhs) }
    public static func & (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.bitwiseAnd(lhs, rhs) }

    public static func | (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.bitwiseOr(lhs, rhs) }
    public static func | (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.bitwiseOr(lhs, rhs) }
    public static func | (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.bitwiseOr(lhs, rhs) }

    public static func ^ (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.bitwiseXOr(lhs, rhs) }
    public static func ^ (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.bitwiseXOr(lhs, rhs) }
    public static func ^ (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.bitwiseXOr(lhs, rhs) }

    public static func << (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.leftShift(lhs, rhs) }
    public static func << (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.leftShift(lhs, rhs) }
    public static func << (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.leftShift(lhs, rhs) }

    public static func >> (lhs: MLXArray, rhs: MLXArray) -> MLXArray { MLX.rightShift(lhs, rhs) }
    public static func >> (lhs: MLXArray, rhs: some ScalarOrArray) -> MLXArray { MLX.rightShift(lhs, rhs) }
    public static func >> (lhs: some ScalarOrArray, rhs: MLXArray) -> MLXArray { MLX.rightShift(lhs, rhs) }

    public static prefix func ~ (lhs: MLXArray) -> MLXArray { MLX.bitwiseInvert(lhs) }
}

// MARK: - The free functions as methods

extension MLXArray {

    public func abs(stream: StreamOrDevice = .default) -> MLXArray { MLX.abs(self, stream: stream) }

    public func conjugate(stream: StreamOrDevice = .default) -> MLXArray { MLX.conjugate(self, stream: stream) }

    public func cos(stream: StreamOrDevice = .default) -> MLXArray { MLX.cos(self, stream: stream) }

    public func exp(stream: StreamOrDevice = .default) -> MLXArray { MLX.exp(self, stream: stream) }

    public func floor(stream: StreamOrDevice = .default) -> MLXArray { MLX.floor(self, stream: stream) }

    public func log(stream: StreamOrDevice = .default) -> MLXArray { MLX.log(self, stream: stream) }

    public func log10(stream: StreamOrDevice = .default) -> MLXArray { MLX.log10(self, stream: stream) }

    public func log1p(stream: StreamOrDevice = .default) -> MLXArray { MLX.log1p(self, stream: stream) }

    public func log2(stream: StreamOrDevice = .default) -> MLXArray { MLX.log2(self, stream: stream) }

    public func reciprocal(stream: StreamOrDevice = .default) -> MLXArray { MLX.reciprocal(self, stream: stream) }

    public func rsqrt(stream: StreamOrDevice = .default) -> MLXArray { MLX.rsqrt(self, stream: stream) }

    public func sin(stream: StreamOrDevice = .default) -> MLXArray { MLX.sin(self, stream: stream) }

    public func sqrt(stream: StreamOrDevice = .default) -> MLXArray { MLX.sqrt(self, stream: stream) }

    public func square(stream: StreamOrDevice = .default) -> MLXArray { MLX.square(self, stream: stream) }

    public func round(decimals: Int = 0, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.round(self, decimals: decimals, stream: stream)
    }

    public func floorDivide(_ other: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.floorDivide(self, other, stream: stream)
    }

    public func pow(_ other: some ScalarOrArray, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.pow(self, other, stream: stream)
    }

    public func allClose(
        _ other: some ScalarOrArray, rtol: Double = 1e-5, atol: Double = 1e-8, equalNaN: Bool = false,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.allClose(self, other, rtol: rtol, atol: atol, equalNaN: equalNaN, stream: stream)
    }

    public func arrayEqual(
        _ other: some ScalarOrArray, equalNAN: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.arrayEqual(self, other, equalNAN: equalNAN, stream: stream)
    }

    public func all(axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.all(self, axes: axes, keepDims: keepDims, stream: stream)
    }

    public func all(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.all(self, axis: axis, keepDims: keepDims, stream: stream)
    }

    public func all(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.all(self, keepDims: keepDims, stream: stream)
    }

    public func any(axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.any(self, axes: axes, keepDims: keepDims, stream: stream)
    }

    public func any(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.any(self, axis: axis, keepDims: keepDims, stream: stream)
    }

    public func any(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.any(self, keepDims: keepDims, stream: stream)
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

    public func min(axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.min(self, axes: axes, keepDims: keepDims, stream: stream)
    }

    public func min(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.min(self, axis: axis, keepDims: keepDims, stream: stream)
    }

    public func min(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.min(self, keepDims: keepDims, stream: stream)
    }

    public func product(axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default)
        -> MLXArray
    { MLX.product(self, axes: axes, keepDims: keepDims, stream: stream) }

    public func product(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.product(self, axis: axis, keepDims: keepDims, stream: stream)
    }

    public func product(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.product(self, keepDims: keepDims, stream: stream)
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

    public func variance(
        axes: some Collection<Int>, keepDims: Bool = false, ddof: Int = 0, stream: StreamOrDevice = .default
    ) -> MLXArray { MLX.variance(self, axes: axes, keepDims: keepDims, ddof: ddof, stream: stream) }

    public func variance(axis: Int, keepDims: Bool = false, ddof: Int = 0, stream: StreamOrDevice = .default)
        -> MLXArray
    { MLX.variance(self, axis: axis, keepDims: keepDims, ddof: ddof, stream: stream) }

    public func variance(keepDims: Bool = false, ddof: Int = 0, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.variance(self, keepDims: keepDims, ddof: ddof, stream: stream)
    }

    public func argMax(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.argMax(self, axis: axis, keepDims: keepDims, stream: stream)
    }

    public func argMax(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.argMax(self, keepDims: keepDims, stream: stream)
    }

    public func argMin(axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.argMin(self, axis: axis, keepDims: keepDims, stream: stream)
    }

    public func argMin(keepDims: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.argMin(self, keepDims: keepDims, stream: stream)
    }

    public func cummax(axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default)
        -> MLXArray
    { MLX.cummax(self, axis: axis, reverse: reverse, inclusive: inclusive, stream: stream) }

    public func cummax(reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.cummax(self, reverse: reverse, inclusive: inclusive, stream: stream)
    }

    public func cummin(axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default)
        -> MLXArray
    { MLX.cummin(self, axis: axis, reverse: reverse, inclusive: inclusive, stream: stream) }

    public func cummin(reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.cummin(self, reverse: reverse, inclusive: inclusive, stream: stream)
    }

    public func cumprod(axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default)
        -> MLXArray
    { MLX.cumprod(self, axis: axis, reverse: reverse, inclusive: inclusive, stream: stream) }

    public func cumprod(reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.cumprod(self, reverse: reverse, inclusive: inclusive, stream: stream)
    }

    public func cumsum(axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default)
        -> MLXArray
    { MLX.cumsum(self, axis: axis, reverse: reverse, inclusive: inclusive, stream: stream) }

    public func cumsum(reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.cumsum(self, reverse: reverse, inclusive: inclusive, stream: stream)
    }

    public func logCumsumExp(
        axis: Int, reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default
    ) -> MLXArray { MLX.logCumsumExp(self, axis: axis, reverse: reverse, inclusive: inclusive, stream: stream) }

    public func logCumsumExp(reverse: Bool = false, inclusive: Bool = true, stream: StreamOrDevice = .default)
        -> MLXArray
    { MLX.logCumsumExp(self, reverse: reverse, inclusive: inclusive, stream: stream) }

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

    public func movedAxis(source: Int, destination: Int, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.movedAxis(self, source: source, destination: destination, stream: stream)
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

    public func contiguous(allowColMajor: Bool = false, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.contiguous(self, allowColMajor: allowColMajor, stream: stream)
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
