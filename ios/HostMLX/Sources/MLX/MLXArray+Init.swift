import CHostMLX
import Foundation

/// Returns `shape`, whose product must be `count`, or by default `[count]`.
private func dims(_ shape: (some Collection<Int>)?, count: Int) -> [Int32] {
    guard let shape else { return [count.int32] }
    let total = shape.reduce(1, *)
    precondition(total == count, "shape \(shape) total \(total) != \(count) (actual)")
    return shape.asInt32
}

private func newArray(_ bytes: UnsafeRawPointer?, _ dims: [Int32], _ dtype: DType) -> HostArray? {
    initError()
    return host_array_new(bytes, dims, dims.count, dtype.code)
}

private final class Finalizer {
    let run: () -> Void

    init(_ run: @escaping () -> Void) {
        self.run = run
    }
}

extension MLXArray {

    /// Creates an array that uses the caller's memory until it calls `finalizer`.
    ///
    /// On a GPU, the memory is used in place if its address and length are multiples of the page size. On the CPU, it is used in place only under the
    /// conditions of `host_array_adopt` (CHostMLX.cpp). Otherwise it is copied.
    public convenience init(
        rawPointer: UnsafeMutableRawPointer, _ shape: (some Collection<Int>)? = [Int]?.none, dtype: DType,
        finalizer: @escaping () -> Void
    ) {
        initError()
        let dims = shape?.asInt32 ?? []
        let context = Unmanaged.passRetained(Finalizer(finalizer)).toOpaque()
        self.init(
            host_array_adopt(rawPointer, dims, dims.count, dtype.code, context) { context in
                guard let context else { return }
                Unmanaged<Finalizer>.fromOpaque(context).takeRetainedValue().run()
            })
    }

    // MARK: Scalars

    public convenience init(_ value: Int32) {
        self.init(scalar: value, .int32)
    }

    /// Creates an `int32` scalar.
    public convenience init(_ value: Int) {
        precondition(
            Int32(exactly: value) != nil,
            "\(value) is out of range for Int32 -- please use MLXArray(int64: Int) if you need 64 bits.")
        self.init(Int32(value))
    }

    public convenience init(int64 value: Int) {
        self.init(scalar: value, .int64)
    }

    public convenience init(_ value: Bool) {
        self.init(scalar: value, .bool)
    }

    public convenience init(_ value: Float) {
        self.init(scalar: value, .float32)
    }

    /// Creates a scalar of the value's type. A `Double` within the range of `Float` becomes a `float32`.
    public convenience init<T: HasDType>(_ value: T) {
        if let double = value as? Double, Swift.abs(double) < Double(Float.greatestFiniteMagnitude) {
            self.init(Float(double))
        } else {
            self.init(scalar: value, T.dtype)
        }
    }

    public convenience init(bfloat16 value: Float32) {
        let array = MLXArray(value)
        self.init(
            withExtendedLifetime(array) { host_astype(array.ctx, DType.bfloat16.code, StreamOrDevice.default.ctx) })
    }

    public convenience init(real: Float, imaginary: Float) {
        self.init(scalar: (real, imaginary), .complex64)
    }

    /// Creates a scalar of type `dtype`. The value must fit into `dtype`.
    ///
    /// If `dtype` is `float64`, a finite value of another type than `Double` becomes a `float32`, as in mlx-swift.
    public convenience init<T: HasDType>(_ value: T, dtype: DType) {
        if T.dtype == dtype {
            self.init(scalar: value, dtype)
        } else if let value = value as? any BinaryFloatingPoint {
            self.init(converting: value, dtype: dtype)
        } else if let value = value as? any BinaryInteger {
            self.init(converting: value, dtype: dtype)
        } else {
            fatalError("unable to coerce \(T.dtype) to \(dtype)")
        }
    }

    private convenience init(converting value: some BinaryFloatingPoint, dtype: DType) {
        switch dtype {
        case .bool: self.init(!value.isZero)
        case .uint8: self.init(UInt8(value))
        case .uint16: self.init(UInt16(value))
        case .uint32: self.init(UInt32(value))
        case .uint64: self.init(UInt64(value))
        case .int8: self.init(Int8(value))
        case .int16: self.init(Int16(value))
        case .int32: self.init(Int32(value))
        case .int64: self.init(Int64(value))
        case .float16: self.init(float16: Float(value))
        case .float32: self.init(Float(value))
        case .bfloat16: self.init(bfloat16: Float(value))
        case .complex64: self.init(real: Float(value), imaginary: 0)
        case .float64: self.init(Double(value))  // a float32, as in mlx-swift
        }
    }

    private convenience init(converting value: some BinaryInteger, dtype: DType) {
        switch dtype {
        case .bool: self.init(value != 0)
        case .uint8: self.init(UInt8(value))
        case .uint16: self.init(UInt16(value))
        case .uint32: self.init(UInt32(value))
        case .uint64: self.init(UInt64(value))
        case .int8: self.init(Int8(value))
        case .int16: self.init(Int16(value))
        case .int32: self.init(Int32(value))
        case .int64: self.init(Int64(value))
        case .float16: self.init(float16: Float(value))
        case .float32: self.init(Float(value))
        case .bfloat16: self.init(bfloat16: Float(value))
        case .complex64: self.init(real: Float(value), imaginary: 0)
        case .float64: self.init(Double(value))  // a float32, as in mlx-swift
        }
    }

    /// Creates a float16 scalar. This is not supported on x86-64.
    private convenience init(float16 value: Float) {
        #if arch(x86_64)
            fatalError("dtype \(DType.float16) not supported")
        #else
            self.init(Float16(value))
        #endif
    }

    private convenience init<T>(scalar value: T, _ dtype: DType) {
        self.init(withUnsafeBytes(of: value) { newArray($0.baseAddress, [], dtype) })
    }

    // MARK: Lists

    public convenience init<T: HasDType>(_ value: [T], _ shape: (some Collection<Int>)? = [Int]?.none) {
        self.init(value.withUnsafeBytes { newArray($0.baseAddress, dims(shape, count: value.count), T.dtype) })
    }

    /// Creates an `int32` array.
    public convenience init(_ value: [Int], _ shape: (some Collection<Int>)? = [Int]?.none) {
        precondition(
            value.allSatisfy { Int32(exactly: $0) != nil },
            "\(value) is out of range for Int32 -- please use MLXArray(int64: [Int]]) if you need 64 bits.")
        self.init(value.asInt32, shape)
    }

    public convenience init<S: Sequence>(
        _ sequence: S, _ shape: (some Collection<Int>)? = [Int]?.none
    ) where S.Element: HasDType {
        if let integers = Array(sequence) as? [Int] {
            self.init(integers, shape)
        } else {
            self.init(Array(sequence), shape)
        }
    }

    public convenience init<T: HasDType>(
        _ ptr: UnsafeBufferPointer<T>, _ shape: (some Collection<Int>)? = [Int]?.none
    ) {
        guard let bytes = ptr.baseAddress else { fatalError("a buffer without an address") }
        self.init(newArray(bytes, dims(shape, count: ptr.count), T.dtype))
    }

    public convenience init(_ data: Data, _ shape: (some Collection<Int>)? = [Int]?.none, dtype: DType) {
        precondition(data.count % dtype.size == 0)
        self.init(data.withUnsafeBytes { newArray($0.baseAddress, dims(shape, count: $0.count / dtype.size), dtype) })
    }

}
