import Foundation
import MLX
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct RouterTests {
    static let scores = [Experts.Scores.softmax, .sigmoid]

    private func experts(_ scores: Experts.Scores) -> Experts {
        Experts(
            router: "gate", matrices: "experts", scores: scores, bias: nil, numExperts: 4, numExpertsPerTok: 2,
            intermediateSize: 1, scaling: 1.5, mlpGate: nil)
    }

    @Test(arguments: scores) func theDerivativeIsThatOfTheWeights(_ scores: Experts.Scores) {
        let experts = experts(scores)
        let keys = MLXRandom.split(key: MLXRandom.key(0), into: 2)
        let (z, dw) = (MLXRandom.normal([7, 2], key: keys[0]), MLXRandom.normal([7, 2], key: keys[1]))
        let (_, expected) = vjp({ [experts.weights($0[0])] }, primals: [z], cotangents: [dw])
        #expect(relativeError(experts.weightsBackward(z, dw: dw), expected[0]) < 1e-5)
    }

    @Test(arguments: scores) func tiesGoToTheFirst(_ scores: Experts.Scores) {
        let z = MLXArray([1, 2, 2, 2, 0, 0, 0, 0] as [Float], [2, 4])
        #expect(experts(scores).chosen(z, bias: nil).asType(.int32).asArray(Int32.self) == [1, 2, 0, 1])
    }

    @Test func theBiasChoosesAndWeighsNothing() {
        let experts = experts(.sigmoid)
        let z = MLXArray.zeros([1, 4])
        #expect(
            experts.chosen(z, bias: MLXArray([0, 0, 1, 2] as [Float])).asType(.int32).asArray(Int32.self) == [3, 2])
        #expect(experts.weights(z[0..., 0..<2]).asArray(Float.self).allSatisfy { abs($0 - 0.75) < 1e-5 })
    }

    @Test(arguments: Fixture.cases.filter { $0.lastPathComponent.contains("moe") })
    func anExpertWithoutTokensIsNotRead(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        let model = try fixture.trainer(.mesp).model
        let block = try #require(
            model.blocks.first { fixture.bundle.architecture.block($0).mlp.experts != nil })
        let hidden = fixture.bundle.architecture.hiddenSize
        let x = MLXRandom.normal([1, hidden], key: MLXRandom.key(3))
        try fixture.bundle.withBlock(block) { weights in
            let experts = try #require(weights.shape.mlp.experts)
            let chosen = weights.chosen(experts, weights.router(experts).apply(x))
            let numbers = Set(chosen.asType(.int32).asArray(Int32.self).map(Int.init))
            #expect(numbers.count == experts.numExpertsPerTok)

            let words = weights.packed.words + UInt32(0)
            for array in weights.packed.arrays where array.stride != nil && array.name.hasSuffix("scales") {
                for number in 0..<experts.numExperts where !numbers.contains(number) {
                    let range = array.range(number)
                    words[range] = MLXArray(Array(repeating: Float.nan.bitPattern, count: range.count))
                }
            }
            let damaged = BlockWeights(
                shape: weights.shape,
                packed: PackedWeights(words: words, arrays: weights.packed.arrays, backend: .cpu))
            func both(_ weights: BlockWeights) throws -> [MLXArray] {
                let block = try model.block(block, weights, x)
                var (dx, gradients) = (MLXArray.zeros(x.shape), LoRAGradients())
                block.mixtureOfExpertsBackward(experts, x, dy: x, addedTo: &dx, &gradients)
                return [block.mixtureOfExperts(experts, x), dx]
            }
            for (found, expected) in zip(try both(damaged), try both(weights)) {
                #expect(found.arrayEqual(expected).item(Bool.self))
            }
        }
    }

    @Test(arguments: Fixture.cases.filter { $0.lastPathComponent.contains("moe") })
    func anExpertOfManyTokensTakesThemInParts(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        let model = try fixture.trainer(.mesp).model
        let block = try #require(
            model.blocks.first { fixture.bundle.architecture.block($0).mlp.experts != nil })
        let hidden = fixture.bundle.architecture.hiddenSize
        let one = MLXRandom.normal([1, hidden], key: MLXRandom.key(3))
        let all = one + MLXArray.zeros([150, hidden])
        try fixture.bundle.withBlock(block) { weights in
            let experts = try #require(weights.shape.mlp.experts)
            func both(_ x: MLXArray) throws -> [MLXArray] {
                let block = try model.block(block, weights, x)
                var (dx, gradients) = (2 * x, LoRAGradients())
                block.mixtureOfExpertsBackward(experts, x, dy: x, addedTo: &dx, &gradients)
                return [block.mixtureOfExperts(experts, x), dx]
            }
            for (found, expected) in zip(try both(all), try both(one)) {
                #expect(relativeError(found, expected + MLXArray.zeros(found.shape)) < 1e-5)
            }
        }
    }
}
