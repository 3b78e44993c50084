import CHostMLX
import Foundation

public final class MLXArray {

    /// The C++ array, or nil after a failed operation.
    var ctx: HostArray?

    init(_ ctx: HostArray?) {
        initError()
        self.ctx = ctx
    }

    /// A placeholder without an array. Operations on it fail.
    public static var mlxNone: MLXArray { .init(nil) }

    deinit {
        host_array_free(ctx)
    }

    public var size: Int { host_array_size(ctx) }

    public var count: Int { dim(0) }

    public var nbytes: Int { host_array_nbytes(ctx) }

    public var ndim: Int { host_array_ndim(ctx) }

    public var dtype: DType { DType(code: host_array_dtype(ctx)) }

    public var shape: [Int] {
        let ndim = ndim
        guard ndim > 0, let dims = host_array_shape(ctx) else { return [] }
        return (0..<ndim).map { Int(dims[$0]) }
    }

    var strides: [Int] {
        guard ndim > 0, let strides = host_array_strides(ctx) else { return [] }
        return (0..<ndim).map { Int(strides[$0]) }
    }

    /// Returns the length of a dimension. A negative index counts from the end.
    public func dim(_ dim: Int) -> Int {
        Int(host_array_dim(ctx, resolve(axis: dim, ndim: ndim).int32))
    }

    public func asType(_ type: DType, stream: StreamOrDevice = .default) -> MLXArray {
        guard type != self.dtype else { return self }
        return MLXArray(host_astype(ctx, type.code, stream.ctx))
    }

    public func asType(_ type: (some HasDType).Type, stream: StreamOrDevice = .default) -> MLXArray {
        asType(type.dtype, stream: stream)
    }

    public func eval() {
        evalLock.withLock { host_array_eval(ctx) }
    }

    public func _updateInternal(_ array: MLXArray) {
        withExtendedLifetime(array) { host_array_assign(&ctx, array.ctx) }
    }

}

// MARK: - Contents

extension MLXArray {

    public func item<T: HasDType>() -> T {
        item(T.self)
    }

    public func item<T: HasDType>(_ type: T.Type) -> T {
        precondition(size == 1)
        eval()

        // An integer is read from any integer type without an operation. Its value must fit into `type`.
        if dtype.isInteger, let integer = type as? any (BinaryInteger & HasDType).Type {
            func convert<I: BinaryInteger>(_ type: I.Type) -> I {
                switch dtype {
                case .uint8: I(scalar(UInt8.self))
                case .uint16: I(scalar(UInt16.self))
                case .uint32: I(scalar(UInt32.self))
                case .uint64: I(scalar(UInt64.self))
                case .int8: I(scalar(Int8.self))
                case .int16: I(scalar(Int16.self))
                case .int32: I(scalar(Int32.self))
                default: I(scalar(Int64.self))
                }
            }
            if let value = convert(integer) as? T {
                return value
            }
        }
        guard type.dtype == dtype else { return asType(type).item(type) }
        return scalar(type)
    }

    /// Returns the first element of an evaluated array with elements of type `T`. Returns 0 if the evaluation failed, where mlx-swift would
    /// dereference a null pointer.
    private func scalar<T>(_ type: T.Type) -> T {
        guard let data = host_array_data(ctx) else {
            return withUnsafeTemporaryAllocation(of: T.self, capacity: 1) { zero in
                UnsafeMutableRawBufferPointer(zero).initializeMemory(as: UInt8.self, repeating: 0)
                return zero[0]
            }
        }
        return data.loadUnaligned(as: T.self)
    }

    public func asArray<T: HasDType>(_ type: T.Type) -> [T] {
        guard type.dtype == dtype else { return asType(type).asArray(type) }
        eval()
        return [T](unsafeUninitializedCapacity: size) { destination, count in
            copy(to: destination.baseAddress)
            count = size
        }
    }

    private func copy(to destination: UnsafeMutableRawPointer?) {
        // mlx-swift's loop over strided elements needs at least one element.
        precondition(size > 0 || strides == packedStrides, "an empty array of shape \(shape) that is not contiguous")
        host_array_copy_bytes(ctx, destination)
    }

    public enum AccessMethod {
        case copy
        /// The array's own memory if it is contiguous, which is valid as long as the array exists. Otherwise a copy.
        case noCopyIfContiguous
        /// The array's own memory with its strides, which is valid as long as the array exists.
        case noCopy
    }

    public struct MLXArrayData {
        public let data: Data
        public let shape: [Int]
        public let strides: [Int]
        public let dType: DType
    }

    public func asData(access: AccessMethod = .copy) -> MLXArrayData {
        eval()
        let strides = strides
        if access == .noCopy || (access == .noCopyIfContiguous && strides == packedStrides) {
            guard let bytes = UnsafeMutableRawPointer(mutating: host_array_data(ctx)) else {
                fatalError("an array that failed has no bytes")
            }
            let data = Data(bytesNoCopy: bytes, count: nbytes, deallocator: .none)
            return MLXArrayData(data: data, shape: shape, strides: strides, dType: dtype)
        }
        var data = Data(count: nbytes)
        data.withUnsafeMutableBytes { copy(to: $0.baseAddress) }
        return MLXArrayData(data: data, shape: shape, strides: packedStrides, dType: dtype)
    }

    private var packedStrides: [Int] {
        var stride = 1
        let reversed = shape.reversed().map { dim in
            defer { stride *= dim }
            return stride
        }
        return reversed.reversed()
    }
}

// MARK: - Protocols

extension MLXArray: CustomStringConvertible {
    public var description: String {
        guard let text = evalLock.withLock({ host_array_description(ctx) }) else {
            fatalError("an array that failed has no description")
        }
        return string(consuming: text)
    }
}

extension MLXArray: Sequence {
    public func makeIterator() -> some IteratorProtocol<MLXArray> {
        (0..<dim(0)).lazy.map { self[$0] }.makeIterator()
    }
}
