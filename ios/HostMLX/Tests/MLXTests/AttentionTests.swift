import MLX
import Testing

extension AllTests {
    @Suite struct AttentionTests {
        private func random(_ shape: [Int], _ key: UInt64) -> MLXArray {
            MLXRandom.normal(shape, key: MLXRandom.key(key))
        }

        private func expected(_ x: [MLXArray], _ visible: MLXArray?) -> MLXArray {
            let (q, k, v) = (x[0], x[1].expandedDimensions(axis: 2), x[2].expandedDimensions(axis: 2))
            let byGroup = (q * Float(0.3)).reshaped([1, k.dim(1), -1, q.dim(2), q.dim(3)])
            var scores = matmul(byGroup, k.swappedAxes(-1, -2))
            if let visible { scores = which(visible, scores, -Float.infinity) }
            return matmul(softmax(scores, axis: -1), v).reshaped(q.shape)
        }

        @Test(arguments: [1, 3, 17, 300], [16, 24]) func fewQueries(length: Int, d: Int) {
            let (k, v) = (random([1, 2, length + 5, d], 1), random([1, 2, length + 5, d], 2))
            for queries in [1, 2] {
                let q = random([1, 6, queries, d], 3)
                let (k, v) = (k[0..., 0..., 2..<length + 2], v[0..., 0..., 2..<length + 2])
                let visible = queries > 1 ? MLXArray.arange(2)[0..., .newAxis] .>= MLXArray.arange(length) % 3 : nil
                let mask = visible.map { which($0, Float(0), -Float.infinity) }
                let y = MLXFast.scaledDotProductAttention(
                    queries: q, keys: k, values: v, scale: Float(0.3), mask: mask.map { .array($0) } ?? .none)
                #expect(abs(y - expected([q, k, v], visible)).max().item(Float.self) <= 1e-5)
            }
        }

        @Test(arguments: [
            (heads: 4, groups: 1, n: 5, keys: 5, d: 16), (6, 2, 33, 70, 32), (14, 2, 130, 257, 16), (3, 3, 64, 400, 64),
            (18, 2, 17, 129, 24), (1, 1, 2, 2100, 8),
            (4, 2, 1, 9, 24),
        ])
        func valuesAndGradients(_ size: (heads: Int, groups: Int, n: Int, keys: Int, d: Int)) {
            let (n, keys, d) = (size.n, size.keys, size.d)
            let x = [
                random([1, n, size.heads, d], 1).swappedAxes(1, 2),
                random([1, size.groups, keys + 3, d], 2)[0..., 0..., 3...],
                random([1, size.groups, keys, d], 3),
            ]
            let dy = random([1, n, size.heads, d], 4).swappedAxes(1, 2)
            let (queries, positions) = (MLXArray.arange(keys - n, keys)[0..., .newAxis], MLXArray.arange(keys))
            let causal = queries .>= positions
            let window = logicalAnd(causal, queries .< positions + 40)
            let masks: [(MLXFast.ScaledDotProductAttentionMaskMode, MLXArray?)] = [
                (.none, nil), (.causal, causal), (.array(window), window),
            ]
            for (mode, visible) in masks {
                let (y, gradients) = vjp(
                    {
                        [
                            MLXFast.scaledDotProductAttention(
                                queries: $0[0], keys: $0[1], values: $0[2], scale: Float(0.3), mask: mode)
                        ]
                    }, primals: x, cotangents: [dy])
                let (right, derivatives) = vjp({ [expected($0, visible)] }, primals: x, cotangents: [dy])
                for (a, b) in zip(y + gradients, right + derivatives) {
                    #expect(a.shape == b.shape)
                    // The sums have up to 2,100 terms, and their order differs from the order in the formulas.
                    #expect(abs(a - b).max().item(Float.self) <= 1e-5 * max(1, abs(b).max().item(Float.self)))
                }
            }
        }

        @Test func extremeScores() {
            let (q, k, v) = (
                random([1, 2, 20, 16], 1) * Float(100), random([1, 1, 20, 16], 2) * Float(100),
                random([1, 1, 20, 16], 3)
            )
            let visible = MLXArray.arange(20)[0..., .newAxis] .>= MLXArray.arange(20)
            func y(_ q: MLXArray) -> MLXArray {
                MLXFast.scaledDotProductAttention(queries: q, keys: k, values: v, scale: Float(0.3), mask: .causal)
            }
            #expect(abs(y(q) - expected([q, k, v], visible)).max().item(Float.self) <= 1e-5)
            q[0..., 1..<2, 7..<8, 3..<4] = MLXArray.full([1, 1, 1, 1], values: MLXArray(Float.nan))
            let numbers = y(q).asArray(Float.self)
            let wrong = numbers.indices.filter { numbers[$0].isNaN }
            #expect(wrong == Array((20 + 7) * 16..<(20 + 8) * 16))
        }
    }
}
