import CHostMLX

public enum DType: Hashable, Sendable, CaseIterable {
    case bool
    case uint8
    case uint16
    case uint32
    case uint64
    case int8
    case int16
    case int32
    case int64
    case float16
    case float32
    case bfloat16
    case complex64
    case float64

    var code: Int32 {
        switch self {
        case .bool: 0
        case .uint8: 1
        case .uint16: 2
        case .uint32: 3
        case .uint64: 4
        case .int8: 5
        case .int16: 6
        case .int32: 7
        case .int64: 8
        case .float16: 9
        case .float32: 10
        case .float64: 11
        case .bfloat16: 12
        case .complex64: 13
        }
    }

    init(code: Int32) {
        guard Self.byCode.indices.contains(Int(code)) else { fatalError("Unsupported dtype: \(code)") }
        self = Self.byCode[Int(code)]
    }

    private static let byCode = allCases.sorted { $0.code < $1.code }

    public var isFloatingPoint: Bool {
        switch self {
        case .float16, .float32, .bfloat16, .complex64, .float64: true
        default: false
        }
    }

    public var isInteger: Bool {
        switch self {
        case .uint8, .uint16, .uint32, .uint64: true
        default: isSignedInteger
        }
    }

    public var isSignedInteger: Bool {
        switch self {
        case .int8, .int16, .int32, .int64: true
        default: false
        }
    }

    public var size: Int { host_dtype_size(code) }
}

extension DType: Codable {
    public func encode(to encoder: any Encoder) throws {
        try UInt32(code).encode(to: encoder)
    }

    public init(from decoder: any Decoder) throws {
        self.init(code: Int32(try UInt32(from: decoder)))
    }
}

// MARK: - Scalars

public protocol HasDType: ScalarOrArray {
    static var dtype: DType { get }
}

extension HasDType {
    public func asMLXArray(dtype: DType?) -> MLXArray {
        MLXArray(self, dtype: dtype ?? Self.dtype)
    }
}

extension HasDType where Self: BinaryInteger {
    /// Returns the integer as an array of type `dtype`. For `bool` or nil, the integer keeps its own type.
    fileprivate func asOperand(dtype: DType?) -> MLXArray {
        let dtype = dtype ?? Self.dtype
        return MLXArray(self, dtype: dtype == .bool ? Self.dtype : dtype)
    }
}

extension Bool: HasDType {
    public static var dtype: DType { .bool }
}

extension Int: HasDType {
    public static var dtype: DType { .int64 }

    /// Returns the operand as an array of type `dtype`. For `bool` or nil, the type is `int32`.
    public func asMLXArray(dtype: DType?) -> MLXArray {
        let dtype = dtype ?? .int32
        return MLXArray(self, dtype: dtype == .bool ? .int32 : dtype)
    }
}

extension Int8: HasDType {
    public static var dtype: DType { .int8 }
    public func asMLXArray(dtype: DType?) -> MLXArray { asOperand(dtype: dtype) }
}

extension Int16: HasDType {
    public static var dtype: DType { .int16 }
    public func asMLXArray(dtype: DType?) -> MLXArray { asOperand(dtype: dtype) }
}

extension Int32: HasDType {
    public static var dtype: DType { .int32 }
    public func asMLXArray(dtype: DType?) -> MLXArray { asOperand(dtype: dtype) }
}

extension Int64: HasDType {
    public static var dtype: DType { .int64 }
    public func asMLXArray(dtype: DType?) -> MLXArray { asOperand(dtype: dtype) }
}

extension UInt8: HasDType {
    public static var dtype: DType { .uint8 }
    public func asMLXArray(dtype: DType?) -> MLXArray { asOperand(dtype: dtype) }
}

extension UInt16: HasDType {
    public static var dtype: DType { .uint16 }
    public func asMLXArray(dtype: DType?) -> MLXArray { asOperand(dtype: dtype) }
}

extension UInt32: HasDType {
    public static var dtype: DType { .uint32 }
    public func asMLXArray(dtype: DType?) -> MLXArray { asOperand(dtype: dtype) }
}

extension UInt64: HasDType {
    public static var dtype: DType { .uint64 }
    public func asMLXArray(dtype: DType?) -> MLXArray { asOperand(dtype: dtype) }
}

extension UInt: HasDType {
    public static var dtype: DType { .uint64 }
    public func asMLXArray(dtype: DType?) -> MLXArray { asOperand(dtype: dtype) }
}

#if !arch(x86_64)
    extension Float16: HasDType {
        public static var dtype: DType { .float16 }

        public func asMLXArray(dtype: DType?) -> MLXArray {
            let dtype = dtype ?? Self.dtype
            return MLXArray(self, dtype: dtype.isFloatingPoint ? dtype : Self.dtype)
        }
    }
#endif

extension Float32: HasDType {
    public static var dtype: DType { .float32 }

    public func asMLXArray(dtype: DType?) -> MLXArray {
        let dtype = dtype ?? Self.dtype
        return MLXArray(self, dtype: dtype.isFloatingPoint ? dtype : Self.dtype)
    }
}

extension Float64: HasDType {
    public static var dtype: DType { .float64 }

    /// Returns the operand as an array. The type is `dtype` if that is a floating-point type, otherwise `float32`.
    public func asMLXArray(dtype: DType?) -> MLXArray {
        let dtype = dtype ?? .float32
        return MLXArray(self, dtype: dtype.isFloatingPoint ? dtype : .float32)
    }
}

public protocol ScalarOrArray {
    func asMLXArray(dtype: DType?) -> MLXArray
}

extension MLXArray: ScalarOrArray {
    public func asMLXArray(dtype: DType?) -> MLXArray { self }
}

extension Array: ScalarOrArray where Element: HasDType {
    public func asMLXArray(dtype: DType?) -> MLXArray {
        MLXArray(self).asType(dtype ?? Element.dtype)
    }
}

/// Returns both operands as arrays. If only one operand is an array, the other gets its type if possible.
public func toArrays(_ a: some ScalarOrArray, _ b: some ScalarOrArray) -> (MLXArray, MLXArray) {
    switch (a as? MLXArray, b as? MLXArray) {
    case (let a?, let b?): (a, b)
    case (let a?, nil): (a, b.asMLXArray(dtype: a.dtype))
    case (nil, let b?): (a.asMLXArray(dtype: b.dtype), b)
    case (nil, nil): (a.asMLXArray(dtype: nil), b.asMLXArray(dtype: nil))
    }
}
