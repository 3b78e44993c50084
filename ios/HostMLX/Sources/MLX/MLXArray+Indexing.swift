import CHostMLX

// MARK: - Indices

/// One index of a subscript.
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

    fileprivate var isArray: Bool {
        if case .array = self { true } else { false }
    }
}

/// What a subscript takes: an `Int`, a range, an array of indices, ``ellipsis``, ``newAxis``, a stride.
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
    /// As many full ranges as it takes.
    public static var ellipsis: Self { Self() }
}

public struct MLXNewAxisIndex: MLXArrayIndex, Sendable {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .newAxis }
}

extension MLXArrayIndex where Self == MLXNewAxisIndex {
    /// A new axis of length 1.
    public static var newAxis: Self { Self() }
}

/// A range with a stride; negative bounds count from the end.
public struct MLXSlice: Equatable, CustomStringConvertible, Sendable {
    private let _start: Int32?
    private let _end: Int32?
    private let _stride: Int32?

    public init(start: Int32? = nil, end: Int32? = nil, stride: Int32? = nil) {
        _start = start
        _end = end
        _stride = stride
    }

    public var isFull: Bool { stride == 1 && (_start ?? 0) == 0 && _end == nil }

    public var stride: Int32 { _stride ?? 1 }

    public func start(_ size: Int32) -> Int32 { _start ?? (stride < 0 ? size - 1 : 0) }

    public func absoluteStart(_ size: Int32) -> Int32 {
        let start = start(size)
        return start < 0 ? start + size : start
    }

    public func end(_ size: Int32) -> Int32 { _end ?? (stride < 0 ? -size - 1 : size) }

    public func absoluteEnd(_ size: Int32) -> Int32 {
        let end = end(size)
        return end < 0 ? end + size : end
    }

    public var description: String {
        let range = "\(_start?.description ?? "") ..< \(_end?.description ?? "")"
        return stride == 1 ? range : "\(range) : \(stride)"
    }
}

extension MLXSlice: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .slice(self) }
}

extension MLXArrayIndex where Self == MLXSlice {
    public static func stride(from start: Int? = nil, to end: Int? = nil, by stride: Int? = nil) -> MLXSlice {
        MLXSlice(start: start?.int32, end: end?.int32, stride: stride?.int32)
    }
}

public func stride(from start: Int? = nil, to end: Int? = nil, by stride: Int? = nil) -> MLXSlice {
    MLXSlice(start: start?.int32, end: end?.int32, stride: stride?.int32)
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

    /// Reads or replaces a part of the array, as in NumPy.
    public subscript(indices: any MLXArrayIndex..., stream stream: StreamOrDevice = .default) -> MLXArray {
        get { self[indices, stream: stream] }
        set { self[indices, stream: stream] = newValue }
    }

    /// Reads or replaces a part of the array, as in NumPy.
    public subscript(indices: [any MLXArrayIndex], stream stream: StreamOrDevice = .default) -> MLXArray {
        get {
            if indices.isEmpty { return self }
            if indices.count == 1, case .index(let index) = indices[0].mlxArrayIndexOperation {
                let position = MLXArray(index < 0 ? index + dim(0).int32 : index)
                return take(position, axis: 0, stream: stream)
            }
            return Selection(of: indices, in: self, forReading: true).read(self, stream)
        }
        set {
            _updateInternal(
                Selection(of: indices, in: self, forReading: false).replace(in: self, with: newValue, stream))
        }
    }
}

/// The indices of a subscript, sorted by what has to be done: slice, gather, squeeze and expand.
///
/// With an array among them, integers are arrays of one index too. The arrays' common shape stands in the result where
/// they stood, or in front if other indices are between them.
///
/// As in mlx-swift 0.31.6, unlike NumPy: a new axis is ignored in an assignment without arrays of indices, and when
/// reading a part where no integer drops an axis and as many axes of the array have no index. And in an assignment an
/// integer beside an array does not count as one.
private struct Selection {
    /// The slice along each axis of the array; an integer's is one long.
    var start: [Int32] = []
    var end: [Int32] = []
    var strides: [Int32] = []

    /// Arrays of indices, and their axes.
    var indices: [MLXArray] = []
    var indexedAxes: [Int] = []

    /// Axes of the slice that integers drop, and places in the result where new ones are added.
    var droppedAxes: [Int] = []
    var newAxes: [Int] = []

    /// Axes of the slice, and new ones, before the gathered ones in the result.
    var gatheredAxis = 0
    var newAxesBefore = 0

    init(of indices: [any MLXArrayIndex], in array: MLXArray, forReading: Bool) {
        let shape = array.shape
        let operations = Self.expandingEllipsis(indices.map { $0.mlxArrayIndexOperation }, ndim: shape.count)
        let hasArrays = operations.contains { $0.isArray }
        start = shape.map { _ in 0 }
        end = shape.asInt32
        strides = shape.map { _ in 1 }

        var axis = 0  // of the array
        var slices = 0  // so far
        var gathers = false  // an array of indices has come
        var interrupted = false  // and then something else
        var scattered = false  // and then another one
        func addArray() {
            if !gathers { (gatheredAxis, newAxesBefore) = (slices, newAxes.count) }
            scattered = scattered || interrupted
            gathers = true
        }
        for operation in operations {
            switch operation {
            case .ellipsis:
                fatalError("multiple .ellipsis not allowed")
            case .newAxis:
                newAxes.append(slices + newAxes.count)
                interrupted = interrupted || gathers || !forReading
                continue
            case .slice(let slice):
                let size = shape[axis].int32
                start[axis] = slice.start(size)
                end[axis] = slice.end(size)
                strides[axis] = slice.stride
                slices += 1
                interrupted = (forReading && interrupted) || gathers
            case .index(let index):
                let index = index < 0 ? index + shape[axis].int32 : index
                if hasArrays {
                    self.indices.append(MLXArray(index))
                    indexedAxes.append(axis)
                    if forReading { addArray() }
                } else {
                    start[axis] = index
                    end[axis] = index + 1
                    droppedAxes.append(axis)
                }
            case .array(let array):
                self.indices.append(array)
                indexedAxes.append(axis)
                addArray()
            }
            axis += 1
        }
        if scattered { (gatheredAxis, newAxesBefore) = (0, 0) }

        if forReading {
            let withoutIndex = shape.count - axis
            if operations.count > 1 && droppedAxes.isEmpty && newAxes.count <= withoutIndex { newAxes = [] }
        } else if !hasArrays {
            newAxes = []
        }
    }

    /// The operations with full ranges in place of an ellipsis.
    private static func expandingEllipsis(
        _ operations: [MLXArrayIndexOperation], ndim: Int
    ) -> [MLXArrayIndexOperation] {
        guard let position = operations.firstIndex(where: { $0.isEllipsis }) else { return operations }
        let consumed = operations.filter { !$0.isNewAxis }.count - 1
        let full = Array(repeating: MLXArrayIndexOperation.slice(MLXSlice()), count: Swift.max(0, ndim - consumed))
        return operations[..<position] + full + operations[(position + 1)...]
    }

    func read(_ array: MLXArray, _ stream: StreamOrDevice) -> MLXArray {
        var result = slice(array, stream)
        if !indices.isEmpty {
            result = gather(result, stream)
        }
        if !droppedAxes.isEmpty {
            result = result.squeezed(axes: droppedAxes, stream: stream)
        }
        if !newAxes.isEmpty {
            result = result.expandedDimensions(axes: newAxesInResult, stream: stream)
        }
        return result
    }

    func replace(in array: MLXArray, with value: MLXArray, _ stream: StreamOrDevice) -> MLXArray {
        // Bring the value to the shape of what `read` gives, then undo its steps.
        let part = read(array, stream)  // never computed
        var update = value.asType(array.dtype, stream: stream)
        let extra = update.ndim - part.ndim
        if extra > 0 {
            update = update.squeezed(axes: Array(0..<extra), stream: stream)
        }
        update = MLX.broadcast(update, to: part.shape, stream: stream)
        if !newAxes.isEmpty {
            update = update.squeezed(axes: newAxesInResult, stream: stream)
        }
        if !droppedAxes.isEmpty {
            update = update.expandedDimensions(axes: droppedAxes, stream: stream)
        }
        if !indices.isEmpty {
            update = scatter(update, into: slice(array, stream), stream)
        }
        return withExtendedLifetime((array, update)) {
            MLXArray(host_slice_update(array.ctx, update.ctx, start, end, strides, stream.ctx))
        }
    }

    private func slice(_ array: MLXArray, _ stream: StreamOrDevice) -> MLXArray {
        withExtendedLifetime(array) { MLXArray(host_slice(array.ctx, start, end, strides, stream.ctx)) }
    }

    /// The new axes' places where gathered axes come before them or not.
    private var newAxesInResult: [Int] {
        newAxes.enumerated().map { $0.offset < newAxesBefore ? $0.element : $0.element + gatheredDimensions }
    }

    private var gatheredDimensions: Int { indices.map { $0.ndim }.max() ?? 0 }

    private func gather(_ array: MLXArray, _ stream: StreamOrDevice) -> MLXArray {
        var sizes = array.shape.asInt32
        for axis in indexedAxes {
            sizes[axis] = 1
        }
        // [index shape, slice shape], where the indexed axes are 1 long
        let gathered = withExtendedLifetime(array) {
            withVector(indices) {
                MLXArray(
                    host_gather(array.ctx, $0, indexedAxes.asInt32, indexedAxes.count, sizes, stream.ctx))
            }
        }
        let dimensions = gatheredDimensions
        let result = gathered.squeezed(axes: indexedAxes.map { $0 + dimensions }, stream: stream)
        if gatheredAxis == 0 { return result }
        let others = Array(dimensions..<result.ndim)
        return result.transposed(
            axes: others[..<gatheredAxis] + Array(0..<dimensions) + others[gatheredAxis...], stream: stream)
    }

    private func scatter(_ update: MLXArray, into array: MLXArray, _ stream: StreamOrDevice) -> MLXArray {
        let dimensions = gatheredDimensions
        let gatheredAxes = Array(gatheredAxis..<(gatheredAxis + dimensions))
        let others = (0..<update.ndim).filter { !gatheredAxes.contains($0) }
        let updates = update.transposed(axes: gatheredAxes + others, stream: stream)
            .expandedDimensions(axes: indexedAxes.map { $0 + dimensions }, stream: stream)
        return withExtendedLifetime((array, updates)) {
            withVector(indices) {
                MLXArray(host_scatter(array.ctx, $0, updates.ctx, indexedAxes.asInt32, stream.ctx))
            }
        }
    }
}
