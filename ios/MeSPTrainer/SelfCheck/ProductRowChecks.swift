import Foundation
import MLX
import MeSPBundle
import MeSPCore

/// Compares each row of a product in bfloat16, because one wrong row among many hardly changes the error of the whole product.
extension CheckSuite {
    /// The largest allowed relative error of a row. Rounding the result to bfloat16 causes an error of 2·10⁻³. Rounding the dequantized W causes an
    /// error of about 5·10⁻³ at 8 bits, because 8-bit codes are large compared with the steps between them.
    private static let rowTolerance = 0.02

    /// The numbers of rows to check. MLX has kernels for few rows, for more rows, and for matrices. The kernels for matrices use the neural
    /// accelerators of a GPU that has them.
    private static let numbersOfRows = [9, 33, 256]

    /// The maximum number of elements in W.
    private static let mostElements = 1 << 22

    func checkProductRows() throws -> Finding {
        guard bundle.manifest.device == .gpu else {
            throw Skipped(reason: "The bundle \(bundle.manifest.name) runs on the CPU: export one with --device gpu.")
        }
        return try checkProductRows(tolerance: Self.rowTolerance)
    }

    /// Compares x Wᵀ, plain and quantized, with the product of the same numbers in float32 on the CPU. W has the first rows of a block's wide
    /// projection.
    ///
    /// - Parameter tolerance: the largest allowed relative error of a row. A CPU needs a larger tolerance, because it sums in bfloat16.
    func checkProductRows(tolerance: Double) throws -> Finding {
        let inputs = architecture.hiddenSize
        let errors = try bundle.withBlock(0) { weights in
            let all = weights.matrix(architecture.block(0).wideProjection)
            let w = all.rows(0..<min(all.rows, max(1, Self.mostElements / inputs)))
            // Only affine quantization has floating-point scales. The scales of other formats are codes.
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
                return [
                    ("plain", matmul(x, rounded.T), rounded.asType(.float32, stream: .cpu)),
                    ("quantized", quantized, wide),
                ].map { name, product, w in
                    Measurement("\(rows) rows, \(name)", largestError(ofRows: tamper("product.rows", product), x, w))
                }
            }
        }
        return compare(
            "The rows of x Wᵀ in bfloat16", with: "those of the product in float32 on the CPU", errors,
            tolerance: tolerance)
    }

    /// Returns the largest relative error of a row of y, compared with x wᵀ.
    private func largestError(ofRows y: MLXArray, _ x: MLXArray, _ w: MLXArray) -> Double {
        let expected = matmul(x.asType(.float32, stream: .cpu), w.transposed(stream: .cpu), stream: .cpu)
        let difference = subtract(y.asType(.float32, stream: .cpu), expected, stream: .cpu)
        func norms(_ rows: MLXArray) -> [Float] {
            rows.square(stream: .cpu).sum(axis: -1, stream: .cpu).asArray(Float.self)
        }
        return worst(zip(norms(difference), norms(expected)).map { Double(($0 / $1).squareRoot()) })
    }
}
