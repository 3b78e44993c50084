import MeSPSentences

/// The types of arrays in a bundle's files and functions, by their names there.
public enum ElementType: String, Codable, CodingKeyRepresentable, Sendable {
    case bool, uint8, uint32, uint64, int32, float32, bfloat16
}

package struct ArrayType: Equatable {
    package var shape: [Int]
    package let element: ElementType

    package init(shape: [Int], element: ElementType) { (self.shape, self.element) = (shape, element) }

    /// With `sizes` in place of some dimensions.
    func replacing(_ dimensions: Range<Int>, with sizes: [Int]) -> ArrayType {
        var result = self
        result.shape.replaceSubrange(dimensions, with: sizes)
        return result
    }
}

/// The shapes and types of the arrays that a function takes and returns.
package struct FunctionSignature: Equatable {
    package let inputs: [ArrayType]
    package let outputs: [ArrayType]

    package static let isAnother = MeSPError("it does not have the inputs and outputs of a block")

    package init(inputs: [ArrayType], outputs: [ArrayType]) { (self.inputs, self.outputs) = (inputs, outputs) }
}
