import Foundation
import MLX
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct TrainedParametersTests {
    struct Part: Sendable, CustomTestStringConvertible {
        let testDescription: String
        var projections: [Projection]?
        var numLayers: Int?
        var freezesA = false

        func choose(_ settings: inout RunSettings, of architecture: Architecture) {
            (settings.numLayers, settings.freezeA) = (numLayers, freezesA)
            settings.projections = projections.map { projections in
                architecture.modules.filter { $0.projections.contains(where: projections.contains) }.map(\.shortName)
            }
        }
    }

    private static let parts = [
        Part(testDescription: "B alone", freezesA: true),
        Part(testDescription: "some projections", projections: [.q, .v, .qkv, .in, .up]),
        Part(testDescription: "down alone", projections: [.down]),
        Part(
            testDescription: "the last block, B of some projections", projections: [.o, .out, .gate], numLayers: 1,
            freezesA: true),
    ]

    private func parameters(_ fixture: Fixture, _ layouts: [LoRALayout]) throws -> [MLXArray] {
        try layouts.enumerated().map { block, layout in
            let (whole, vector) = (layout.whole, try fixture.array("lora.\(block)"))
            return whole.packed(
                whole.modules.map { module in
                    let each = whole.matrices(module, in: vector)
                    return layout.modules.contains(module)
                        ? each : LoRAMatrices(a: each.a, b: MLXArray.zeros(like: each.b))
                })
        }
    }

    @Test(arguments: Fixture.cases, parts)
    func gradientsAreThoseOfARunThatTrainsAll(_ folder: URL, _ part: Part) throws {
        let fixture = try Fixture(folder, "gradients")
        let isPlain = folder.lastPathComponent.hasPrefix("tied")
        for method in isPlain ? [GradientMethod.mesp, .mebp] : [.mesp] {
            let all = try fixture.trainer(method)
            let some = try fixture.trainer(method) { part.choose(&$0, of: fixture.bundle.architecture) }
            let layouts = some.model.lora.layouts
            for (block, vector) in try parameters(fixture, layouts).enumerated() {
                try all.model.lora.vectors.write(vector, block)
                if layouts[block].count > 0 {
                    try some.model.lora.vectors.write(layouts[block].part(of: vector), block)
                }
            }
            func gradients(_ trainer: Trainer) throws -> (loss: Float, gradients: [Int: MLXArray]) {
                var gradients = [Int: MLXArray]()
                let part = (example: try fixture.example(), weight: 1 / Float(fixture.length))
                let loss = try trainer.backpropagate([part]) { gradients[$0] = $1 }
                return (loss, gradients)
            }
            let (expected, found) = (try gradients(all), try gradients(some))
            #expect(found.loss == expected.loss)
            #expect(found.gradients.keys.sorted() == some.model.lora.trained)
            for (block, gradient) in found.gradients {
                let whole = try #require(expected.gradients[block])
                let right = layouts[block].trained(in: layouts[block].part(of: whole))
                #expect(gradient.shape == [layouts[block].trainedCount])
                // OpenBLAS can sum float32 numbers in another order.
                #expect(relativeError(gradient, right) < 1e-6, "\(method), block \(block)")
            }
        }
    }

    /// The blocks between those that a step updates only pass dx on, and those below cost nothing.
    @Test(arguments: Fixture.cases, ["plain", "kept", "offloaded", "together", "dropout", "dora", "B alone"])
    func drawnBlocksHaveTheGradientsOfARunThatUpdatesAll(_ folder: URL, _ kind: String) throws {
        let fixture = try Fixture(folder, "gradients")
        var plan = Plan(tileBytes: 1 << 20)
        (plan.keptBlocks, plan.offload) = (kind == "kept" ? fixture.layers : 0, kind == "offloaded" ? .all : .none)
        plan.order = kind == "together" ? .blocks : nil
        func trainer(_ share: Double?) throws -> Trainer {
            let trainer = try fixture.trainer(.mesp, plan: plan) {
                ($0.blocksPerStep, $0.seed) = (share, 5)
                ($0.dropout, $0.dora, $0.freezeA) = (kind == "dropout" ? 0.3 : 0, kind == "dora", kind == "B alone")
            }
            for (block, layout) in trainer.model.lora.layouts.enumerated() {
                let vector = try trainer.model.lora.vectors.read(block)
                let moved = kind == "dora" ? vector + 0.01 : layout.part(of: try fixture.array("lora.\(block)"))
                try trainer.model.lora.vectors.write(moved, block)
            }
            return trainer
        }
        let (all, some) = (try trainer(nil), try trainer(0.5))
        var seen = [Int]()
        for number in 0..<2 {
            func gradients(_ trainer: Trainer) throws -> [Int: MLXArray] {
                var gradients = [Int: MLXArray]()
                trainer.beginStep(number)
                let part = (example: try fixture.example(), weight: 1 / Float(fixture.length))
                let parts = Array(repeating: part, count: kind == "together" ? 2 : 1)
                _ = try trainer.backpropagate(parts) { gradients[$0] = $1 }
                return gradients
            }
            let (expected, found) = (try gradients(all), try gradients(some))
            #expect(found.keys.sorted() == some.model.drawn && found.count < expected.count)
            for (block, gradient) in found {
                // OpenBLAS can sum float32 numbers in another order.
                #expect(relativeError(gradient, try #require(expected[block])) < 1e-6, "block \(block)")
            }
            seen += some.model.drawn
        }
        #expect(seen.sorted() == some.model.lora.trained)
    }

    @Test(arguments: GradientMethod.allCases, RunSettings.LoRADtype.allCases)
    func whatIsFrozenStaysToTheBit(_ method: GradientMethod, _ dtype: RunSettings.LoRADtype) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let trainer = try fixture.trainer(method) {
            ($0.freezeA, $0.projections, $0.loraDtype) = (true, ["q", "down"], dtype)
            ($0.optimizer, $0.learningRate, $0.weightDecay) = (.adamw8bit, 0.1, 0.5)
        }
        let before = try trainer.model.matrices()
        for number in 0..<2 { _ = try takeStep(trainer, [SequenceLoss([try fixture.example()])], number: number) }
        let after = try trainer.model.matrices()
        #expect(before.count == 2 * fixture.layers)
        for (before, after) in zip(before, after) {
            #expect(after.a.arrayEqual(before.a).item(Bool.self))
            #expect(!after.b.arrayEqual(before.b).item(Bool.self))
        }
    }

    @Test(arguments: Fixture.cases, RunSettings.OptimizerKind.allCases)
    func aAndBHaveRatesOfTheirOwn(_ folder: URL, _ optimizer: RunSettings.OptimizerKind) throws {
        let fixture = try Fixture(folder, "gradients")
        let isPlain = folder.lastPathComponent.hasPrefix("tied")
        for method in isPlain ? GradientMethod.allCases : [.mesp] {
            func matrices(rate: Float, ratio: Float) throws -> [LoRAMatrices] {
                let trainer = try fixture.trainer(method) {
                    ($0.optimizer, $0.learningRate, $0.weightDecay) = (optimizer, rate, 0.5)
                    ($0.loraplusLrRatio, $0.momentum) = (ratio, optimizer == .sgd ? 0.9 : 0)
                }
                try fixture.restoreParts(trainer)
                _ = try takeStep(trainer, [SequenceLoss([try fixture.example()])], number: 0)
                return try trainer.model.matrices()
            }
            let rate: Float = method == .mezo ? 1e-5 : 1e-3
            let found = try matrices(rate: rate, ratio: 16)
            let (slow, fast) = (try matrices(rate: rate, ratio: 1), try matrices(rate: 16 * rate, ratio: 1))
            for (index, each) in found.enumerated() {
                #expect(each.a.arrayEqual(slow[index].a).item(Bool.self))
                #expect(each.b.arrayEqual(fast[index].b).item(Bool.self))
                #expect(!each.b.arrayEqual(slow[index].b).item(Bool.self))
            }
        }
    }

    /// A step that trains fewer parameters has a lower measured peak and a lower predicted peak. Each peak falls by at least the size of the vectors
    /// that are not needed.
    @Test(
        arguments: [
            (["q", "v"], false, nil), (nil, true, nil), (["q", "v"], true, nil), (nil, false, 1),
        ] as [([String]?, Bool, Int?)])
    func whatIsNotTrainedTakesNoMemory(_ projections: [String]?, _ freezeA: Bool, _ layers: Int?) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        func take(_ change: (inout RunSettings) -> Void) throws -> (measured: Int, predicted: Int, vectors: Int) {
            var settings = RunSettings(bundle: "", output: "")
            Stream.cpu.synchronize()  // MLX's thread may still hold arrays of the previous trainer
            let before = Memory.activeMemory
            let trainer = try fixture.trainer(.mesp) {
                ($0.optimizer, $0.maxGradNorm) = (.adamw, 1)
                change(&$0)
                settings = $0
            }
            _ = try takeStep(trainer, [SequenceLoss([try fixture.example()])], number: 0)
            let peaks = try (1...9).map { number in
                Memory.peakMemory = 0
                _ = try takeStep(trainer, [SequenceLoss([try fixture.example()])], number: number)
                return Memory.peakMemory
            }
            let gradients = try trainer.model.lora.trained.map { try trainer.updates.sum($0).nbytes }
            return (
                peaks.sorted()[4] - before,
                Planner(fixture.bundle.manifest, settings).peak(Plan(tileBytes: 1 << 20)),
                try SavedState.vectors(of: trainer).values.reduce(gradients.reduce(0, +)) { $0 + $1.nbytes }
            )
        }
        let all = try take { _ in }
        let some = try take { ($0.projections, $0.freezeA, $0.numLayers) = (projections, freezeA, layers) }
        let less = all.vectors - some.vectors
        #expect(less > all.vectors / 4)
        #expect(all.measured - some.measured >= less)
        #expect(all.predicted - some.predicted >= less)
    }

    @Test func blocksWithoutTheProjectionsAreNotTrained() throws {
        let folder = try #require(Fixture.cases.first { $0.lastPathComponent == "qwen3_5" })
        let fixture = try Fixture(folder, "gradients")
        let attention = fixture.bundle.architecture.layers.indices.filter { block in
            fixture.bundle.architecture.block(block).modules.contains { $0.shortName == "q" }
        }
        for method in GradientMethod.allCases {
            let trainer = try fixture.trainer(method) {
                ($0.projections, $0.optimizer, $0.learningRate) = (["q"], .adamw8bit, 0.01)
            }
            #expect(trainer.model.lora.trained == attention && attention.count < fixture.layers)
            let losses = try (0..<2).map {
                try takeStep(trainer, [SequenceLoss([try fixture.example()])], number: $0).loss
            }
            #expect(losses[1].isFinite && losses[1] != losses[0])
        }
        var settings = RunSettings(bundle: "", output: "")
        (settings.projections, settings.numLayers) = (["q"], 1)
        (settings.seqLen, settings.rank) = (fixture.length, Int(try fixture.number("rank")))
        let last = attention.contains(fixture.layers - 1) ? ["out"] : ["q"]
        settings.projections = last
        let sentence = message { try fixture.bundle.manifest.check(settings) }
        #expect(sentence.contains("The last 1 blocks have none of the projections"), "\(sentence)")
    }
}
