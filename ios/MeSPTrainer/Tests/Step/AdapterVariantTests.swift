import Foundation
import MLX
import Testing

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

    func gradients(_ fixture: Fixture, plan: Plan = Plan(tileBytes: 1 << 20)) throws -> Gradients {
        try fixture.gradients(trainer(fixture, plan: plan))
    }
}

@Suite(.serialized) struct AdapterVariantTests {
    private let tolerance = AdapterVariant.tolerance

    @Test(arguments: AdapterVariant.allCases) func fixturesAreThere(_ variant: AdapterVariant) {
        #expect(variant.cases().count > 30 && variant.cases(Fixture.roundedCases).count > 8)
    }

    @Test(arguments: AdapterVariant.all())
    func gradientsEqualTheReference(_ variant: AdapterVariant, _ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        let trainer = try variant.trainer(fixture)
        try fixture.expectEqual(fixture.gradients(trainer), trainer)
    }

    @Test(arguments: AdapterVariant.all()) func theyAreTheSameByAnyPlan(_ variant: AdapterVariant, _ folder: URL) throws
    {
        let fixture = try variant.fixture(folder)
        let expected = try variant.gradients(fixture)
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
        for (name, gradients) in found { try gradients.expectEqual(expected, name) }
    }

    /// With DoRA, a gate with one output per head has few values, so its error varies more and its bound is larger.
    @Test(arguments: AdapterVariant.all(Fixture.roundedCases))
    func bfloat16CostsLittleMoreThanStoringIt(_ variant: AdapterVariant, _ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        _ = try fixture.expectRounded(variant.trainer(fixture)) { variant == .dora && $0.contains("g_proj") ? 8 : 4 }
    }

    @Test(arguments: AdapterVariant.all())
    func lossesOfARunEqualTheReference(_ variant: AdapterVariant, _ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        let trainer = try variant.trainer(fixture) { $0.learningRate = try fixture.number("learning_rate") }
        let expected = try fixture.array("losses").asArray(Float.self)
        try fixture.expectLosses(expected, tolerance) { try trainer.step([$0], number: $1).loss }
    }
}
