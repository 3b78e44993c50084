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

    static let mixtures = Fixture.cases.filter { $0.lastPathComponent.contains("moe") }

    /// Calls `body` with a block's experts, the input x `[1, hidden]`, and a function that returns the mixture's output and dx for dy = x, added to dx.
    private func withExperts(
        _ folder: URL,
        _ body: (
            _ weights: BlockWeights, _ experts: Experts, _ x: MLXArray,
            _ both: (_ weights: BlockWeights, _ x: MLXArray, _ dx: MLXArray) throws -> [MLXArray]
        ) throws -> Void
    ) throws {
        let fixture = try Fixture(folder, "gradients")
        let model = try fixture.trainer(.mesp).model
        let index = try #require(model.blocks.first { fixture.bundle.architecture.block($0).mlp.experts != nil })
        let x = MLXRandom.normal([1, fixture.bundle.architecture.hiddenSize], key: MLXRandom.key(3))
        try fixture.bundle.withBlock(index) { weights in
            let experts = try #require(weights.shape.mlp.experts)
            try body(weights, experts, x) { weights, x, dx in
                let block = try model.block(index, weights, x)
                var (dx, gradients) = (dx, LoRAGradients())
                block.mixtureOfExpertsBackward(experts, x, dy: x, addedTo: &dx, &gradients)
                return [block.mixtureOfExperts(experts, x), dx]
            }
        }
    }

    @Test(arguments: mixtures) func anExpertWithoutTokensIsNotRead(_ folder: URL) throws {
        try withExperts(folder) { weights, experts, x, both in
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
            let zeros = MLXArray.zeros(x.shape)
            for (found, expected) in zip(try both(damaged, x, zeros), try both(weights, x, zeros)) {
                #expect(found.arrayEqual(expected).item(Bool.self))
            }
        }
    }

    @Test(arguments: mixtures) func anExpertOfManyTokensTakesThemInParts(_ folder: URL) throws {
        try withExperts(folder) { weights, _, one, both in
            let all = one + MLXArray.zeros([150, one.dim(1)])
            for (found, expected) in zip(try both(weights, all, 2 * all), try both(weights, one, 2 * one)) {
                #expect(relativeError(found, expected + MLXArray.zeros(found.shape)) < 1e-5)
            }
        }
    }
}
