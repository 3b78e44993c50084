import Foundation
import MLX
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPCore

/// DoRA, or LoRA with dropout, and the fixtures that have reference results for it.
enum AdapterVariant: String, CaseIterable {
    case dora, dropout

    /// The tolerance for another order of sums in float32.
    static let tolerance: Float = 1e-4

    func cases(_ all: [URL] = Fixture.cases) -> [URL] {
        all.filter {
            FileManager.default.fileExists(atPath: $0.appendingPathComponent("\(rawValue).safetensors").path)
        }
    }

    static func all(_ folders: [URL] = Fixture.cases) -> [(AdapterVariant, URL)] {
        allCases.flatMap { variant in variant.cases(folders).map { (variant, $0) } }
    }

    func fixture(_ folder: URL) throws -> Fixture { try Fixture(folder, rawValue) }

    func trainer(
        _ fixture: Fixture, _ method: GradientMethod = .mesp, plan: Plan = Plan(tileBytes: 1 << 20),
        _ change: (inout RunSettings) throws -> Void = { _ in }
    ) throws -> Trainer {
        let trainer = try fixture.trainer(method, plan: plan) {
            $0.dora = self == .dora
            if self == .dropout {
                $0.dropout = try fixture.number("dropout")
                $0.projections = fixture.bundle.architecture.trainableNames
            }
            try change(&$0)
        }
        if self == .dropout { try Self.drawMasks(of: fixture, trainer) }
        return trainer
    }

    /// Sets the step and the sequence of the fixture's masks.
    static func drawMasks(of fixture: Fixture, _ trainer: Trainer) throws {
        trainer.beginStep(Int(try fixture.number("step")))
        trainer.dropout?.sequences = Int(try fixture.number("sequence"))
    }

    func gradients(_ fixture: Fixture, plan: Plan = Plan(tileBytes: 1 << 20)) throws -> (Float, [Int: MLXArray]) {
        var gradients = [Int: MLXArray]()
        let loss = try fixture.backpropagate(trainer(fixture, plan: plan)) { gradients[$0] = $1 }
        return (loss, gradients)
    }

    func errors(_ gradient: MLXArray, _ expected: MLXArray, _ layout: LoRALayout) throws -> [String: Float] {
        var errors = [String: Float]()
        #expect(gradient.shape == expected.shape && gradient.size == layout.count)
        for module in layout.modules {
            let (ours, reference) = (layout.matrices(module, in: gradient), layout.matrices(module, in: expected))
            errors["\(module.name).A"] = relativeError(ours.a, reference.a)
            errors["\(module.name).B"] = relativeError(ours.b, reference.b)
            guard self == .dora else { continue }
            errors["\(module.name).m"] = relativeError(try #require(ours.m), try #require(reference.m))
        }
        return errors
    }

    func expectEqual(_ gradient: MLXArray, _ expected: MLXArray, _ layout: LoRALayout, _ block: Int) throws {
        for (name, error) in try errors(gradient, expected, layout) {
            #expect(error < Self.tolerance, "block \(block) \(name): \(error)")
        }
    }
}

@Suite(.serialized) struct AdapterVariantTests {
    private let tolerance = AdapterVariant.tolerance

    @Test(arguments: AdapterVariant.allCases) func fixturesAreThere(_ variant: AdapterVariant) {
        #expect(variant.cases().count > 30 && variant.cases(Fixture.roundedCases).count > 8)
    }

    @Test(arguments: AdapterVariant.all()) func gradientsEqualTheReference(_ variant: AdapterVariant, _ folder: URL)
        throws
    {
        let fixture = try variant.fixture(folder)
        let (loss, gradients) = try variant.gradients(fixture)
        #expect(relativeError(MLXArray([loss]), try fixture.array("loss")) < tolerance)
        #expect(gradients.count == fixture.layers)
        let layouts = try variant.trainer(fixture).model.layouts
        for (block, gradient) in gradients {
            try variant.expectEqual(gradient, fixture.array("grad.\(block)"), layouts[block], block)
        }
    }

    @Test(arguments: AdapterVariant.all()) func theyAreTheSameByAnyPlan(_ variant: AdapterVariant, _ folder: URL) throws
    {
        let fixture = try variant.fixture(folder)
        let (loss, expected) = try variant.gradients(fixture)
        let small = Plan(tileBytes: 1 << 10)
        var (kept, offloaded) = (Plan(tileBytes: 1 << 20), small)
        (kept.keptBlocks, offloaded.offload) = (fixture.layers, .all)
        let found = [
            "small": try variant.gradients(fixture, plan: small),
            "small, offloaded": try variant.gradients(fixture, plan: offloaded),
            "kept": try variant.gradients(fixture, plan: kept),
            "plain": try Processor.$cpu.withValue(.plainCPU) { try variant.gradients(fixture, plan: small) },
            "segments": try Schedule.$segmentTokens.withValue(4) { try variant.gradients(fixture) },
        ]
        for (name, (itsLoss, all)) in found {
            #expect(abs(itsLoss - loss) < 1e-5 * abs(loss), "\(name)")
            for (block, gradient) in all {
                #expect(relativeError(gradient, try #require(expected[block])) < tolerance, "\(name), block \(block)")
            }
        }
    }

    /// With DoRA, a gate with one output per head has few values, so its error varies more and its bound is larger.
    @Test(arguments: AdapterVariant.all(Fixture.roundedCases))
    func bfloat16CostsLittleMoreThanStoringIt(_ variant: AdapterVariant, _ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        let trainer = try variant.trainer(fixture)
        _ = try fixture.backpropagate(trainer) { block, gradient in
            let (exact, layout) = (try fixture.array("grad.\(block)"), trainer.model.layouts[block])
            let floor = try variant.errors(try fixture.array("floor.\(block)"), exact, layout)
            for (name, error) in try variant.errors(gradient, exact, layout) {
                let least = try #require(floor[name])
                let bar: Float = variant == .dora && name.contains("g_proj") ? 8 : 4
                #expect(error <= bar * least, "block \(block) \(name): \(error), floor \(least)")
            }
        }
    }

    @Test(arguments: AdapterVariant.all()) func lossesOfARunEqualTheReference(_ variant: AdapterVariant, _ folder: URL)
        throws
    {
        let fixture = try variant.fixture(folder)
        let stream = try #require(try fixture.bundle.tokens("train")).sequences(lengths: [fixture.length])
        let trainer = try variant.trainer(fixture) { $0.learningRate = try fixture.number("learning_rate") }
        for (step, expected) in try fixture.array("losses").asArray(Float.self).enumerated() {
            let loss = try trainer.step([SequenceLoss([stream.training(step, seed: 0)])], number: step).loss
            #expect(abs(loss - expected) < tolerance * expected, "step \(step): \(loss), \(expected)")
        }
    }
}
