import Foundation
import MLX
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct TrainedExpertsTests {
    private static let cases = Fixture.cases.filter { $0.lastPathComponent.contains("moe") }
    private func trainer(
        _ fixture: Fixture, freezesA: Bool = false, plan: Plan = Plan(tileBytes: 1 << 20)
    ) throws -> Trainer {
        try fixture.trainer(.mesp, plan: plan) {
            ($0.projections, $0.freezeA) = (fixture.bundle.architecture.trainableNames, freezesA)
        }
    }

    @Test(arguments: cases) func gradientsEqualTheReference(_ folder: URL) throws {
        let fixture = try Fixture(folder, "experts")
        let trainer = try trainer(fixture)
        try fixture.expectEqual(fixture.gradients(trainer), trainer)
        for layout in trainer.model.lora.layouts {
            #expect(layout.modules.count { $0.isStacked } == (layout.block.mlp.experts == nil ? 0 : 3))
        }
    }

    @Test(arguments: cases) func theyAreTheSameWithPlainProductsAndSmallTiles(_ folder: URL) throws {
        let fixture = try Fixture(folder, "experts")
        let expected = try fixture.gradients(trainer(fixture))
        let plain = try Processor.$cpu.withValue(.plainCPU) { try fixture.gradients(trainer(fixture)) }
        try plain.expectEqual(expected, "plain")
        try fixture.gradients(trainer(fixture, plan: Plan(tileBytes: 1 << 10))).expectEqual(expected, "small")
    }

    @Test(arguments: cases) func ofBAloneThereIsTheSame(_ folder: URL) throws {
        let fixture = try Fixture(folder, "experts")
        let some = try trainer(fixture, freezesA: true)
        let (all, ofB) = (try fixture.gradients(trainer(fixture)), try fixture.gradients(some))
        #expect(ofB.loss == all.loss)
        for (block, gradient) in ofB.blocks {
            let layout = some.model.lora.layouts[block]
            #expect(gradient.shape == [layout.trainedCount])
            #expect(gradient.arrayEqual(layout.trained(in: try #require(all.blocks[block]))).item(Bool.self))
        }
    }

    @Test(arguments: cases) func theyStartAsTheReferenceDoes(_ folder: URL) throws {
        let fixture = try Fixture(folder, "experts")
        for (block, layout) in try trainer(fixture).model.lora.layouts.enumerated() {
            let start = try fixture.array("start.\(block)")
            #expect(relativeError(layout.initial(seed: 0, block: block), start) < 1e-6)
            #expect(relativeError(layout.initial(seed: 1, block: block), start) > 0.1)
        }
    }

    private func ofMixture(
        _ fixture: Fixture, _ x: (_ hidden: Int) -> MLXArray,
        _ body: (LoRAGradients, _ chosen: Set<Int>, Experts, LoRALayout) throws -> Void
    ) throws {
        let trainer = try trainer(fixture)
        try fixture.restore(trainer)
        let model = trainer.model
        let block = try #require(model.blocks.first { fixture.bundle.architecture.block($0).mlp.experts != nil })
        let x = x(fixture.bundle.architecture.hiddenSize)
        try fixture.bundle.withBlock(block) { weights in
            let experts = try #require(weights.shape.mlp.experts)
            let chosen = weights.chosen(experts, weights.router(experts).apply(x))
            let formulas = try model.block(block, weights, x)
            var (dx, gradients) = (MLXArray.zeros(x.shape), LoRAGradients())
            formulas.mixtureOfExpertsBackward(experts, x, dy: x, addedTo: &dx, &gradients)
            try body(
                gradients, Set(chosen.asType(.int32).asArray(Int32.self).map(Int.init)), experts,
                LoRALayout(block: weights.shape, rank: model.lora.layouts[block].rank, modules: experts.modules))
        }
    }

    @Test(arguments: cases) func anExpertWithoutTokensHasNoGradient(_ folder: URL) throws {
        let one = { MLXRandom.normal([1, $0], key: MLXRandom.key(3)) }
        try ofMixture(Fixture(folder, "experts"), one) { gradients, chosen, experts, layout in
            #expect(Set(gradients.experts.keys) == chosen)
            let flat = layout.packed(gradients)
            #expect(flat.shape == [layout.count])
            for module in experts.modules {
                let found = layout.matrices(module, in: flat)
                for number in 0..<experts.numExperts {
                    for matrix in [found.a[number], found.b[number]] {
                        #expect((matrix.abs().max().item(Float.self) > 0) == chosen.contains(number))
                    }
                }
            }
        }
    }

    @Test(arguments: cases) func thePartsOfManyTokensAddUp(_ folder: URL) throws {
        let fixture = try Fixture(folder, "experts")
        var found = [MLXArray]()
        for count in [1, 150] {
            let same = { MLXRandom.normal([1, $0], key: MLXRandom.key(3)) + MLXArray.zeros([count, $0]) }
            try ofMixture(fixture, same) { gradients, _, _, layout in found.append(layout.packed(gradients)) }
        }
        #expect(relativeError(found[1], 150 * found[0]) < 1e-5)
    }

    @Test(arguments: cases, [nil, 1]) func adaptersAreReadAsTheyWereWritten(_ folder: URL, _ layers: Int?) throws {
        let fixture = try Fixture(folder, "experts")
        let (rank, architecture) = (Int(try fixture.number("rank")), fixture.bundle.architecture)
        let blocks = (layers.map { fixture.layers - $0 } ?? 0)..<fixture.layers
        let output = temporaryFolder()
        let whole = architecture.layouts(rank: rank, withExperts: true)
        try saveAdapterFolder(
            architecture, rank: rank, blocks: blocks, modules: architecture.trainable, scale: 2, model: "a model",
            dropout: 0.25, to: output
        ) { try fixture.array("lora.\($0)") }
        let config = try String(contentsOf: output.appendingPathComponent("adapter_config.json"), encoding: .utf8)
        let ofPEFT = try String(contentsOf: output.appendingPathComponent("peft/adapter_config.json"), encoding: .utf8)
        // PEFT does not load adapters of parameters (`target_parameters`) if `lora_dropout` is not 0.
        #expect(config.contains(#""dropout" : 0.25"#) && ofPEFT.contains(#""lora_dropout" : 0,"#))
        for from in [output, output.appendingPathComponent("peft")] {
            let loaded = try loadAdapters(from: from, architecture: architecture)
            #expect(loaded.rank == rank && loaded.scale == 2)
            for block in blocks {
                #expect(loaded.layouts[block].modules == whole[block].modules)
                #expect(loaded.lora[block].arrayEqual(try fixture.array("lora.\(block)")).item(Bool.self))
            }
        }
    }
}
