import Foundation
import MLX
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct DoRATests {
    private static let cases = AdapterVariant.dora.cases()
    private let variant = AdapterVariant.dora
    private let tolerance = AdapterVariant.tolerance

    @Test(arguments: cases) func withDropoutToo(_ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        let trainer = try variant.trainer(fixture) { $0.dropout = try fixture.number("dropout") }
        try AdapterVariant.drawMasks(of: fixture, trainer)
        try fixture.expectEqual(fixture.gradients(trainer), trainer, prefix: "dropout.")
    }

    @Test(arguments: cases) func itBeginsAsTheModel(_ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        let (trainer, lora) = (try variant.trainer(fixture), try fixture.trainer(.mesp))
        for block in trainer.model.lora.trained {
            let (layout, found) = (trainer.model.lora.layouts[block], try trainer.model.lora.parameters(block))
            for (name, error) in try layout.errors(found, fixture.array("start.\(block)")) {
                #expect(name.hasSuffix(".B") || error < 1e-6, "block \(block) \(name): \(error)")
            }
        }
        if !folder.lastPathComponent.contains("gpu") {  // on a GPU, block functions compute LoRA
            #expect(try trainer.model.loss(fixture.example()) == lora.model.loss(fixture.example()))
        }
    }

    @Test(arguments: cases) func lossesOfMeZOToo(_ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        let trainer = try variant.trainer(fixture, .mezo) { $0.learningRate = try fixture.number("mezo_learning_rate") }
        let expected = try fixture.array("mezo").asArray(Float.self)
        try fixture.expectLosses(expected, tolerance) { try trainer.stepByMeZO([$0], number: $1).loss }
    }

    /// At the start π equals π₀, so DPO's loss is log 2. With other adapters, the reference model still gives the loss of the start.
    @Test(arguments: cases.filter { ["tied-32", "qwen3_moe", "tied-gpu"].contains($0.lastPathComponent) })
    func theReferenceModelIsTheBase(_ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        let trainer = try variant.trainer(fixture) { ($0.objective, $0.batchSize) = (.dpo, 2) }
        let example = try fixture.example()
        let answers = [true, false].map {
            PreferenceAnswer(
                example: example, isGood: $0, source: .init(split: 0, prompt: 0, answer: $0 ? 0 : 1),
                lengths: [fixture.length])
        }
        #expect(abs(try PreferenceBatch(answers, .dpo).evaluated(trainer).loss - log(2)) < 1e-6)
        let before = try trainer.model.loss(example)
        try fixture.restore(trainer)
        let reference = try ReferenceModel(start: nil).logProbability(answers[0], trainer.model)
        #expect(abs(Float(reference) + before) < 1e-5 * before)
        #expect(abs(try trainer.model.loss(example) - before) > 1e-4 * before)
    }

    @Test(arguments: cases, [nil, ["o", "out", "down"]])
    func generationIsTheSame(_ folder: URL, _ some: [String]?) throws {
        let fixture = try variant.fixture(folder)
        let names = fixture.bundle.architecture.trainableNames
        let trainer = try variant.trainer(fixture) { $0.projections = some.map { $0.filter(names.contains) } }
        let rank = Int(try fixture.number("rank"))
        let example = try fixture.example()
        try fixture.bundle.withDevice {
            for block in trainer.model.lora.trained {
                let layout = trainer.model.lora.layouts[block]
                let all = LoRALayout(block: layout.block, rank: rank, hasMagnitudes: true)
                try trainer.model.lora.vectors.write(layout.part(of: fixture.array("lora.\(block)"), in: all), block)
            }
            let expected = try trainer.model.lastOutput(example) { $1 }[0].asType(.float32)
            let model = CachedModel(fixture.bundle, with: try trainer.model.lora.adapters(), chunk: 256)
            let base = CachedModel(fixture.bundle, with: nil)
            func output(_ model: CachedModel) throws -> MLXArray {
                var (cache, rows) = (PromptCache(), [MLXArray]())
                try model.forward(example.inputs.map { Int($0) }[...], &cache, {}) { rows.append($1) }
                return concatenated(rows).asType(.float32)
            }
            #expect(relativeError(try output(model), expected) < tolerance)
            #expect(relativeError(try output(base), expected) > 100 * tolerance)
        }
    }

    /// Weighted adapters of DoRA and LoRA act as the weight matrix W + Σ w (W′ − W).
    ///
    /// W′ is the weight matrix with one adapter. For LoRA, it is W + s (A B)ᵀ. For DoRA, the rows of that matrix are also scaled to the norms m.
    @Test(arguments: cases) func aStackIsTheFusedSum(_ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        let (bundle, architecture) = (fixture.bundle, fixture.bundle.architecture)
        let rank = Int(try fixture.number("rank"))
        let (ofDoRA, ofLoRA) = (architecture.layouts(rank: rank, hasMagnitudes: true), architecture.layouts(rank: 3))
        let joined = architecture.layouts(rank: rank + 3, hasMagnitudes: true)
        let (scales, weights): ([Float], [Float]) = ([2, 0.5], [0.7, 1.5])
        try bundle.withDevice {
            for index in architecture.layers.indices {
                let (dora, lora) = (
                    try fixture.array("lora.\(index)"),
                    MLXRandom.normal([ofLoRA[index].count], scale: 0.1, key: MLXRandom.key(7))
                )
                let scaled = try bundle.readScaled(index, ofDoRA[index], scale: scales[0]) { _ in dora }
                let vector = joined[index].joined([
                    WeightedVector(
                        layout: ofDoRA[index], vector: scaled, weight: weights[0], factorOfB: scales[0] * weights[0]),
                    WeightedVector(
                        layout: ofLoRA[index], vector: lora, weight: weights[1], factorOfB: scales[1] * weights[1]),
                ])
                try bundle.withBlock(index) { blockWeights in
                    let block = Block(
                        weights: blockWeights, lora: vector, layout: joined[index], scale: 1,
                        schedule: Schedule(bundle.processor))
                    for projection in blockWeights.shape.modules.flatMap(\.projections) {
                        let layer = block.layer(projection)
                        let x = MLXRandom.normal([9, blockWeights.shape.dimensions(projection).inputs])
                        let w = layer.weight.inFloat32
                        func changed(_ layout: LoRALayout, _ flat: MLXArray, _ scale: Float) throws -> MLXArray {
                            let each = try #require(layout.matrices(projection, in: flat))
                            let sum = w + scale * matmul(each.a, each.b).T
                            guard let m = each.m else { return sum }
                            return sum * (m / sum.square().sum(axis: -1).sqrt())[0..., .newAxis]
                        }
                        let fused =
                            try w + weights[0] * (changed(ofDoRA[index], dora, scales[0]) - w)
                            + weights[1] * (changed(ofLoRA[index], lora, scales[1]) - w)
                        let expected = matmul(x, fused.T) + (layer.bias ?? MLXArray(0 as Float))
                        #expect(relativeError(layer(x), expected) < 1e-5, "block \(index), \(projection)")
                    }
                }
            }
        }
    }

    @Test(arguments: cases) func absentModulesAreTheModels(_ folder: URL) throws {
        let fixture = try variant.fixture(folder)
        let layouts = fixture.bundle.architecture.layouts(rank: 2, hasMagnitudes: true)
        try fixture.bundle.withDevice {
            for (block, layout) in layouts.enumerated() {
                let scaled = try fixture.bundle.readScaled(block, layout, scale: 2) { $0 }
                for module in layout.modules {
                    let matrices = layout.matrices(module, in: scaled)
                    #expect(try #require(matrices.m).arrayEqual(MLXArray.ones([matrices.b.dim(1)])).item(Bool.self))
                    #expect(matrices.b.abs().max().item(Float.self) == 0)
                }
            }
        }
    }
}
