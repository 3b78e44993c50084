import MLX
import MeSPBundle

/// Products with W. A GPU and HostMLX dequantize W in the product. On another CPU, W is dequantized before the product, except in x Wᵀ if x has few
/// rows.
extension QuantizedMatrix {
    /// Returns g ∘ (x Wᵀ) `[T, out]` in `dtype`, or else in x's dtype. g is `[out]`; nil means g = 1.
    func apply(_ x: MLXArray, times g: MLXArray? = nil, as dtype: DType? = nil) -> MLXArray {
        if let g { return scaled(by: g, rows: x.dim(0))?.apply(x, as: dtype) ?? apply(x, as: dtype) * g }
        let product: MLXArray
        if let dense, x.dim(0) > Self.fewRows {
            product = matmul(x.asType(.float32), dense.array.T)
        } else {
            product = multiplied(x, transpose: true)
        }
        return product.asType(dtype ?? x.dtype)
    }

    /// The maximum number of rows of x for which `quantizedMM` is faster on a CPU than dequantizing W and a dense product.
    static let fewRows = 4

    /// Returns sum + (g ∘ dy) W `[T, in]` in sum's dtype. Without a sum, returns the product in dy's dtype.
    func applyTransposed(_ dy: MLXArray, times g: MLXArray? = nil, addedTo sum: MLXArray?) -> MLXArray {
        if let g {
            return scaled(by: g, rows: dy.dim(0))?.applyTransposed(dy, addedTo: sum)
                ?? applyTransposed(dy * g, addedTo: sum)
        }
        guard let sum else {
            // `MLX.matmul` does not emulate TF32 (TF32.swift). The emulation is not wanted here, because a GPU's `quantizedMM` computes x W without
            // TF32.
            return (dense.map { MLX.matmul(dy.asType(.float32), $0.array) } ?? multiplied(dy, transpose: false))
                .asType(dy.dtype)
        }
        if let dense { return MLX.addMM(sum.asType(.float32), dy.asType(.float32), dense.array).asType(sum.dtype) }
        return sum + multiplied(dy, transpose: false).asType(sum.dtype)
    }

    /// Returns the matrix with its rows multiplied by g. Returns nil where scaling the product is cheaper or scaling the matrix is not possible.
    private func scaled(by g: MLXArray, rows: Int) -> QuantizedMatrix? {
        guard Device.isCPU, dense == nil, let biases, 2 * scales.dim(1) < rows else { return nil }
        let g = g[0..., .newAxis]
        return part(weight, scales * g, biases * g)
    }

    /// Returns x Wᵀ or x W by `quantizedMM`. A CPU accumulates in the operands' dtype, so x is cast to float32 on a CPU.
    private func multiplied(_ x: MLXArray, transpose: Bool) -> MLXArray {
        let isWide = Device.isCPU || x.dtype == .float32
        // MLX casts the scales to float32 if x is float32.
        let (scales, biases) = isWide ? (scales, biases) : affine(in: x.dtype)
        let wide = isWide ? x.asType(.float32) : x
        // Of the quantized products, the neural accelerators compute x Wᵀ, but not x W.
        let product =
            TF32.isEmulated && transpose && isWide
            ? matmul(wide, inFloat32.T)
            : quantizedMM(
                wide, weight, scales: scales, biases: biases, transpose: transpose, groupSize: format.groupSize,
                bits: format.bits, mode: format.mode)
        return processor.backend == .gpu ? product.asType(x.dtype) : product
    }

    /// Returns W in float32. Affine scales are cast to float32 first, because `dequantized` would round W to their dtype. On a CPU this function
    /// itself unpacks W of 3, 5 or 6 bits, because `dequantized` would need too much memory.
    static func dequantize(
        _ weight: MLXArray, _ scales: MLXArray, _ biases: MLXArray?, _ format: QuantizationFormat
    ) -> MLXArray {
        let (wideScales, wideBiases) = affine(scales, biases, in: .float32)
        guard let wideBiases, 32 % format.bits != 0, Device.isCPU else {
            return dequantized(
                weight, scales: wideScales, biases: wideBiases,
                groupSize: format.groupSize, bits: format.bits, mode: format.mode, dtype: .float32)
        }
        let codes = unpacked(weight, bits: format.bits).reshaped(scales.shape + [format.groupSize])
        return (codes * wideScales[.ellipsis, .newAxis] + wideBiases[.ellipsis, .newAxis]).flattened(start: 1)
    }

    /// Returns the codes in `words`, the lowest bits first, as 16-bit integers. Each code spans at most two bytes.
    private static func unpacked(_ words: MLXArray, bits: Int) -> MLXArray {
        let eight = words.view(dtype: .uint8).reshaped([words.dim(0), -1, bits])
        let starts = (0..<8).map { $0 * bits }
        func bytes(_ places: [Int]) -> MLXArray {
            eight.take(.of(places.map { Int32($0 / 8) }), axis: -1).asType(.uint16)
        }
        let pairs = bytes(starts) + 256 * bytes(starts.map { $0 + bits - 1 })
        return (pairs >> MLXArray.of(starts.map { UInt16($0 % 8) })) & ((1 << bits) - 1)
    }
}
