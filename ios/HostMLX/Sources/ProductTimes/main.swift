// Measures products with quantized matrices. Prints each time in nanoseconds per weight and, in parentheses, its ratio to the time with 4 bits. If
// `OPENBLAS_NUM_THREADS` is 1, the times are processor times. Otherwise they are wall times.
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

let isAlone = ProcessInfo.processInfo.environment["OPENBLAS_NUM_THREADS"] == "1"

func nanoseconds(_ work: () -> Void) -> Double {
    let start = clock()
    let time = ContinuousClock().measure(work)
    return isAlone ? Double(clock() - start) * 1e9 / Double(CLOCKS_PER_SEC) : time / .nanoseconds(1)
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
    // Measures the products in turns, and takes the minimum time of each, because the machine may have other work.
    var least = Array(repeating: Array(repeating: Double.infinity, count: inputsOfProducts.count), count: widths.count)
    for round in 0..<20 {
        for (j, (transpose, x)) in inputsOfProducts.enumerated() where round < 5 || x.dim(0) < 256 {
            for (i, matrix) in matrices.enumerated() {
                least[i][j] = min(least[i][j], nanoseconds { eval(matrix.product(x, transpose: transpose)) })
            }
        }
    }
    for (matrix, times) in zip(matrices, least) {
        let cells = zip(times, least[0]).map { time, ofFour in
            String(format: "%.3f (%.2f)", time / Double(outputs * inputs), time / ofFour)
        }
        print("| \(groupSize) | \(matrix.bits) | " + cells.joined(separator: " | ") + " |")
    }
}
