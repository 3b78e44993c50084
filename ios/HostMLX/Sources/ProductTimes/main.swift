// Times products with quantized matrices, in nanoseconds of CPU time a weight:
//
//     swift run -c release --package-path ios/HostMLX ProductTimes

import Foundation
import MLX

let (outputs, inputs) = (4096, 1024)
let rowsOfX = [1, 16, 256]

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

let matrices = [32, 64].flatMap { groupSize in
    [2, 3, 4, 5, 6, 8].map { Matrix(bits: $0, groupSize: groupSize) }
}
let inputsOfProducts = rowsOfX.flatMap { rows in
    [(true, inputs), (false, outputs)].map { transpose, width in
        (transpose, MLXRandom.normal([rows, width], key: MLXRandom.key(1)))
    }
}
eval(inputsOfProducts.map(\.1))

// Each in its turn, and the least of its times, as the machine may have other work.
var least = Array(repeating: Array(repeating: Double.infinity, count: inputsOfProducts.count), count: matrices.count)
for round in 0..<20 {
    for (i, matrix) in matrices.enumerated() {
        for (j, (transpose, x)) in inputsOfProducts.enumerated() where round < 5 || x.dim(0) < 256 {
            let start = clock()
            eval(matrix.product(x, transpose: transpose))
            let seconds = Double(clock() - start) / Double(CLOCKS_PER_SEC)
            least[i][j] = min(least[i][j], seconds * 1e9 / Double(outputs * inputs))
        }
    }
}

let names = inputsOfProducts.map { transpose, x in "\(transpose ? "x Wᵀ" : "g W"), \(x.dim(0))" }
print("| bits | groups | " + names.joined(separator: " | ") + " |")
print("|---|---|" + names.map { _ in "---|" }.joined())
for (matrix, times) in zip(matrices, least) {
    let cells = times.map { String(format: "%.3f", $0) }
    print("| \(matrix.bits) | \(matrix.groupSize) | " + cells.joined(separator: " | ") + " |")
}
