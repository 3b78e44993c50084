import Foundation
import MLX
import Testing

@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct QuantizedMatrixTests {
    /// Products that are computed as on a GPU equal those that are computed as on a CPU.
    @Test(arguments: Fixture.cases) func packedProductsAreTheDenseOnes(_ folder: URL) throws {
        var bundle = try Fixture(folder, "gradients").bundle
        func products(_ way: Backend, _ x: MLXArray, _ dy: MLXArray) throws -> [MLXArray] {
            bundle.backend = way
            return try bundle.withBlock(0) { weights in
                let w = weights.matrix(.down)
                let products = [w.apply(x), w.applyTransposed(dy, addedTo: MLXArray.ones(x.shape))]
                MLX.eval(products)
                return products
            }
        }
        let a = bundle.architecture
        for rows in 1...6 {
            let x = MLXRandom.normal([rows, a.block(0).mlp.intermediateSize], key: MLXRandom.key(0))
            let dy = MLXRandom.normal([rows, a.hiddenSize], key: MLXRandom.key(1))
            for (packed, dense) in zip(try products(.gpu, x, dy), try products(.cpu, x, dy)) {
                #expect(packed.shape == dense.shape)
                #expect(relativeError(packed, dense) < 1e-5, "\(rows) rows")
            }
        }
    }

    @Test(arguments: [2, 3, 4, 5, 6, 8], [32, 64, 128])
    func rowsAreDequantizedAsMLXDoes(_ bits: Int, _ groupSize: Int) throws {
        let indices = MLXArray((0..<300).map { Int32($0 * 7 % 64) })
        func rows(_ bits: Int, _ dtype: DType) throws -> (taken: MLXArray, expected: MLXArray, peak: Int) {
            let w = MLXRandom.normal([64, 640], key: MLXRandom.key(0))
            let (weight, scales, biases) = quantized(w, groupSize: groupSize, bits: bits)
            let format = QuantizationFormat(
                inputs: 640, words: weight.dim(1), groups: scales.dim(1), hasBiases: biases != nil)
            let matrix = QuantizedMatrix(
                weight: weight, scales: scales.asType(dtype), biases: biases?.asType(dtype),
                format: try #require(format), processor: .cpu)
            MLX.eval(weight, matrix.scales, matrix.biases ?? scales)
            let before = Memory.activeMemory
            Memory.peakMemory = 0
            let taken = matrix.take(indices)
            MLX.eval(taken)
            let peak = Memory.peakMemory - before
            let expected = dequantized(
                weight, scales: matrix.scales.asType(.float32), biases: matrix.biases?.asType(.float32),
                groupSize: groupSize, bits: bits, dtype: .float32)
            return (taken, expected.take(indices, axis: 0), peak)
        }
        for dtype in [DType.float32, .bfloat16] {
            let (taken, expected, peak) = try rows(bits, dtype)
            #expect(taken.dtype == .float32 && arrayEqual(taken, expected).item(Bool.self), "\(dtype)")
            #expect(try peak <= 2 * rows(8, dtype).peak, "\(dtype)")
        }
    }
}
