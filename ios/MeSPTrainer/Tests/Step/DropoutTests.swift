import Foundation
import MLX
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct DropoutTests {
    private static let cases = Fixture.cases.filter(hasDropout)
    private static let roundedCases = Fixture.roundedCases.filter(hasDropout)

    private static func hasDropout(_ folder: URL) -> Bool {
        FileManager.default.fileExists(atPath: folder.appendingPathComponent("dropout.safetensors").path)
    }

    /// The tolerance for another order of sums in float32.
    private let tolerance: Float = 1e-4

    private func trainer(
        _ fixture: Fixture, plan: Plan = Plan(tileBytes: 1 << 20),
        _ change: (inout RunSettings) throws -> Void = { _ in }
    ) throws -> Trainer {
        let trainer = try fixture.trainer(.mesp, plan: plan) {
            $0.dropout = try fixture.number("dropout")
            $0.projections = fixture.bundle.architecture.trainableNames
            try change(&$0)
        }
        trainer.beginStep(Int(try fixture.number("step")))
        trainer.dropout?.sequences = Int(try fixture.number("sequence"))
        return trainer
    }

    private func gradients(_ fixture: Fixture, plan: Plan = Plan(tileBytes: 1 << 20)) throws -> (Float, [Int: MLXArray])
    {
        var gradients = [Int: MLXArray]()
        let loss = try fixture.backpropagate(trainer(fixture, plan: plan)) { gradients[$0] = $1 }
        return (loss, gradients)
    }

    private func errors(_ gradient: MLXArray, _ expected: MLXArray, _ layout: LoRALayout) -> [String: Float] {
        var errors = [String: Float]()
        for module in layout.modules {
            let (ours, reference) = (layout.matrices(module, in: gradient), layout.matrices(module, in: expected))
            errors["\(module.name).A"] = relativeError(ours.a, reference.a)
            errors["\(module.name).B"] = relativeError(ours.b, reference.b)
        }
        return errors
    }

    @Test func fixturesAreThere() { #expect(Self.cases.count > 30 && Self.roundedCases.count > 8) }

    @Test(arguments: cases) func masksAreTheReferences(_ folder: URL) throws {
        let fixture = try Fixture(folder, "dropout")
        let key = try #require(trainer(fixture).dropout).key[Int(fixture.number("sequence"))]
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

    @Test(arguments: cases) func gradientsEqualTheReference(_ folder: URL) throws {
        let fixture = try Fixture(folder, "dropout")
        let (loss, gradients) = try gradients(fixture)
        #expect(relativeError(MLXArray([loss]), try fixture.array("loss")) < tolerance)
        #expect(gradients.count == fixture.layers)
        let layouts = try trainer(fixture).model.layouts
        for (block, gradient) in gradients {
            for (name, error) in errors(gradient, try fixture.array("grad.\(block)"), layouts[block]) {
                #expect(error < tolerance, "block \(block) \(name): \(error)")
            }
        }
    }

    @Test(arguments: cases) func theyAreTheSameByAnyPlan(_ folder: URL) throws {
        let fixture = try Fixture(folder, "dropout")
        let (loss, expected) = try gradients(fixture)
        var kept = Plan(tileBytes: 1 << 20)
        kept.keptBlocks = fixture.layers
        let found = [
            "small": try gradients(fixture, plan: Plan(tileBytes: 1 << 10)), "kept": try gradients(fixture, plan: kept),
            "plain": try Processor.$cpu.withValue(.plainCPU) { try gradients(fixture, plan: Plan(tileBytes: 1 << 10)) },
            "segments": try Schedule.$segmentTokens.withValue(4) { try gradients(fixture) },
        ]
        for (name, (itsLoss, all)) in found {
            #expect(abs(itsLoss - loss) < 1e-5 * abs(loss), "\(name)")
            for (block, gradient) in all {
                #expect(relativeError(gradient, try #require(expected[block])) < tolerance, "\(name), block \(block)")
            }
        }
    }

    @Test(arguments: cases) func packedRecordsToo(_ folder: URL) throws {
        let fixture = try Fixture(folder, "dropout")
        let start = Int(try fixture.array("starts").asArray(Int32.self)[1])
        let tokens = try fixture.array("tokens").asArray(Int32.self)
        let example = Example(
            tokens: tokens, counted: (0..<fixture.length).filter { $0 != start - 1 },
            records: [0..<start, start..<fixture.length])
        let trainer = try trainer(fixture)
        try fixture.restore(trainer)
        var gradients = [Int: MLXArray]()
        let weight = 1 / Float(example.counted.count)
        let loss = try trainer.backpropagate([(example: example, weight: weight)]) { gradients[$0] = $1 }
        #expect(relativeError(MLXArray([loss]), try fixture.array("packed.loss")) < tolerance)
        for (block, gradient) in gradients {
            let expected = try fixture.array("packed.grad.\(block)")
            for (name, error) in errors(gradient, expected, trainer.model.layouts[block]) {
                #expect(error < tolerance, "block \(block) \(name): \(error)")
            }
        }
    }

    @Test(arguments: roundedCases) func bfloat16CostsLittleMoreThanStoringIt(_ folder: URL) throws {
        let fixture = try Fixture(folder, "dropout")
        let trainer = try trainer(fixture)
        _ = try fixture.backpropagate(trainer) { block, gradient in
            let (exact, layout) = (try fixture.array("grad.\(block)"), trainer.model.layouts[block])
            let floor = errors(try fixture.array("floor.\(block)"), exact, layout)
            for (name, error) in errors(gradient, exact, layout) {
                let least = try #require(floor[name])
                #expect(error <= 4 * least, "block \(block) \(name): \(error), floor \(least)")
            }
        }
    }

    @Test(arguments: cases) func lossesOfARunEqualTheReference(_ folder: URL) throws {
        let fixture = try Fixture(folder, "dropout")
        let stream = try #require(try fixture.bundle.tokens("train")).sequences(lengths: [fixture.length])
        let trainer = try trainer(fixture) { $0.learningRate = try fixture.number("learning_rate") }
        for (step, expected) in try fixture.array("losses").asArray(Float.self).enumerated() {
            let loss = try trainer.step([SequenceLoss([stream.training(step, seed: 0)])], number: step).loss
            #expect(abs(loss - expected) < tolerance * expected, "step \(step): \(loss), \(expected)")
        }
    }
}
