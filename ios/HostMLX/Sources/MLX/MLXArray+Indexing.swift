import CHostMLX

// MARK: - Indices

public enum MLXArrayIndexOperation: CustomStringConvertible {
    case ellipsis
    case newAxis
    case index(Int32)
    case slice(MLXSlice)
    case array(MLXArray)

    public var description: String {
        switch self {
        case .ellipsis: ".ellipsis"
        case .newAxis: ".newAxis"
        case .index(let index): "\(index)"
        case .slice(let slice): "\(slice)"
        case .array(let array): "\(array.shape)(\(array.dtype))"
        }
    }

    fileprivate var isNewAxis: Bool {
        if case .newAxis = self { true } else { false }
    }

    fileprivate var isEllipsis: Bool {
        if case .ellipsis = self { true } else { false }
    }

    fileprivate var isIndex: Bool {
        if case .index = self { true } else { false }
    }

    fileprivate var isArray: Bool {
        if case .array = self { true } else { false }
    }

    fileprivate var isArrayOrIndex: Bool { isArray || isIndex }
}

public protocol MLXArrayIndex {
    var mlxArrayIndexOperation: MLXArrayIndexOperation { get }
}

extension Int: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .index(int32) }
}

extension MLXArray: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .array(self) }
}

public struct MLXEllipsisIndex: MLXArrayIndex, Sendable {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .ellipsis }
}

extension MLXArrayIndex where Self == MLXEllipsisIndex {
    /// A full range for each axis that no other index selects.
    public static var ellipsis: Self { Self() }
}

public struct MLXNewAxisIndex: MLXArrayIndex, Sendable {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .newAxis }
}

extension MLXArrayIndex where Self == MLXNewAxisIndex {
    public static var newAxis: Self { Self() }
}

/// A range. Negative bounds count from the end.
public struct MLXSlice: Equatable, CustomStringConvertible, Sendable {
    private let _start: Int32?
    private let _end: Int32?

    init(start: Int32? = nil, end: Int32? = nil) { (_start, _end) = (start, end) }

    func start(_ size: Int32) -> Int32 { _start ?? 0 }

    func absoluteStart(_ size: Int32) -> Int32 {
        let start = start(size)
        return start < 0 ? start + size : start
    }

    func end(_ size: Int32) -> Int32 { _end ?? size }

    func absoluteEnd(_ size: Int32) -> Int32 {
        let end = end(size)
        return end < 0 ? end + size : end
    }

    public var description: String {
        "\(_start?.description ?? "") ..< \(_end?.description ?? "")"
    }
}

extension MLXSlice: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .slice(self) }
}

extension Range<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(.init(start: lowerBound.int32, end: upperBound.int32))
    }
}

extension ClosedRange<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(.init(start: lowerBound.int32, end: upperBound.int32 + 1))
    }
}

extension PartialRangeUpTo<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(.init(start: 0, end: upperBound.int32))
    }
}

extension PartialRangeThrough<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(.init(start: 0, end: upperBound.int32 + 1))
    }
}

extension PartialRangeFrom<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(.init(start: lowerBound.int32))
    }
}

// MARK: - Subscripts

extension MLXArray {

    /// The part of the array that the indices select, similar to NumPy. A part can be replaced only if the indices are ranges or ``ellipsis``.
    public subscript(indices: any MLXArrayIndex..., stream stream: StreamOrDevice = .default) -> MLXArray {
        get { self[indices, stream: stream] }
        set { update(indices.map { $0.mlxArrayIndexOperation }, newValue, stream) }
    }

    private func update(
        _ operations: [MLXArrayIndexOperation], _ elements: MLXArray, _ stream: StreamOrDevice
    ) {
        var start = shape.map { _ in Int32(0) }
        var end = shape.asInt32
        let strides = shape.map { _ in Int32(1) }
        for (axis, operation) in Self.expandingEllipsis(operations, shape: shape).enumerated() {
            guard case .slice(let slice) = operation else { fatalError("only ranges name what is replaced") }
            let size = dim(axis).int32
            (start[axis], end[axis]) = (slice.start(size), slice.end(size))
        }
        _updateInternal(
            withExtendedLifetime(elements) {
                MLXArray(host_slice_update(ctx, $0.ctx, start, end, strides, stream.ctx))
            })
    }

    public subscript(indices: [any MLXArrayIndex], stream stream: StreamOrDevice = .default) -> MLXArray {
        let operations = indices.map { $0.mlxArrayIndexOperation }
        guard operations.count == 1 else { return operations.isEmpty ? self : part(operations, stream) }
        return switch operations[0] {
        case .index(let index): take(resolve(index: index, axis: 0), axis: 0, stream: stream)
        case .array(let array): take(array, axis: 0, stream: stream)
        case .newAxis: expandedDimensions(axis: 0, stream: stream)
        case .slice, .ellipsis: part(operations, stream)
        }
    }

    /// Returns the index as an array. A negative index counts from the end.
    private func resolve(index: Int32, axis: Int) -> MLXArray {
        MLXArray(index < 0 ? index + dim(axis).int32 : index)
    }

    /// Returns a part of the array, with the same primitives in the same order as mlx-swift. If there are arrays of indices, a gather takes the
    /// indices up to the last array or integer. Then a slice follows, and then a reshape that drops and adds axes.
    ///
    /// Unlike in NumPy, new axes are ignored if no integer is dropped and there are not more indices than axes. As in mlx-swift, the gather and the
    /// reshape run on the default stream.
    private func part(_ operations: [MLXArrayIndexOperation], _ stream: StreamOrDevice) -> MLXArray {
        var (array, sizes) = (self, shape)
        let operations = Self.expandingEllipsis(operations, shape: sizes)
        var remaining = operations
        let hasArrays = operations.contains { $0.isArray }

        if hasArrays, let last = operations.lastIndex(where: { $0.isArrayOrIndex }) {
            let (before, after) = (operations[...last], operations[(last + 1)...])
            let gathersFirst = Self.areApart(operations)
            let dimensions: Int
            (array, dimensions) = gather(before.filter { !$0.isNewAxis }, first: gathersFirst)
            sizes = array.shape

            // The slice after the gather takes full ranges of the gathered axes.
            let gathered = Array(repeating: MLXArrayIndexOperation.slice(MLXSlice()), count: dimensions)
            let others =
                (gathersFirst ? before.filter { !$0.isArrayOrIndex } : Array(before.prefix { !$0.isArrayOrIndex }))
                .map { $0.isNewAxis ? $0 : .slice(MLXSlice()) }
            remaining = (gathersFirst ? gathered + others : others + gathered) + after
            if remaining.isEmpty { return array }
        }

        var start = [Int32](repeating: 0, count: sizes.count)
        var end = sizes.asInt32
        let strides = [Int32](repeating: 1, count: sizes.count)
        var axis = 0
        for operation in remaining where !operation.isNewAxis {
            let size = end[axis]
            if case .slice(let slice) = operation {
                (start[axis], end[axis]) = (slice.start(size), slice.end(size))
            } else if case .index(let index) = operation {
                start[axis] = index < 0 ? index + size : index
                end[axis] = start[axis] + 1
            }
            axis += 1
        }
        array = withExtendedLifetime(array) { MLXArray(host_slice($0.ctx, start, end, strides, stream.ctx)) }

        guard remaining.count > sizes.count || remaining.contains(where: { $0.isIndex }) else { return array }
        var shape: [Int] = []
        axis = 0
        for operation in remaining {
            if operation.isNewAxis {
                shape.append(1)
                continue
            }
            if !operation.isIndex {
                shape.append(array.dim(axis))
            }
            axis += 1
        }
        return array.reshaped(shape + array.shape[axis...])
    }

    /// Gathers the elements at the indices of the first axes. Returns the result and the number of dimensions of the indices. The axes of the result
    /// are `[indices, slices, other axes]` or, unless `first`, `[slices, indices, other axes]`.
    private func gather(_ operations: [MLXArrayIndexOperation], first: Bool) -> (MLXArray, Int) {
        let shape = shape.asInt32
        var indices: [MLXArray] = []
        var slices: [Int] = []  // the axes of slices
        var dimensions = 0
        for (axis, operation) in operations.enumerated() {
            switch operation {
            case .index(let index):
                indices.append(resolve(index: index, axis: axis))
            case .slice(let slice):
                slices.append(axis)
                let size = shape[axis]
                indices.append(MLXArray(Array(slice.absoluteStart(size)..<slice.absoluteEnd(size))))
            case .array(let array):
                dimensions = Swift.max(dimensions, array.ndim)
                indices.append(array)
            case .ellipsis, .newAxis:
                fatalError("unexpected item: \(operation) in gather")
            }
        }

        let ones = Array(repeating: 1, count: dimensions + slices.count)
        func place(_ axis: Int, at position: Int) {
            var shape = ones
            shape[position] = indices[axis].dim(0)
            indices[axis] = indices[axis].reshaped(shape)
        }
        if !first {
            // As in mlx-swift, the loop covers the first `slices.count` operations, even if they are not the slices.
            for axis in slices.indices {
                place(axis, at: axis)
            }
        } else if !slices.isEmpty {
            for axis in indices.indices {
                if let position = slices.firstIndex(of: axis) {
                    place(axis, at: dimensions + position)
                } else {
                    indices[axis] = indices[axis].reshaped(indices[axis].shape + slices.map { _ in 1 })
                }
            }
        }

        var sizes = shape
        for axis in operations.indices {
            sizes[axis] = 1
        }
        let gathered = withVector(indices) {
            MLXArray(
                host_gather(
                    ctx, $0, operations.indices.asInt32, operations.count, sizes, StreamOrDevice.default.ctx))
        }
        var result = gathered.shape
        result.removeSubrange(ones.count..<ones.count + operations.count)
        return (gathered.reshaped(result), dimensions)
    }

    private static func areApart(_ operations: [MLXArrayIndexOperation]) -> Bool {
        let positions = operations.indices.filter { operations[$0].isArrayOrIndex }
        return positions.last.map { $0 - positions[0] >= positions.count } ?? false
    }

    private static func expandingEllipsis(
        _ operations: [MLXArrayIndexOperation], shape: [Int]
    ) -> [MLXArrayIndexOperation] {
        guard let position = operations.firstIndex(where: { $0.isEllipsis }) else { return operations }
        let (before, after) = (operations[..<position], operations[(position + 1)...])
        if after.contains(where: { $0.isEllipsis }) {
            fatalError("multiple .ellipsis not allowed: \(operations)")
        }
        func axes(_ operations: ArraySlice<MLXArrayIndexOperation>) -> Int { operations.count { !$0.isNewAxis } }
        let full = shape[axes(before)..<(shape.count - axes(after))].map {
            MLXArrayIndexOperation.slice(MLXSlice(start: 0, end: $0.int32))
        }
        return before + full + after
    }
}
