import Foundation
import MLX
import Testing

@testable import MeSPCore

/// The generator against `mesp.reference` and the formulas of mlx-lm's sampler. tests/test_generate.py compares whole texts with mlx-lm.
@Suite(.serialized) struct GeneratorTests {
    static let cases = Fixture.cases

    /// The prompt in one piece, in pieces of some tokens, and token by token: dequantized tiles and `quantizedMM`.
    @Test(arguments: cases, [1, 3, 5, 256]) func logitsEqualTheReference(_ folder: URL, _ chunk: Int) throws {
        let fixture = try Fixture(folder, "gradients")
        let adapters = temporaryFolder()
        defer { try? FileManager.default.removeItem(at: adapters) }
        try fixture.saveAdapters(to: adapters)
        let model = try CachedModel(fixture.bundle, adapters: adapters, chunk: chunk)
        let generator = Generator(model)
        let tokens = try fixture.array("tokens").asArray(Int32.self).dropLast().map { Int($0) }

        var cache = model.emptyCache()
        let logits = try generator.logits(tokens, &cache) {}
        let y = try fixture.array("y")
        let expected = try fixture.bundle.withHead { weights in
            let architecture = fixture.bundle.architecture
            let h = RMSNorm(weight: weights["norm"], eps: architecture.rmsNormEps)(y[0])
            let all = MLXArray.arange(architecture.vocabSize)
            let w = weights.matrix("", inputs: architecture.hiddenSize).take(all)
            let logits = matmul(h[(tokens.count - 1)...], w.T)[0]
            let capped = architecture.finalLogitSoftcapping.map { tanh(logits / $0) * $0 } ?? logits
            eval(capped)
            return capped
        }
        // The order of sums in float32.
        #expect(relativeError(logits, expected) < 1e-5)
        #expect(cache.allSatisfy { $0.count == tokens.count })
    }

    /// Of tokens with the probabilities 0.5, 0.3, 0.15 and 0.05, top-p keeps the fewest that reach p, and the temperature T draws them with
    /// probabilities in proportion to p^(1/T).
    @Test(arguments: [
        (1.0, 1.0, [0.5, 0.3, 0.15, 0.05]), (0.6, 1.0, [0.5, 0.3, 0, 0]), (0.85, 1.0, [0.5, 0.3, 0.15, 0]),
        (0.79, 0.5, [0.25, 0.09, 0, 0]), (1.0, 2.0, [0.7071, 0.5477, 0.3873, 0.2236]), (1e-9, 5.0, [1, 0, 0, 0]),
        (1.0, 1e-9, [1, 0, 0, 0]),
    ]) func drawsWithTheRightProbabilities(_ topP: Double, _ temperature: Double, _ weights: [Double]) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let generator = try Generator(fixture.bundle)
        let order = [2, 0, 3, 1]  // of the tokens in the logits
        let logits = log(MLXArray(order.map { [0.5, 0.3, 0.15, 0.05][$0] } as [Float])) + 3
        var request = Generator.Request(prompt: [0])
        (request.topP, request.temperature) = (Float(topP), Float(temperature))
        let random = MLXRandom.RandomState(seed: 1)

        let draws = 1000
        var counts = [Int](repeating: 0, count: 4)
        for _ in 0..<draws { counts[order[generator.choose(logits, request, random)]] += 1 }
        for (count, weight) in zip(counts, weights) {
            let p = weight / weights.reduce(0, +)
            // Five standard deviations of a binomial distribution.
            #expect(abs(Double(count) - p * Double(draws)) <= 5 * (p * (1 - p) * Double(draws)).squareRoot())
        }
    }

    @Test(arguments: cases, ["", "peft"]) func adaptersRoundTrip(_ folder: URL, _ format: String) throws {
        let fixture = try Fixture(folder, "gradients")
        let adapters = temporaryFolder()
        defer { try? FileManager.default.removeItem(at: adapters) }
        try fixture.saveAdapters(to: adapters)
        let loaded = try loadAdapters(
            from: adapters.appendingPathComponent(format), architecture: fixture.bundle.architecture)
        #expect(loaded.layout.rank == Int(try fixture.number("rank")))
        #expect(loaded.scale == (try fixture.number("alpha")) / (try fixture.number("rank")))
        for (block, vector) in loaded.lora.enumerated() {
            #expect(vector.arrayEqual(try fixture.array("lora.\(block)")).item(Bool.self))
        }
    }

    @Test(arguments: ["", "peft"]) func whatWasNotTrainedIsNotWritten(_ format: String) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let adapters = temporaryFolder()
        defer { try? FileManager.default.removeItem(at: adapters) }
        let last = fixture.layers - 1
        let modules = fixture.bundle.architecture.modules.filter { ["q", "down"].contains($0.shortName) }
        try fixture.saveAdapters(blocks: last..<fixture.layers, modules: modules, to: adapters)
        let loaded = try loadAdapters(
            from: adapters.appendingPathComponent(format), architecture: fixture.bundle.architecture)
        for (block, vector) in loaded.lora.enumerated() {
            let expected = try fixture.array("lora.\(block)")
            for module in loaded.layout.modules {
                let ours = loaded.layout.matrices(module, in: vector)
                let saved = loaded.layout.matrices(module, in: expected)
                let trained = block == last && modules.contains(module)
                #expect(ours.a.arrayEqual(trained ? saved.a : MLXArray.zeros(saved.a.shape)).item(Bool.self))
                #expect(ours.b.arrayEqual(trained ? saved.b : MLXArray.zeros(saved.b.shape)).item(Bool.self))
            }
        }
    }

}

extension Fixture {
    fileprivate func saveAdapters(
        blocks: Range<Int>? = nil, modules: [Module]? = nil, to folder: URL
    ) throws {
        let rank = try number("rank")
        try saveAdapterFolder(
            layout: LoRALayout(architecture: bundle.architecture, rank: Int(rank)), blocks: blocks ?? 0..<layers,
            modules: modules ?? bundle.architecture.modules, scale: try number("alpha") / rank,
            model: bundle.manifest.model.id, to: folder
        ) { try array("lora.\($0)") }
    }
}
