import MLX
import Testing

@testable import MeSPCore

@Suite(.serialized) struct ShortConvolutionTests {
    private let short = CausalConvolution(weight: MLXRandom.normal([6, 3], key: MLXRandom.key(0)))

    private func inputs(_ length: Int) -> [MLXArray] {
        MLXRandom.split(key: MLXRandom.key(1), into: 4).map { MLXRandom.normal([length, 6], key: $0) }
    }

    private func sequential(_ inputs: [MLXArray]) -> MLXArray {
        let (x, w): (MLXArray, MLXArray) = (inputs[0] * inputs[2], short.weight)
        var rows = [MLXArray]()
        for t in 0..<x.dim(0) {
            var sum = MLXArray.zeros([6])
            for j in 0..<3 where t - 2 + j >= 0 { sum = sum + x[t - 2 + j] * w[0..., j] }
            rows.append(sum)
        }
        return inputs[1] * stacked(rows)
    }

    @Test(arguments: [1, 2, 3, 17]) func equalsTheSequentialForm(_ length: Int) {
        let x = inputs(length)
        let (y, expected) = vjp({ [sequential($0)] }, primals: x[0..<3], cotangents: [x[3]])
        var tail = short.start(dtype: .float32)
        let convOut = short(b: x[0], u: x[2], tail: &tail)
        let d = short.backward(b: x[0], c: x[1], u: x[2], convOut: convOut, dy: x[3])
        for (found, expected) in zip([short.gated(convOut: convOut, c: x[1]), d.db, d.dc, d.du], y + expected) {
            #expect(found.shape == expected.shape && relativeError(found, expected) < 1e-6)
        }
    }

    @Test(arguments: [[1, 1, 1, 14], [16, 1], [2, 15]]) func piecesEqualTheWhole(_ pieces: [Int]) {
        let x = inputs(17)
        func run(_ pieces: [Int]) -> (convOut: MLXArray, tail: MLXArray) {
            var (tail, start) = (short.start(dtype: .float32), 0)
            let outputs = pieces.map { count in
                let rows = start..<start + count
                start += count
                return short(b: x[0][rows], u: x[2][rows], tail: &tail)
            }
            return (concatenated(outputs), tail)
        }
        let (whole, cut) = (run([17]), run(pieces))
        #expect(relativeError(cut.convOut, whole.convOut) < 1e-6)
        #expect(cut.tail.shape == [2, 6] && all(cut.tail .== whole.tail).item())
    }
}
