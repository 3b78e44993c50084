import Foundation
import MLX
import MeSPCore
import MeSPSentences

extension CheckSuite {
    private func timeChain(_ kernels: Int) -> Double {
        let one = MLXArray(Float(1))
        eval(one)
        return median(most: 200) {
            // The time excludes building the graph.
            let last = (0..<kernels).reduce(one) { sum, _ in sum + one }
            return seconds { eval(last) }
        }
    }

    func measureEmptyEval() -> Finding {
        _ = timeChain(1)
        let whole = timeChain(1)
        constants.evalSeconds = whole
        return Finding(
            .note, "An eval of one number takes \(shown(microseconds: whole)).", [Measurement("eval", whole, "s")])
    }

    /// Measures the time of a kernel that waits for another kernel: the least-squares slope of a chain's time over its number of kernels.
    func measureDependentKernel() -> Finding {
        let lengths = [16, 64, 128, 256]
        let times = lengths.map(timeChain)
        let (n, t) = (lengths.reduce(0, +) / lengths.count, times.reduce(0, +) / Double(times.count))
        let products = zip(lengths, times).map { Double($0 - n) * ($1 - t) }
        let squares = lengths.map { Double(($0 - n) * ($0 - n)) }
        let slope = max(0, products.reduce(0, +) / squares.reduce(0, +))
        constants.kernelSeconds = slope
        constants.evalSeconds = constants.evalSeconds.map { max(0, $0 - slope) }
        return Finding(
            .note, "A kernel that waits for the one before it takes \(shown(microseconds: slope)).",
            zip(lengths, times).map { Measurement("\($0) kernels", $1, "s") } + [Measurement("kernel", slope, "s")])
    }

    /// Measures the time to allocate 1 MiB: the difference between an addition into a new buffer and one into a cached buffer.
    func measureNewBuffer() -> Finding {
        let x = MLXArray.zeros([1 << 18])
        eval(x)
        func add(clearing: Bool) -> Double {
            median(most: 1000) {
                if clearing { Memory.clearCache() }
                return seconds { eval(x + 1) }
            }
        }
        let (kept, new) = (add(clearing: false), add(clearing: true))
        let cost = max(0, new - kept)
        constants.newBufferSeconds = cost
        return Finding(
            .note, "A new buffer of 1 MiB takes \(shown(microseconds: cost)) more than one from MLX's cache.",
            [
                Measurement("from the cache", kept, "s"), Measurement("after clearCache", new, "s"),
                Measurement("new buffer", cost, "s"),
            ])
    }

    /// Measures the memory bandwidth by repeated additions to an array of 32 MiB. Each addition reads and writes each byte once.
    func measureBandwidth() throws -> Finding {
        let bytes = 32 << 20
        let x = MLXArray.zeros([bytes / 4])
        eval(x)
        func add(_ times: Int) throws -> Double {
            try medianTime { eval((0..<times).reduce(x) { sum, _ in sum + 1 }) }
        }
        // The first addition may allocate a buffer, so the time of one addition is subtracted from the time of nine. If the difference is not
        // positive on a busy machine, the time of all nine counts.
        let (one, nine) = (try add(1), try add(9))
        let rate = nine > one ? Double(8 * 2 * bytes) / (nine - one) : Double(9 * 2 * bytes) / nine
        constants.bytesPerSecond = rate
        return Finding(
            .note, "Memory is read and written at \(shown(giga: rate)) GB/s.",
            [Measurement("bandwidth", rate, "bytes/s")])
    }

    enum Product {
        /// x Wᵀ by `quantizedMM`.
        case transposed
        /// dy W by `quantizedMM`.
        case plain
        /// x Wᵀ after dequantizing W.
        case dequantized

        var formula: Sentence {
            switch self {
            case .transposed: "x Wᵀ"
            case .plain: "dy W"
            case .dequantized: "Dequantizing W and x Wᵀ"
            }
        }
    }

    /// Measures the rate of a product for the longest sequence. W consists of the first rows of a wide projection. The rate is measured for several
    /// numbers of rows.
    func measureProduct(_ product: Product) throws -> Finding {
        let (inputs, length) = (architecture.hiddenSize, longest)
        let rates = try bundle.withBlock(0) { weights in
            let all = weights.matrix(architecture.block(0).wideProjection)
            let begin = ContinuousClock.now
            var rates = [(rows: Int, rate: Double)]()
            for rows in [64, 256, 1024, 4096, all.rows].filter({ $0 <= all.rows }) where rows != rates.last?.rows {
                // On a CPU, the products with the most rows take too long for a large model.
                guard rates.isEmpty || ContinuousClock.now - begin < .seconds(settings.seconds) else { break }
                try atBlock()
                let w = all.rows(0..<rows)
                let x = MLXRandom.normal(
                    [length, product == .plain ? rows : inputs], dtype: productType, key: MLXRandom.key(0))
                eval(x)
                let time = try medianTime { eval(result(product, x, w)) }
                rates.append((rows, 2 * Double(length * rows * inputs) / time))
            }
            return rates
        }
        guard let best = rates.max(by: { $0.rate < $1.rate }) else { throw Skipped(reason: "The matrix has no rows.") }
        if (product == .dequantized) == !bundle.processor.dequantizesInProduct {
            constants.flopsPerSecond = min(constants.flopsPerSecond ?? best.rate, best.rate)
        }
        return Finding(
            .note,
            "\(product.formula) of \(length) tokens reaches \(shown(giga: best.rate)) GFLOP/s, with \(best.rows) rows of W at once.",
            rates.map { Measurement("\($0.rows) rows", $0.rate, "FLOP/s") })
    }

    private func result(_ product: Product, _ x: MLXArray, _ w: QuantizedMatrix) -> MLXArray {
        let (scales, biases) = w.affine(in: productType)
        return switch product {
        case .transposed, .plain:
            quantizedMM(
                x, w.weight, scales: scales, biases: biases, transpose: product == .transposed,
                groupSize: w.format.groupSize, bits: w.format.bits, mode: w.format.mode)
        case .dequantized:
            matmul(
                x,
                dequantized(
                    w.weight, scales: scales, biases: biases, groupSize: w.format.groupSize, bits: w.format.bits,
                    mode: w.format.mode, dtype: productType
                ).T)
        }
    }

    private var productType: DType { bundle.device == .cpu ? .float32 : bundle.dtype }
}
