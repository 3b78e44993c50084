import Foundation
import MLX
import Testing

extension Double {
    fileprivate var exponential: Double { Foundation.exp(self) }
}

extension AllTests {
    @Suite struct OpsTests {
        let x = MLXArray([0, 1, 2, 3, 4, 5, 6, 7] as [Float], [2, 4])

        @Test func elements() {
            let v = MLXArray([0.25, 1, 4] as [Float])
            expectClose(exp(v), [1.2840254, 2.7182817, 54.59815])
            expectClose(log(v), [-1.3862944, 0, 1.3862944])
            expectClose(sqrt(v) * rsqrt(v), [1, 1, 1])
            expectClose(v.square() + abs(-v), [0.3125, 2, 20])
            expectClose(sigmoid(MLXArray([0, 2] as [Float])), [0.5, 0.880797])
            expectClose(tanh(v), [0.2449187, 0.7615942, 0.9993293])
            expectClose(maximum(v, 1.0), [1, 1, 4])
            expectClose(which(v .> 0.5, v, -1.0), [-1, 1, 4])
            #expect(logicalAnd(v .>= MLXArray(1), v .< 4).asArray(Bool.self) == [false, true, false])
            #expect(arrayEqual(v, v).item(Bool.self))
        }

        @Test func reductions() {
            expectClose(x.sum(), [28], [])
            expectClose(x.sum(axis: 0), [4, 6, 8, 10])
            expectClose(x.sum(axis: 0, keepDims: true), [4, 6, 8, 10], [1, 4])
            expectClose(x.mean(axis: -1, keepDims: true), [1.5, 5.5], [2, 1])
            expectClose(x.max(axis: 1), [3, 7])
            expectClose(x.logSumExp(axis: 1), [3.4401898, 7.44019])
            expectClose(x.logSumExp(), [7.4583397], [])
            expectClose(softmax(x, axis: -1)[0], [0.0320586, 0.08714432, 0.23688281, 0.64391423])
            expectClose(cumsum(x, axis: 1), [0, 1, 3, 6, 4, 9, 15, 22], [2, 4])
            expectClose(cumsum(x, reverse: true, inclusive: false), [28, 27, 25, 22, 18, 13, 7, 0])
            #expect(x.argMax(axis: 1).asArray(Int.self) == [3, 3] && x.argMax().item(Int.self) == 7)
            #expect(all(x .> -1).item(Bool.self) && !all(x .> 0).item(Bool.self))
        }

        @Test func shapes() {
            expectClose(x.reshaped([4, -1]).transposed(1, 0), [0, 2, 4, 6, 1, 3, 5, 7], [2, 4])
            #expect(x.expandedDimensions(axes: [0, 2]).shape == [1, 2, 1, 4])
            #expect(x.expandedDimensions(axis: 0).squeezed(axis: 0).shape == [2, 4])
            #expect(x.reshaped([1, 2, 2, 2]).flattened(start: 1, end: 2).shape == [1, 4, 2])
            #expect(x.reshaped([1, 2, 4]).swappedAxes(0, 2).shape == [4, 2, 1])
            #expect(x.view(dtype: .uint16).shape == [2, 8])
            expectClose(concatenated([x, x], axis: 1)[0], [0, 1, 2, 3, 0, 1, 2, 3])
            #expect(stacked([x, x], axis: 1).shape == [2, 2, 4])
            let halves = x.split(parts: 2, axis: 1)
            expectClose(halves[0] + halves[1], [2, 4, 10, 12], [2, 2])
            expectClose(depends(inputs: [x], dependencies: [x + 1])[0][0], [0, 1, 2, 3])
        }

        @Test func indices() {
            let v = MLXArray([3, 1, 2] as [Float])
            expectClose(argSort(v, axis: 0), [1, 2, 0])
            expectClose(sorted(v), take(v, MLXArray([1, 2, 0])).asArray(Float.self))
            expectClose(x.take(MLXArray([3, 0]), axis: 1), [3, 0, 7, 4], [2, 2])
            expectClose(take(x, MLXArray([5])), [5])
            let bytes = MLXArray((0..<1 << 18).map { UInt8(truncatingIfNeeded: $0 &* 37 >> 3) }, [1 << 10, 1 << 8])[
                0..., 3...]
            for indices in [bytes, bytes.asType(.uint16) * 255] {
                let table = MLXArray((0..<1 << 16).map { Float($0) * 0.5 })
                for entries in [table, table.asType(.uint8), table.asType(.uint16)] {
                    let found = take(entries, indices)
                    #expect(found.dtype == entries.dtype)
                    #expect(arrayEqual(found, entries.take(indices, axis: 0)).item(Bool.self))
                }
            }
            expectClose(takeAlong(x, MLXArray([1, 2], [2, 1]), axis: 1), [1, 6], [2, 1])
        }

        @Test func products() {
            let w = MLXArray([1, 2, 3, 4, 5, 6, 7, 8] as [Float], [4, 2])
            expectClose(matmul(x, w), [34, 40, 98, 120], [2, 2])
            expectClose(addMM(MLXArray([1, 2] as [Float]), x, w, alpha: 2, beta: 10), [78, 100, 206, 260], [2, 2])
        }

        @Test func quantization() throws {
            let w = (MLXArray(0..<64, [1, 64]) / 63).asType(.float32)
            let q = quantized(w, groupSize: 32, bits: 4)
            #expect(q.wq.asArray(UInt32.self).prefix(2) == [3_437_096_703, 2_291_772_091])
            expectClose(q.scales, [-0.032804232, -0.033333335], [1, 2])
            let biases = try #require(q.biases)
            expectClose(biases, [0.4920635, 1], [1, 2])
            let restored = dequantized(q.wq, scales: q.scales, biases: q.biases, groupSize: 32, bits: 4)
            #expect(abs(restored - w).max().item(Float.self) < 0.02)
            let v = MLXArray.ones([1, 64])
            let product = quantizedMM(v, q.wq, scales: q.scales, biases: q.biases, groupSize: 32, bits: 4)
            expectClose(product, matmul(v, restored.T).asArray(Float.self), [1, 1])
        }

        private static let formats: [(mode: QuantizationMode, bits: Int, groupSize: Int)] =
            [2, 3, 4, 5, 6, 8].flatMap { bits in [32, 64, 128].map { (.affine, bits, $0) } }
            + [(.mxfp4, 4, 32), (.mxfp8, 8, 32), (.nvfp4, 4, 16)]

        @Test(arguments: formats.indices) func quantizedProducts(_ index: Int) throws {
            let (mode, bits, groupSize) = Self.formats[index]
            let w = MLXRandom.normal([410, 1408], key: MLXRandom.key(0))
            let q = quantized(w, groupSize: groupSize, bits: bits, mode: mode)
            let words = max(32, groupSize)  // columns that begin with a group and with a word
            for (rows, columns) in [(0..<410, 0..<1408), (3..<300, words * 2..<words * 9), (7..<12, 0..<words)] {
                let groups = columns.lowerBound / groupSize..<columns.upperBound / groupSize
                let packed = q.wq[rows, columns.lowerBound * bits / 32..<columns.upperBound * bits / 32]
                let (scales, biases) = (q.scales[rows, groups], q.biases?[rows, groups])
                let dense = dequantized(
                    packed, scales: scales, biases: biases, groupSize: groupSize, bits: bits, mode: mode,
                    dtype: .float32)
                for m in [1, 2, 3, 7, 16, 70] {
                    func product(_ x: MLXArray, transpose: Bool) -> MLXArray {
                        quantizedMM(
                            x, packed, scales: scales, biases: biases, transpose: transpose, groupSize: groupSize,
                            bits: bits, mode: mode)
                    }
                    let x = MLXRandom.normal([m, columns.count], key: MLXRandom.key(1))
                    let dy = MLXRandom.normal([m, rows.count], key: MLXRandom.key(2))
                    let (_, dx) = vjp({ [product($0[0], transpose: true)] }, primals: [x], cotangents: [dy])
                    // Both sides add in different orders, so their rounding differs.
                    for (ours, theirs) in [
                        (product(x, transpose: true), matmul(x, dense.T)),
                        (product(dy, transpose: false), matmul(dy, dense)), (dx[0], matmul(dy, dense)),
                    ] {
                        #expect(ours.shape == theirs.shape)
                        let error = ((ours - theirs).square().sum() / theirs.square().sum()).sqrt()
                        #expect(error.item(Float.self) < 2e-6, "\(mode) \(bits) \(groupSize), \(m) rows")
                    }
                }
            }
        }

        @Test(arguments: [2, 3, 4, 5, 6, 8]) func fewRowsOfAQuantizedProductDoNotDependOnEachOther(bits: Int) {
            let q = quantized(MLXRandom.normal([301, 640], key: MLXRandom.key(0)), groupSize: 32, bits: bits)
            func product(_ x: MLXArray) -> MLXArray {
                quantizedMM(x, q.wq, scales: q.scales, biases: q.biases, groupSize: 32, bits: bits)
            }
            let x = MLXRandom.normal([16, 640], key: MLXRandom.key(1))
            let alone = concatenated((0..<16).map { product(x[$0..<$0 + 1]) })
            for m in [2, 3, 5, 8, 11, 16] {
                #expect(product(x[0..<m]).asArray(Float.self) == alone[0..<m].asArray(Float.self), "\(m) rows")
            }
        }

        @Test(arguments: [2, 3, 4, 5, 6, 8], [32, 128]) func threadsDoNotChangeAQuantizedProduct(
            bits: Int, groupSize: Int
        ) {
            let q = quantized(MLXRandom.normal([1024, 896], key: MLXRandom.key(0)), groupSize: groupSize, bits: bits)
            func product(_ x: MLXArray, _ rows: Range<Int>) -> MLXArray {
                quantizedMM(
                    x, q.wq[rows], scales: q.scales[rows], biases: q.biases?[rows], groupSize: groupSize, bits: bits)
            }
            for m in [1, 4, 16] {
                let x = MLXRandom.normal([m, 896], key: MLXRandom.key(1))
                let parts = (0..<16).map { product(x, $0 * 64..<($0 + 1) * 64) }
                #expect(product(x, 0..<1024).arrayEqual(concatenated(parts, axis: 1)).item(Bool.self), "\(m) rows")
            }
        }

        /// The operand may be a part of a wider matrix, a part of a transposed matrix, or one broadcast row.
        @Test(arguments: [2, 3, 4, 6]) func aQuantizedProductReadsItsOperandWhereItIs(bits: Int) {
            let q = quantized(MLXRandom.normal([96, 128], key: MLXRandom.key(0)), groupSize: 32, bits: bits)
            let numbers = MLXRandom.normal([160, 192], key: MLXRandom.key(1))
            for rows in [1, 9, 40] {
                let operands = [
                    (numbers[3..<3 + rows, 32..<160], numbers[3..<3 + rows, 32..<128]),
                    (numbers.T[5..<5 + rows, 8..<136], numbers.T[5..<5 + rows, 8..<104]),
                    (broadcast(numbers[0, ..<128], to: [rows, 128]), broadcast(numbers[0, ..<96], to: [rows, 96])),
                ]
                for (x, dy) in operands {
                    for (operand, transpose) in [(x, true), (dy, false)] {
                        func product(_ x: MLXArray) -> MLXArray {
                            quantizedMM(
                                x, q.wq, scales: q.scales, biases: q.biases, transpose: transpose, groupSize: 32,
                                bits: bits)
                        }
                        #expect(product(operand).arrayEqual(product(contiguous(operand))).item(Bool.self))
                    }
                }
            }
        }

        @Test(arguments: [true, false], [2, 3, 4]) func sumsOfAQuantizedProduct(transpose: Bool, bits: Int) {
            let q = quantized(MLXRandom.normal([320, 192], key: MLXRandom.key(0)), groupSize: 32, bits: bits)
            let dense = dequantized(q.wq, scales: q.scales, biases: q.biases, groupSize: 32, bits: bits)
            let (inputs, outputs) = transpose ? (192, 320) : (320, 192)
            func normal(_ shape: Int..., seed: UInt64) -> MLXArray { MLXRandom.normal(shape, key: MLXRandom.key(seed)) }
            for m in [7, 70] {
                let (x, sum, bias) = (
                    normal(m, inputs, seed: 1), normal(m, outputs, seed: 2), normal(outputs, seed: 3)
                )
                let (wide, a) = (normal(m, 2 * outputs, seed: 4), normal(m, 8, seed: 5))
                let (b, across) = (normal(8, 2 * outputs, seed: 6), normal(outputs, 8, seed: 7))
                eval(sum, wide, b)
                let product = matmul(x, transpose ? dense.T : dense)
                func y() -> MLXArray {
                    quantizedMM(
                        x, q.wq, scales: q.scales, biases: q.biases, transpose: transpose, groupSize: 32, bits: bits)
                }
                let (part, rows, kept) = (b[0..., 16..<16 + outputs], wide[0..., 5..<5 + outputs], sum + 0)
                eval(kept)
                let twice = y()
                let (_, gradients) = vjp(
                    { [addMM($0[0] + y(), $0[1], $0[2], alpha: 3)] }, primals: [sum, a, part], cotangents: [rows])
                let sums = [
                    (y() + bias, product + bias), (sum + y(), product + sum), (y() + rows, product + rows),
                    (addMM(y(), a, part, alpha: 0.5), product + 0.5 * matmul(a, part)),
                    (sum + addMM(y() + bias, a, across.T), product + bias + sum + matmul(a, across.T)),
                    (addMM(sum + y(), a, contiguous(part)), product + sum + matmul(a, part)),
                    (addMM(y(), normal(8, m, seed: 8).T, part), product + matmul(normal(8, m, seed: 8).T, part)),
                    (addMM(y(), broadcast(a[0], to: [m, 8]), part), product + matmul(a[0..<1], part)),
                    ((sum + sum) + y() + y(), 2 * (sum + product)), (twice + twice, 2 * product),
                    (addMM(addMM(y(), a, part), a, part), product + 2 * matmul(a, part)),
                    (gradients[0], rows), (gradients[1], 3 * matmul(rows, part.T)),
                    (gradients[2], 3 * matmul(a.T, rows)),
                ]
                eval(sums.map { $0.0 })
                for (i, (ours, theirs)) in sums.enumerated() {
                    #expect(ours.shape == theirs.shape)
                    // Both sides add in different orders, so their rounding differs.
                    let error = ((ours - theirs).square().sum() / theirs.square().sum()).sqrt()
                    #expect(error.item(Float.self) < 2e-6, "sum \(i) of \(m) rows")
                }
                #expect(sum.arrayEqual(kept).item(Bool.self))
            }
        }

        @Test func exponentials() {
            let values: [Float] =
                [-.infinity, -200, -88.1, -87, -0.5, -1e-7, 0, 0.3, 1, 12.5, 87, .infinity]
                + (0..<2021).map { Float($0) / 30 - 33 }
            let x = MLXArray(values)
            let e = exp(x).asArray(Float.self)
            let s = sigmoid(x).asArray(Float.self)
            for (i, value) in values.enumerated() {
                // MLX rounds x / ln 2, so the relative error of exp(x) grows with |x|. Below -88 the result is 0.
                let exact = value < -88 ? 0 : Float(Double(value).exponential)
                let bar = 5e-7 + 1.2e-7 * min(abs(value), 88)
                #expect(e[i] == exact || abs(e[i] - exact) <= bar * exact, "exp(\(value)) is \(e[i])")
                #expect(abs(s[i] - Float(1 / (1 + Double(-value).exponential))) < 2e-7, "sigmoid(\(value))")
            }
            #expect(exp(MLXArray([Float.nan])).item(Float.self).isNaN)

            let rows = MLXArray(Array(values[12...2031]), [5, 404])
            let z = exp(rows - rows.max(axis: -1, keepDims: true))
            let p = softmax(rows, axis: -1)
            #expect(abs(p - z / z.sum(axis: -1, keepDims: true)).max().item(Float.self) < 1e-6)

            func f(_ arguments: [MLXArray]) -> [MLXArray] {
                let x = arguments[0]
                return [(exp(x) * 2 + sigmoid(x)).sum() + (softmax(x, axis: -1) * x).sum()]
            }
            let here = MLXArray([0.1, -0.4, 0.7] as [Float])
            let gradients = vjp(f, primals: [here], cotangents: [MLXArray(Float(1))]).1
            // The expected values are central differences in double precision.
            expectClose(gradients[0], [2.684_175_6, 1.628_591, 4.977_070_5])
        }

        @Test func oneLongProduct() {
            let ones = MLXArray.ones([1, 1 << 23])
            expectClose(matmul(ones, ones.T), [8_388_608], [1, 1])
        }
    }
}
