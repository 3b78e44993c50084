import MLX
import MeSPBundle

/// W `[out, in]`, quantized in groups along its rows, and products with W. W is frozen.
package struct QuantizedMatrix: Arrays {
    package let weight: MLXArray
    package let scales: MLXArray
    package let biases: MLXArray?
    package let format: QuantizationFormat
    let processor: Processor
    /// W in float32, computed when a product first needs it and then kept; nil if all products use `quantizedMM`.
    let dense: Dense?

    final class Dense {
        lazy var array = make()
        private let make: () -> MLXArray
        init(_ make: @escaping () -> MLXArray) { self.make = make }
    }

    init(
        weight: MLXArray, scales: MLXArray, biases: MLXArray?, format: QuantizationFormat, processor: Processor
    ) {
        (self.weight, self.scales, self.biases, self.format) = (weight, scales, biases, format)
        self.processor = processor
        dense = !processor.dequantizesInProduct ? Dense { Self.dequantize(weight, scales, biases, format) } : nil
    }

    /// Returns the affine scales and biases in `dtype`, and the scales of other formats unchanged.
    static func affine(
        _ scales: MLXArray, _ biases: MLXArray?, in dtype: DType
    ) -> (scales: MLXArray, biases: MLXArray?) {
        (biases == nil ? scales : scales.asType(dtype), biases?.asType(dtype))
    }

    package func affine(in dtype: DType) -> (scales: MLXArray, biases: MLXArray?) {
        Self.affine(scales, biases, in: dtype)
    }

    package var rows: Int { scales.dim(0) }

    var arrays: [MLXArray] { [weight, scales] + biases.arrays }

    package func rows(_ range: Range<Int>) -> QuantizedMatrix {
        range.count == rows ? self : part(weight[range], scales[range], biases?[range])
    }

    /// Returns the columns (inputs) `range` of W. The bounds of the range are multiples of the group size.
    func columns(_ range: Range<Int>) -> QuantizedMatrix {
        if range.count == scales.dim(1) * format.groupSize { return self }
        let words = range.lowerBound * format.bits / 32..<range.upperBound * format.bits / 32
        let groups = range.lowerBound / format.groupSize..<range.upperBound / format.groupSize
        return part(weight[0..., words], scales[0..., groups], biases?[0..., groups])
    }

    func part(_ weight: MLXArray, _ scales: MLXArray, _ biases: MLXArray?) -> QuantizedMatrix {
        QuantizedMatrix(
            weight: weight, scales: scales, biases: biases, format: format, processor: processor)
    }

    /// Returns the rows of W at `indices` `[n]` in float32, `[n, in]`.
    func take(_ indices: MLXArray) -> MLXArray {
        Self.dequantize(
            weight.take(indices, axis: 0), scales.take(indices, axis: 0), biases?.take(indices, axis: 0), format)
    }

    func packedRows(_ indices: MLXArray) -> QuantizedMatrix {
        part(weight.take(indices, axis: 0), scales.take(indices, axis: 0), biases?.take(indices, axis: 0))
    }

    var inFloat32: MLXArray { Self.dequantize(weight, scales, biases, format) }
}

extension PackedWeights {
    /// Returns the quantized matrix `[rows, inputs]` whose arrays' names begin with `prefix`. With `number`, returns that matrix of a stack of
    /// matrices.
    func matrix(_ prefix: String, _ number: Int? = nil, inputs: Int) -> QuantizedMatrix {
        let (weight, scales) = (self[prefix + "weight", number], self[prefix + "scales", number])
        let biases = array(prefix + "biases", number)
        guard
            let format = QuantizationFormat(
                inputs: inputs, words: weight.dim(1), groups: scales.dim(1), hasBiases: biases != nil)
        else { preconditionFailure("no format for \(prefix)") }
        return QuantizedMatrix(
            weight: weight, scales: scales, biases: biases, format: format, processor: backend.processor)
    }
}
