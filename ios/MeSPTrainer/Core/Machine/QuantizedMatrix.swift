import MLX
import MeSPBundle

/// W `[out, in]`, quantized in groups along its rows, and products with it. W is frozen: it has no gradient.
package struct QuantizedMatrix: Arrays {
    package let weight: MLXArray
    package let scales: MLXArray
    /// nil but for affine quantization.
    package let biases: MLXArray?
    package let format: QuantizationFormat
    private let processor: Processor
    /// W in float32, made when the first product asks for it and shared by all; nil where `quantizedMM` is taken.
    private let dense: Dense?
    /// Affine scales and biases in float32, cast once for all products with what is float32.
    private let wide: (scales: MLXArray, biases: MLXArray?)

    private final class Dense {
        lazy var array = make()
        private let make: () -> MLXArray
        init(_ make: @escaping () -> MLXArray) { self.make = make }
    }

    init(
        weight: MLXArray, scales: MLXArray, biases: MLXArray?, format: QuantizationFormat, processor: Processor
    ) {
        (self.weight, self.scales, self.biases, self.format) = (weight, scales, biases, format)
        self.processor = processor
        wide = (biases == nil ? scales : scales.asType(.float32), biases?.asType(.float32))
        dense = !processor.unpacksInside ? Dense { Self.dequantize(weight, scales, biases, format) } : nil
    }

    /// With bfloat16 scales `dequantized` would round W to bfloat16. Of 3, 5 and 6 bits it would on the CPU make an array with an integer of
    /// 32 bits for each bit of W.
    private static func dequantize(
        _ weight: MLXArray, _ scales: MLXArray, _ biases: MLXArray?, _ format: QuantizationFormat
    ) -> MLXArray {
        let (wideScales, wideBiases) = (biases == nil ? scales : scales.asType(.float32), biases?.asType(.float32))
        guard let wideBiases, 32 % format.bits != 0, Device.isCPU else {
            return dequantized(
                weight, scales: wideScales, biases: wideBiases,
                groupSize: format.groupSize, bits: format.bits, mode: format.mode, dtype: .float32)
        }
        let codes = unpacked(weight, bits: format.bits).reshaped(scales.shape + [format.groupSize])
        return (codes * wideScales[.ellipsis, .newAxis] + wideBiases[.ellipsis, .newAxis]).flattened(start: 1)
    }

    /// The codes in `words`, the lowest bits first, as integers of 16 bits: each is in the bytes of its first and its last bit.
    private static func unpacked(_ words: MLXArray, bits: Int) -> MLXArray {
        let eight = words.view(dtype: .uint8).reshaped([words.dim(0), -1, bits])
        let starts = (0..<8).map { $0 * bits }
        func bytes(_ places: [Int]) -> MLXArray {
            eight.take(MLXArray(places.map { Int32($0 / 8) }), axis: -1).asType(.uint16)
        }
        let pairs = bytes(starts) + 256 * bytes(starts.map { $0 + bits - 1 })
        return (pairs >> MLXArray(starts.map { UInt16($0 % 8) })) & ((1 << bits) - 1)
    }

    package var rows: Int { scales.dim(0) }

    var arrays: [MLXArray] { [weight, scales] + biases.arrays }

    /// Rows (outputs) `range` of W.
    package func rows(_ range: Range<Int>) -> QuantizedMatrix {
        range.count == rows ? self : part(weight[range], scales[range], biases?[range])
    }

    /// Columns (inputs) `range` of W, whose bounds are multiples of the group size.
    func columns(_ range: Range<Int>) -> QuantizedMatrix {
        if range.count == scales.dim(1) * format.groupSize { return self }
        let words = range.lowerBound * format.bits / 32..<range.upperBound * format.bits / 32
        let groups = range.lowerBound / format.groupSize..<range.upperBound / format.groupSize
        return part(weight[0..., words], scales[0..., groups], biases?[0..., groups])
    }

    private func part(_ weight: MLXArray, _ scales: MLXArray, _ biases: MLXArray?) -> QuantizedMatrix {
        QuantizedMatrix(
            weight: weight, scales: scales, biases: biases, format: format, processor: processor)
    }

    /// The rows of W that `indices` `[n]` name, in float32: `[n, in]`.
    func take(_ indices: MLXArray) -> MLXArray {
        Self.dequantize(
            weight.take(indices, axis: 0), scales.take(indices, axis: 0), biases?.take(indices, axis: 0), format)
    }

    /// The same, quantized as they are.
    func packedRows(_ indices: MLXArray) -> QuantizedMatrix {
        part(weight.take(indices, axis: 0), scales.take(indices, axis: 0), biases?.take(indices, axis: 0))
    }

    /// W, in float32.
    var inFloat32: MLXArray { Self.dequantize(weight, scales, biases, format) }

    /// x Wᵀ, `[T, out]`, in `dtype`, by default x's.
    func apply(_ x: MLXArray, as dtype: DType? = nil) -> MLXArray {
        let product: MLXArray
        if let dense, x.dim(0) > Self.fewRows {
            product = matmul(x.asType(.float32), dense.array.T)
        } else {
            product = multiplied(x, transpose: true)
        }
        return product.asType(dtype ?? x.dtype)
    }

    /// Rows of x up to which `quantizedMM` in float32 is the faster on the CPU too, as dequantizing W takes longer than they do.
    static let fewRows = 4

    /// sum + dy W, `[T, in]`, in sum's dtype; dy W, in dy's, if there is no sum.
    func applyTransposed(_ dy: MLXArray, addedTo sum: MLXArray?) -> MLXArray {
        guard let sum else {
            // Not by the core's own products: on a GPU this one never has TF32 (metal/quantized.cpp:694).
            return (dense.map { MLX.matmul(dy.asType(.float32), $0.array) } ?? multiplied(dy, transpose: false))
                .asType(dy.dtype)
        }
        if let dense { return MLX.addMM(sum.asType(.float32), dy.asType(.float32), dense.array).asType(sum.dtype) }
        return sum + multiplied(dy, transpose: false).asType(sum.dtype)
    }

    /// x Wᵀ or x W by `quantizedMM`, the CPU's way in float32, the GPU's in x's dtype. MLX adds up in the operands' dtype on a CPU, and in
    /// float32 on a GPU: on a CPU it gets float32.
    private func multiplied(_ x: MLXArray, transpose: Bool) -> MLXArray {
        let isWide = Device.isCPU || x.dtype == .float32
        let product = quantizedMM(
            isWide ? x.asType(.float32) : x, weight, scales: isWide ? wide.scales : scales,
            biases: isWide ? wide.biases : biases,
            transpose: transpose, groupSize: format.groupSize, bits: format.bits, mode: format.mode)
        return processor.backend == .gpu ? product.asType(x.dtype) : product
    }
}

extension PackedWeights {
    /// The quantized matrix `[rows, inputs]` whose arrays' names start with `prefix`; of stacked ones that with this number.
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
