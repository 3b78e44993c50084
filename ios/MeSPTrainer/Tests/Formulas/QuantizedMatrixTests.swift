import Foundation
import MLX
import Testing

@testable import MeSPCore

/// Both ways of a product. `TrainerTests` goes through a step with each.
@Suite(.serialized) struct QuantizedMatrixTests {
    /// Metal's kernels depend on the number of rows; two and three are padded.
    @Test(arguments: Fixture.cases) func packedProductsAreTheDenseOnes(_ folder: URL) throws {
        var bundle = try Fixture(folder, "gradients").bundle
        func products(_ way: QuantizedMatrix.Products, _ x: MLXArray, _ dy: MLXArray) throws -> [MLXArray] {
            bundle.products = way
            return try bundle.withBlock(0) { weights in
                let w = weights.matrix(.down)
                let products = [w.apply(x), w.applyTransposed(dy, addedTo: MLXArray.ones(x.shape))]
                eval(products)
                return products
            }
        }
        let a = bundle.architecture
        for rows in 1...6 {
            let x = MLXRandom.normal([rows, a.intermediateSize], key: MLXRandom.key(0))
            let dy = MLXRandom.normal([rows, a.hiddenSize], key: MLXRandom.key(1))
            for (packed, dense) in zip(try products(.packed, x, dy), try products(.dense, x, dy)) {
                #expect(packed.shape == dense.shape)
                #expect(relativeError(packed, dense) < 1e-5, "\(rows) rows")
            }
        }
    }
}
