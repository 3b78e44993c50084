import Foundation
import MLX
import MeSPBundle
import MeSPCore

/// Compares each row of a product in bfloat16. One wrong row among many would hardly change the error of the whole product.
extension CheckSuite {
    /// The tolerance of a row's relative error. Rounding the result to bfloat16 causes errors of 2·10⁻³. Rounding dequantized 8-bit weights causes
    /// errors of about 5·10⁻³.
    private static let rowTolerance = 0.02

    /// The numbers of rows to check. MLX has different kernels for different numbers of rows.
    private static let numbersOfRows = [9, 33, 256]

    private static let mostElements = 1 << 22

    func checkProductRows() throws -> Finding {
        guard bundle.device == .gpu else { throw Skipped(reason: "The self-check runs on the CPU.") }
        return try checkProductRows(tolerance: Self.rowTolerance)
    }

    /// Compares x Wᵀ, plain and quantized, with the float32 product on the CPU. W is the first rows of a wide projection.
    ///
    /// - Parameter tolerance: the tolerance of a row's relative error. A CPU needs a larger tolerance, because it sums in bfloat16.
    func checkProductRows(tolerance: Double) throws -> Finding {
        let inputs = architecture.hiddenSize
        let errors = try bundle.withBlock(0) { weights in
            let all = weights.matrix(architecture.block(0).wideProjection)
            let w = all.rows(0..<min(all.rows, max(1, Self.mostElements / inputs)))
            // Only the scales of affine quantization are stored in a floating-point type.
            let isAffine = w.biases != nil
            let scales = isAffine ? w.scales.asType(.bfloat16) : w.scales
            let biases = w.biases?.asType(.bfloat16)
            let wide = dequantized(
                w.weight, scales: isAffine ? scales.asType(.float32) : scales, biases: biases?.asType(.float32),
                groupSize: w.format.groupSize, bits: w.format.bits, mode: w.format.mode, dtype: .float32, stream: .cpu)
            let rounded = wide.asType(.bfloat16, stream: .cpu)
            eval(scales, wide, rounded)
            return try Self.numbersOfRows.flatMap { rows in
                try atBlock()
                let x = MLXRandom.normal([rows, inputs], dtype: .bfloat16, key: MLXRandom.key(0))
                let quantized = quantizedMM(
                    x, w.weight, scales: scales, biases: biases, groupSize: w.format.groupSize, bits: w.format.bits,
                    mode: w.format.mode)
                return try [
                    ("plain", matmul(x, rounded.T), rounded.asType(.float32, stream: .cpu)),
                    ("quantized", quantized, wide),
                ].map { name, product, w in
                    let largest = try largestError(ofRows: tamper("product.rows", product), x, w)
                    return Measurement("\(rows) rows, \(name)", largest)
                }
            }
        }
        return compare(
            "The rows of x Wᵀ in bfloat16", with: "those of the product in float32 on the CPU", errors,
            tolerance: tolerance)
    }

    private func largestError(ofRows y: MLXArray, _ x: MLXArray, _ w: MLXArray) throws -> Double {
        let expected = matmul(x.asType(.float32, stream: .cpu), w.transposed(stream: .cpu), stream: .cpu)
        let difference = subtract(y.asType(.float32, stream: .cpu), expected, stream: .cpu)
        func norms(_ rows: MLXArray) throws -> [Float] {
            try rows.square(stream: .cpu).sum(axis: -1, stream: .cpu).numbers(Float.self)
        }
        return worst(try zip(norms(difference), norms(expected)).map { Double(($0 / $1).squareRoot()) })
    }
}
