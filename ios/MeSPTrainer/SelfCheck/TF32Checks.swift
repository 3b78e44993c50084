import Foundation
import MLX
import MeSPCore
import MeSPSentences

extension CheckSuite {
    func checkTF32() throws -> Finding {
        let errors = try errorsOfProducts()
        let isRounded = errors.contains { !($0.value ?? .infinity <= Self.roundedFrom) }
        let isOff = getenv("MLX_ENABLE_TF32").map { atoi($0) == 0 } ?? false

        let trainer = try makeTrainer(fewBlocks(.mesp))
        let input = try inputOfTrained(trainer)
        let exact = try gradientsOnCPU(trainer, input)
        let rounded = try TF32.$isEmulated.withValue(true) { try gradientsOnCPU(trainer, input) }
        let effects =
            try [Measurement("loss", error(rounded.loss, exact.loss))]
            + self.errors(trainer.model.lora.layouts, rounded.gradients, exact.gradients)
        let worst = effects.compactMap(\.value).max() ?? .nan
        let effect = String(format: "%.1e", worst)
        let (verdict, sentence): (SelfCheckReport.Verdict, Sentence) =
            switch (isRounded, isOff) {
            case (true, true):
                (.fail, "Products in float32 have the precision of TF32, though MLX_ENABLE_TF32 is 0.")
            case (true, false):
                (
                    .note,
                    "Products in float32 have the precision of TF32, which changes gradients by up to \(effect): MLX_ENABLE_TF32=0 turns it off."
                )
            case (false, _):
                (.pass, "Products in float32 have its precision. TF32 would change gradients by up to \(effect).")
            }
        return Finding(
            verdict, sentence,
            [Measurement("in force", isRounded ? 1 : 0)] + errors
                + effects.map { Measurement("TF32: \($0.name)", $0.value ?? .nan) })
    }

    /// A relative error below this value is of float32 (below 10⁻⁶), and a larger one of TF32 (about 10⁻⁴).
    private static let roundedFrom = 1e-5

    /// Returns the relative errors of products with a diagonal matrix. Their exact results are known, because each element is one product of two
    /// numbers.
    private func errorsOfProducts() throws -> [Measurement] {
        let (rows, features) = (256, 512)
        let x = MLXRandom.normal([rows, features], key: MLXRandom.key(0))
        let diagonal = MLXArray.eye(features)
        let (weight, scales, biases) = quantized(diagonal, groupSize: 64, bits: 8)
        let dense = dequantized(weight, scales: scales, biases: biases, groupSize: 64, bits: 8)
        let ofDiagonal = x * (dense * diagonal).sum(axis: 0)
        return try [
            ("matmul", MLX.matmul(x, diagonal), x),
            ("addMM", MLX.addMM(MLXArray.zeros([rows, features]), x, diagonal), x),
            (
                "quantizedMM",
                MLX.quantizedMM(x, weight, scales: scales, biases: biases, groupSize: 64, bits: 8), ofDiagonal
            ),
        ].map { name, product, expected in Measurement(name, try error(tamper("tf32", product), expected)) }
    }
}
