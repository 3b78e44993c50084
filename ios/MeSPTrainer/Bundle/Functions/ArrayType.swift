import MLX

/// The element types in a bundle's files and functions. The raw values are the names in `manifest.json`.
package enum ElementType: String, Codable, CodingKeyRepresentable, Sendable {
    case bool, uint8, uint32, uint64, int32, float32, float16, bfloat16

    package var dtype: DType {
        switch self {
        case .bool: .bool
        case .uint8: .uint8
        case .uint32: .uint32
        case .uint64: .uint64
        case .int32: .int32
        case .float32: .float32
        case .float16: .float16
        case .bfloat16: .bfloat16
        }
    }
}

struct ArrayType: Equatable {
    var shape: [Int]
    let element: ElementType

    func replacing(_ dimensions: Range<Int>, with sizes: [Int]) -> ArrayType {
        var result = self
        result.shape.replaceSubrange(dimensions, with: sizes)
        return result
    }
}
