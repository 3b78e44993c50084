import Foundation
import MLX
import MeSPSentences
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) final class StackedAdaptersTests {
    private static let cases = Fixture.cases
    private let folder = temporaryFolder()

    private func adapters(
        _ name: String, of fixture: Fixture, rank: Int, scale: Float = 2, modules: [Module]? = nil, last: Int? = nil
    ) throws -> URL {
        let (architecture, url) = (fixture.bundle.architecture, folder.appendingPathComponent(name))
        let seed = UInt64(name.utf8.reduce(0) { $0 * 31 + Int($1) })
        try saveAdapterFolder(
            architecture, rank: rank, blocks: fixture.layers - (last ?? fixture.layers)..<fixture.layers,
            modules: modules ?? architecture.modules, scale: scale, model: fixture.bundle.manifest.model.id, to: url
        ) { block in
            let layout = LoRALayout(block: architecture.block(block), rank: rank, modules: modules)
            return MLXRandom.normal([layout.count], scale: 0.1, key: MLXRandom.key(seed + UInt64(block)))
        }
        return url
    }

    private func logits(_ model: CachedModel, _ tokens: [Int] = [7, 1, 2, 8, 2, 9, 3]) throws -> MLXArray {
        var cache = PromptCache()
        return try model.bundle.withDevice { try Generator(model).logits(cache.begin(tokens), &cache) {} }
    }

    private func text(_ generator: Generator, _ prompt: [Int]) throws -> [Int] {
        try generator.text(prompt, maxTokens: 6)
    }

    /// Three adapters of different rank, scale, format, modules and blocks give the same result as one adapter of full rank. Its A B is the sum of
    /// weight · scale · A B of the three.
    @Test(arguments: cases, [1, 256]) func aStackIsTheFusedSum(_ place: URL, _ chunk: Int) throws {
        let fixture = try Fixture(place, "gradients")
        let (bundle, architecture) = (fixture.bundle, fixture.bundle.architecture)
        let some = architecture.trainable.enumerated().filter { $0.offset % 2 == 0 || $0.element.isStacked }
        let stack = [
            WeightedAdapters(try adapters("first", of: fixture, rank: 3), weight: 0.7),
            .init(try adapters("second", of: fixture, rank: 5, scale: 0.5, modules: some.map(\.element)), weight: 0.3),
            .init(
                try adapters("third", of: fixture, rank: 2, scale: 1, last: 1).appendingPathComponent("peft"),
                weight: 1.5),
        ]
        let fused = try bundle.withDevice {
            let parts = try stack.map { ($0.weight, try loadAdapters(from: $0.folder, architecture: architecture)) }
            return self.fused(parts, architecture)
        }
        let found = try logits(CachedModel(bundle, adapters: stack, chunk: chunk))
        let expected = try logits(CachedModel(bundle, with: fused, chunk: chunk))
        let base = try logits(CachedModel(bundle, chunk: chunk))
        // A stack sums float32 numbers in another order than one adapter.
        #expect(relativeError(found, expected) < 1e-5)
        #expect(relativeError(base, expected) > 1e-3)
    }

    /// Returns adapters whose A is the identity and whose B is Σ weight · scale · A B of the parts, both padded with zeros to a common rank.
    private func fused(_ parts: [(weight: Float, LoadedAdapters)], _ architecture: Architecture) -> LoadedAdapters {
        let blocks = architecture.layers.indices.map { architecture.block($0) }
        let rank = blocks.flatMap { block in block.trainable.map { block.dimensions($0).inputs } }.max() ?? 0
        let layouts = architecture.layouts(rank: rank, withExperts: architecture.hasExperts)
        let lora = layouts.enumerated().map { block, layout in
            let matrices = layout.modules.map { module in
                let (a, b) = layout.block.shapes([module], rank: rank)
                let inputs = a[a.count - 2]
                let sum = parts.reduce(MLXArray.zeros(Array(b.dropLast(2)) + [inputs, b[b.count - 1]])) { sum, part in
                    let (weight, its) = part
                    guard its.layouts[block].modules.contains(module) else { return sum }
                    let matrices = its.layouts[block].matrices(module, in: its.lora[block])
                    return sum + matmul(matrices.a, matrices.b) * (weight * its.scale)
                }
                let one = broadcast(MLXArray.eye(inputs, m: rank), to: a)
                let rest = MLXArray.zeros(Array(b.dropLast(2)) + [rank - inputs, b[b.count - 1]])
                let rows = concatenated([sum, rest], axis: -2)
                return LoRAMatrices(a: one, b: rows)
            }
            return layout.packed(matrices)
        }
        return LoadedAdapters(rank: rank, scale: 1, lora: lora, layouts: layouts)
    }

    @Test(arguments: cases) func oneOfWeightOneIsAsItIsAndOneOfWeightZeroIsLeftOut(_ place: URL) throws {
        let fixture = try Fixture(place, "gradients")
        let bundle = fixture.bundle
        let (one, unread) = (try adapters("one", of: fixture, rank: 4), folder.appendingPathComponent("unread"))
        let loaded = try bundle.withDevice { try loadAdapters(from: one, architecture: bundle.architecture) }
        let alone = try logits(CachedModel(bundle, with: loaded))
        for stack in [[WeightedAdapters(one)], [.init(unread, weight: 0), .init(one)]] {
            #expect(try logits(CachedModel(bundle, adapters: stack)).arrayEqual(alone).item(Bool.self))
        }
        let base = try logits(CachedModel(bundle, with: nil))
        let none = try logits(CachedModel(bundle, adapters: [.init(one, weight: 0), .init(unread, weight: 0)]))
        #expect(none.arrayEqual(base).item(Bool.self) && !alone.arrayEqual(base).item(Bool.self))
    }

    @Test(arguments: cases.filter { ["tied-32", "qwen3_5", "lfm2_moe", "tied-gpu"].contains($0.lastPathComponent) })
    func switchingMapsNoWeights(_ place: URL) throws {
        let fixture = try Fixture(place, "gradients")
        let (bundle, prompt) = (fixture.bundle, [7, 1, 2, 8])
        let (a, b) = (try adapters("a", of: fixture, rank: 4), try adapters("b", of: fixture, rank: 2))
        let selections: [[WeightedAdapters]] = [
            [.init(a)], [], [.init(b), .init(a, weight: 0.5)], [.init(b, weight: 4)], [.init(a)],
        ]
        var generator = try Generator(bundle)
        let first = try text(generator, prompt)
        let (before, mapped) = (generator, bundle.maps.mapped)
        #expect(bundle.maps.areKept && mapped.count == Set(bundle.manifest.weightFiles.map(\.file)).count)
        var texts = [[Int]]()
        for selection in selections {
            try generator.use(selection)
            texts.append(try text(generator, prompt))
            #expect(bundle.maps.mapped == mapped)
            let new = try Fixture(place, "gradients").bundle
            #expect(try texts.last == text(Generator(new, adapters: selection), prompt))
        }
        #expect(Set(texts + [first]).count == 4 && texts[0] == texts[4] && texts[1] == first)
        #expect(try text(before, prompt) == first)
        #expect(throws: MeSPError.self) { try generator.use([.init(b), .init(self.folder)]) }
        #expect(try text(generator, prompt) == texts[4])
        #expect(bundle.maps.mapped == mapped)
    }

    @Test(arguments: cases.filter { ["tied-32", "qwen3_5"].contains($0.lastPathComponent) })
    func aPromptIsReadAgainWithOtherAdapters(_ place: URL) throws {
        let fixture = try Fixture(place, "gradients")
        let (a, b) = (try adapters("a", of: fixture, rank: 4), try adapters("b", of: fixture, rank: 2))
        var generator = Generator(try CachedModel(fixture.bundle, chunk: 1))
        var (cache, prompt) = (PromptCache(), Array(1...20))
        func check(_ selection: [WeightedAdapters], known: Int) throws {
            let (text, blocks) = try generator.text(prompt, maxTokens: 3, continuing: &cache)
            #expect(try text == Generator(fixture.bundle, adapters: selection).text(prompt, maxTokens: 3))
            #expect(blocks == (prompt.count - known + 2) * fixture.layers)
            prompt += text
        }
        let stack = [WeightedAdapters(a, weight: 0.5), .init(b)]
        try check([], known: 0)
        try check([], known: prompt.count - 1)
        for selection in [stack, [.init(a, weight: 0.25), .init(b)], [.init(a, weight: 0.25)], []] {
            try generator.use(selection)
            try check(selection, known: 0)
            generator = Generator(try CachedModel(fixture.bundle, adapters: selection, chunk: 1))
            try check(selection, known: prompt.count - 1)
            try generator.use([.init(b, weight: 0)] + selection)
            try check(selection, known: prompt.count - 1)
        }
        try generator.use([.init(a)])
        try check([.init(a)], known: 0)
        try FileManager.default.removeItem(at: a)
        try FileManager.default.moveItem(at: adapters("c", of: fixture, rank: 4), to: a)
        try generator.use([.init(a)])
        try check([.init(a)], known: 0)
    }

    @Test(arguments: cases.filter { ["tied-32", "qwen3_moe", "gemma4"].contains($0.lastPathComponent) })
    func memoryIsThatOfTheRanksTogether(_ place: URL) throws {
        let fixture = try Fixture(place, "gradients")
        let (bundle, architecture) = (fixture.bundle, fixture.bundle.architecture)
        let folders = try [3, 5, 2].enumerated().map { index, rank in
            try adapters("\(index)", of: fixture, rank: rank, modules: index == 2 ? architecture.trainable : nil)
        }
        for count in 0...3 {
            var model = try CachedModel(bundle)
            let before = Memory.activeMemory
            try model.use(folders.prefix(count).map { WeightedAdapters($0, weight: 0.5) })
            let measured = Memory.activeMemory - before
            #expect(abs(measured - model.adapterBytes) <= model.adapterBytes / 10)
            let parameters = architecture.layouts(rank: [0, 3, 8, 10][count], withExperts: count == 3)
            #expect(model.adapterBytes == 4 * parameters.reduce(0) { $0 + $1.count })
        }
    }

    @Test func whatDoesNotFitIsSaid() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let other = try Fixture(try #require(Self.cases.first { $0.lastPathComponent == "qwen3_5" }), "gradients")
        let (ours, theirs) = (try adapters("ours", of: fixture, rank: 2), try adapters("theirs", of: other, rank: 2))
        func said(_ adapters: [WeightedAdapters]) -> String {
            message { _ = try Generator(fixture.bundle, adapters: adapters) }
        }
        #expect(said([.init(ours), .init(theirs)]).hasPrefix("Cannot load the adapters in \(theirs.path): "))
        let missing = folder.appendingPathComponent("missing")
        #expect(
            said([.init(ours), .init(missing)])
                == "Cannot load the adapters in \(missing.path): it has no adapter_config.json.")
        for weight in [-0.5, 10.5, .infinity, .nan] as [Float] {
            #expect(
                said([.init(ours), .init(theirs, weight: weight)])
                    == "The weight of the adapters in \(theirs.path) is \(weight); it must be from 0 to 10.")
        }
    }
}
