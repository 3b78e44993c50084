import Foundation
import MLX
import Testing

extension AllTests {
    @Suite struct RowTests {
        private let f: ([MLXArray]) -> [MLXArray] = { x in
            let (a, row, column, scalar) = (x[0], x[1], x[2], x[3])
            let sigma = sigmoid(a * column) - exp(-abs(row)) / (scalar + a.square())
            return [tanh(maximum(sigma, row)) * rsqrt(a.square() + scalar) + a]
        }

        @Test(arguments: [[1, 1], [7, 300], [300, 7], [3, 5, 1_000], [2, 70_000], [40, 1]])
        func fusedOperationsGiveTheSameNumbers(shape: [Int]) {
            let a = MLXRandom.normal(shape, key: MLXRandom.key(1))
            let row = MLXRandom.normal([shape[shape.count - 1]], key: MLXRandom.key(2))
            let column = MLXRandom.normal(Array(shape.dropLast()) + [1], key: MLXRandom.key(3))
            for inputs in [
                [a, a + 1, a - 1, MLXArray(Float(0.5))], [a, row, column, MLXArray(Float(0.5))],
                [a.swappedAxes(0, 1), a.swappedAxes(0, 1), MLXArray(Float(2)), MLXArray([0.25] as [Float])],
            ] {
                let (fused, plain) = (compile(f)(inputs)[0], f(inputs)[0])
                #expect(fused.shape == plain.shape)
                #expect(fused.asArray(Float.self) == plain.asArray(Float.self))
            }
            #expect(!f([a, row, column, MLXArray(Float(0.5))])[0].asArray(Float.self).contains { $0.isNaN })
        }

        @Test(arguments: [[1, 1], [7, 300], [300, 7], [3, 5, 1_000], [2, 3, 40, 130]])
        func fusedReductionsOverRows(shape: [Int]) {
            let x = MLXRandom.normal(shape, key: MLXRandom.key(1)) * 4
            let length = shape[shape.count - 1]
            let isLast = MLXArray.arange(length) .>= MLXArray(Int32(length / 2 + 1))
            let mask = which(isLast, -Float.infinity, Float(0))
            let f: ([MLXArray]) -> [MLXArray] = {
                let masked = $0[0] + $0[1]
                let e = exp(masked - masked.max(axis: -1, keepDims: true))
                return [e / e.sum(axis: -1, keepDims: true)]
            }
            let dy = MLXRandom.normal(shape, key: MLXRandom.key(2))
            let g: ([MLXArray]) -> [MLXArray] = { [$0[0] * ($0[1] - ($0[0] * $0[1]).sum(axis: -1, keepDims: true))] }
            let y = f([x, mask])[0]
            for (fused, plain) in [
                (compile(f)([x, mask])[0], y), (compile(f)([x, mask])[0], softmax(x + mask, axis: -1)),
                (compile(g)([y, dy])[0], g([y, dy])[0]),
            ] {
                #expect(fused.shape == plain.shape)
                // Both sides sum at most 1,000 numbers, in different orders, so their last digits differ.
                #expect((fused - plain).abs().max().item(Float.self) < 2e-6)
            }
            #expect(compile(f)([x, mask])[0].asArray(Float.self) == compile(f)([x, mask])[0].asArray(Float.self))
            let one = MLXRandom.normal(Array(shape.dropLast()) + [1], key: MLXRandom.key(3))
            let largest: ([MLXArray]) -> [MLXArray] = { [maximum($0[0], $0[1].max(axis: -1, keepDims: true))] }
            let total: ([MLXArray]) -> [MLXArray] = { [$0[0] * $0[0] + exp($0[1]).sum(axis: -1, keepDims: true)] }
            #expect(compile(largest)([one, x])[0].asArray(Float.self) == largest([one, x])[0].asArray(Float.self))
            let (fused, plain) = (compile(total)([one, y])[0], total([one, y])[0])
            #expect(fused.shape == plain.shape)
            // Both sides sum positive numbers in different orders, so the bar is for the relative difference.
            #expect(((fused - plain) / plain).abs().max().item(Float.self) < 2e-6)
        }

        @Test func reductionsOverColumnsAreNotFused() {
            let x = MLXRandom.normal([6, 6], key: MLXRandom.key(1))
            let f: ([MLXArray]) -> [MLXArray] = { [$0[0] - $0[0].sum(axis: 0, keepDims: true) + $0[0].max()] }
            #expect(compile(f)([x])[0].asArray(Float.self) == f([x])[0].asArray(Float.self))
        }

        @Test func fusedOperationsReadTheirInputsAfterwards() {
            let x = MLXRandom.normal([4, 100], key: MLXRandom.key(1))
            let g = compile { (x: [MLXArray]) in [x[0] * 2 + x[0]] }
            let y = g([x])[0]
            // Nothing else uses the inner result, so the outer call may reuse its memory.
            let z = g([g([x])[0]])[0]
            eval(y, z)
            #expect(y.asArray(Float.self) == (x * 2 + x).asArray(Float.self))
            #expect(z.asArray(Float.self) == (y * 2 + y).asArray(Float.self))
        }

        @Test func otherTypesAreComputedAsTheyAre() {
            let x = MLXRandom.normal([4, 100], key: MLXRandom.key(1)).asType(.bfloat16)
            let g: ([MLXArray]) -> [MLXArray] = { [($0[0] * 3 + $0[0]).asType(.float32) * 2] }
            #expect(compile(g)([x])[0].asArray(Float.self) == g([x])[0].asArray(Float.self))
        }

        @Test func derivativesOfFusedOperations() {
            let x = MLXRandom.normal([3, 50], key: MLXRandom.key(1))
            let g: ([MLXArray]) -> [MLXArray] = { [sigmoid($0[0]) * $0[0].square()] }
            let cotangent = MLXArray.ones([3, 50])
            let fused = vjp(compile(g), primals: [x], cotangents: [cotangent]).1[0]
            #expect(fused.asArray(Float.self) == vjp(g, primals: [x], cotangents: [cotangent]).1[0].asArray(Float.self))
        }

        @Test(arguments: [[1, 16], [300, 576], [3, 40, 100]]) func norms(shape: [Int]) {
            let x = MLXRandom.normal(shape, key: MLXRandom.key(1)) * 3
            let weight = MLXRandom.normal([shape[shape.count - 1]], key: MLXRandom.key(2))
            for x in [x, contiguous(x.swappedAxes(0, 1)).swappedAxes(0, 1)] {
                let y = MLXFast.rmsNorm(x, weight: weight, eps: Float(1e-5))
                let expected = x * rsqrt(x.square().mean(axis: -1, keepDims: true) + Float(1e-5)) * weight
                #expect(abs(y - expected).max().item(Float.self) <= 1e-6 * abs(expected).max().item(Float.self))
            }
        }

        /// Compares HostMLX's RoPE with MLX's own implementation, which runs inside `vjp`.
        @Test(arguments: [0, 16_000]) func rotations(offset: Int) {
            let x = MLXRandom.normal([1, 3, 40, 24], key: MLXRandom.key(1))
            let frequencies = MLXArray((0..<8).map { Float(pow(10_000.0, Double($0) / 8)) })
            func rope(_ x: MLXArray) -> MLXArray {
                MLXFast.RoPE(
                    x, dimensions: 16, traditional: false, base: nil, scale: 1, offset: offset, freqs: frequencies)
            }
            for x in [x, contiguous(x.swappedAxes(1, 2)).swappedAxes(1, 2)] {
                let own = rope(x)
                let mlx = vjp({ [rope($0[0])] }, primals: [x], cotangents: [x]).0[0]
                #expect(abs(own - mlx).max().item(Float.self) < 1e-6)
            }
        }

        @Test func rotationsOfSeveral() {
            let x = MLXRandom.normal([3, 4, 2, 24], key: MLXRandom.key(1))
            let frequencies = MLXArray((0..<8).map { Float(pow(10_000.0, Double($0) / 8)) })
            func rope(_ x: MLXArray, _ offset: Int) -> MLXArray {
                MLXFast.RoPE(
                    x, dimensions: 16, traditional: false, base: nil, scale: 1, offset: offset, freqs: frequencies)
            }
            let offsets = [0, 7, 16_000]
            let together = MLXFast.RoPE(
                x, dimensions: 16, traditional: false, base: nil, scale: 1,
                offset: MLXArray(offsets.map { Int32($0) }), freqs: frequencies)
            for (i, offset) in offsets.enumerated() {
                #expect(together[i].asArray(Float.self) == rope(x[i..<i + 1], offset).asArray(Float.self))
            }
        }

        @Test func replacedElements() {
            let x = MLXArray.zeros([2, 4, 3])
            let other = x[.ellipsis]
            x[0..., 1..<3] = MLXArray.ones([2, 2, 3])
            x[1..., 3...] = MLXArray.full([1, 1, 3], values: MLXArray(Float(2)))
            #expect(other.sum().item(Float.self) == 0)
            #expect(x.sum().item(Float.self) == 18)
            #expect(x[1, 3].asArray(Float.self) == [2, 2, 2])
        }
    }
}
