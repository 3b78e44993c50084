// Times products with quantized matrices, in nanoseconds a weight, and beside each the ratio to the time of 4 bits:
//
//     OPENBLAS_NUM_THREADS=1 swift run -c release --package-path ios/HostMLX ProductTimes

import Foundation
import MLX

let (outputs, inputs) = (4096, 1024)
let rowsOfX = [1, 16, 64, 256]
let widths = [4, 2, 3, 5, 6, 8]

struct Matrix {
    let bits, groupSize: Int
    let weight, scales: MLXArray
    let biases: MLXArray?

    init(bits: Int, groupSize: Int) {
        let w = MLXRandom.normal([outputs, inputs], key: MLXRandom.key(0))
        let (weight, scales, biases) = quantized(w, groupSize: groupSize, bits: bits)
        (self.bits, self.groupSize, self.weight, self.scales, self.biases) = (bits, groupSize, weight, scales, biases)
        eval(weight, scales, biases ?? scales)
    }

    func product(_ x: MLXArray, transpose: Bool) -> MLXArray {
        quantizedMM(
            x, weight, scales: scales, biases: biases, transpose: transpose, groupSize: groupSize, bits: bits)
    }
}

let inputsOfProducts = rowsOfX.flatMap { rows in
    [(true, inputs), (false, outputs)].map { transpose, width in
        (transpose, MLXRandom.normal([rows, width], key: MLXRandom.key(1)))
    }
}
eval(inputsOfProducts.map(\.1))

let names = inputsOfProducts.map { transpose, x in "\(transpose ? "x Wᵀ" : "g W"), \(x.dim(0))" }
print("| groups | bits | " + names.joined(separator: " | ") + " |")
print("|---|---|" + names.map { _ in "---|" }.joined())
for groupSize in [32, 64, 128] {
    let matrices = widths.map { Matrix(bits: $0, groupSize: groupSize) }
    // Each in its turn, and the least of its times, as the machine may have other work: of wall time, which several threads share.
    var least = Array(
        repeating: Array(repeating: Duration.seconds(1), count: inputsOfProducts.count), count: widths.count)
    for round in 0..<40 {
        for (j, (transpose, x)) in inputsOfProducts.enumerated() where round % 2 == 0 || x.dim(0) < 256 {
            for (i, matrix) in matrices.enumerated() {
                let time = ContinuousClock().measure { eval(matrix.product(x, transpose: transpose)) }
                least[i][j] = min(least[i][j], time)
            }
        }
    }
    for (matrix, times) in zip(matrices, least) {
        let cells = zip(times, least[0]).map { time, ofFour in
            String(format: "%.3f (%.2f)", time / .nanoseconds(outputs * inputs), time / ofFour)
        }
        print("| \(groupSize) | \(matrix.bits) | " + cells.joined(separator: " | ") + " |")
    }
}
