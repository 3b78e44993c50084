import Foundation
import MLX
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct DropoutTests {
    private static let cases = AdapterVariant.dropout.cases()
    private let variant = AdapterVariant.dropout

    @Test(arguments: cases) func masksAreTheReferences(_ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        let key = try #require(variant.trainer(fixture).dropout).key[Int(fixture.number("sequence"))]
        let rate = try fixture.number("dropout")
        var count = 0
        for (index, layer) in fixture.bundle.architecture.layers.indices.flatMap({ i in (0..<12).map { (i, $0) } }) {
            let name = "mask.\(index).\(layer)"
            guard fixture.has(name) else { continue }
            let mask = try fixture.array(name)
            count += 1
            let layerKey = key[index][layer]
            let masks: [(MLXArray, DropoutKey)] =
                mask.ndim == 2 ? [(mask, layerKey)] : (0..<mask.dim(0)).map { (mask[$0], layerKey[1 + $0]) }
            for (mask, key) in masks {
                let ones = MLXArray.ones(mask.shape)
                let dropout = Dropout(key: key)
                let (t, j) = (1..<mask.dim(0) - 1, 3..<mask.dim(1) - 2)
                let expected = mask * (1 - rate)
                func isEqual(_ a: MLXArray, _ b: MLXArray) -> Bool { abs(a - b).max().item(Float.self) < 1e-6 }
                #expect(isEqual(dropout(ones), expected), "\(index).\(layer)")
                #expect(isEqual(dropout.rows(t).inputs(j)(ones[t, j]), expected[t, j]))
                let listed = Dropout(key: key, tokens: [2, 0, 5])
                #expect(isEqual(listed(ones[0..<3]), expected.take(MLXArray([2, 0, 5] as [Int32]), axis: 0)))
                #expect(isEqual(listed.rows(1..<3)(ones[0..<2]), expected.take(MLXArray([0, 5] as [Int32]), axis: 0)))
            }
        }
        #expect(count > 3)
        for p: Float in [0.05, 0.5, 0.9] {
            let key = DropoutKey(rate: p, seed: UInt64(0))[Int(try fixture.number("step"))][
                Int(try fixture.number("sequence"))]
            let mask = try fixture.array("masks.\(p)")
            let kept = Dropout(key: key[0][0])(MLXArray.ones(mask.shape))
            #expect(kept.arrayEqual((mask .> Float(0)).asType(.float32)).item(Bool.self), "p = \(p)")
        }
    }

    @Test(arguments: cases) func packedRecordsToo(_ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        let start = Int(try fixture.array("starts").asArray(Int32.self)[1])
        let tokens = try fixture.array("tokens").asArray(Int32.self)
        let example = Example(
            tokens: tokens, counted: (0..<fixture.length).filter { $0 != start - 1 },
            records: [0..<start, start..<fixture.length])
        let trainer = try variant.trainer(fixture)
        try fixture.restore(trainer)
        var gradients = [Int: MLXArray]()
        let weight = 1 / Float(example.counted.count)
        let loss = try trainer.backpropagate([(example: example, weight: weight)]) { gradients[$0] = $1 }
        try fixture.expectEqual(Gradients(loss: loss, blocks: gradients), trainer, prefix: "packed.")
    }
}
