import Foundation
import MLX
import MeSPSentences
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct GeneratorTests {
    static let cases = Fixture.cases

    @Test(arguments: cases, [1, 5, 256]) func logitsEqualTheReference(_ folder: URL, _ chunk: Int) throws {
        let fixture = try Fixture(folder, "gradients")
        let adapters = try fixture.saveAdapters()
        let model = try CachedModel(fixture.bundle, adapters: [.init(adapters)], chunk: chunk)
        let generator = Generator(model)
        let tokens = try fixture.array("tokens").asArray(Int32.self).dropLast().map { Int($0) }

        var cache = PromptCache()
        let logits = try generator.logits(cache.begin(tokens), &cache) {}
        let rows = try fixture.logits(from: tokens.count - 1)
        let expected = rows[0]
        // The generator sums float32 numbers in another order than the reference.
        #expect(relativeError(logits, expected) < 1e-5)
        #expect(cache.tokens == tokens && cache.blocks.allSatisfy { $0?.count == tokens.count })
    }

    @Test(arguments: cases) func decodingInFewerOperationsIsTheSame(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        let lengths = [3, 7]
        let next = (0..<40).map { [$0 % 9 + 1, $0 % 5 + 2] }
        func compare() throws {
            let model = try CachedModel(fixture.bundle)
            let generator = Generator(model)
            try fixture.bundle.withDevice {
                var caches = [PromptCache(), PromptCache()]
                for (i, length) in lengths.enumerated() {
                    _ = try generator.logits(caches[i].begin(Array(1...length)), &caches[i]) {}
                }
                let found = try next.map { try model.forward(next: $0, &caches) {} }
                for (i, length) in lengths.enumerated() {
                    var (cache, all) = (PromptCache(), [MLXArray]())
                    try model.forward((Array(1...length) + next.map { $0[i] })[...], &cache, {}) { all.append($1) }
                    // Decoding two texts together changes the order of float32 sums.
                    let rows = concatenated(found.map { $0[i..<i + 1] })
                    #expect(relativeError(rows, concatenated(all)[length...]) < 1e-5)
                }
            }
        }
        try compare()
        try Processor.$cpu.withValue(.plainCPU) { try compare() }
    }

    #if os(Linux)
        private final class LastFile: @unchecked Sendable {
            let bundle: ModelBundle
            var asked = 0
            var held = [Int]()
            init(_ bundle: ModelBundle) { self.bundle = bundle }
            var isRefused: Bool {
                asked += 1
                // A file handle reads the whole file. `FileManager.contents` reads at most 4096 bytes of a file in /proc.
                let list = try? FileHandle(forReadingFrom: URL(fileURLWithPath: "/proc/self/maps")).readToEnd()
                // Other tests may have mapped files whose names are not valid UTF-8.
                let maps = String(decoding: list ?? Data(), as: UTF8.self)
                let isLast = asked == Set(bundle.manifest.weightFiles.map(\.file)).count
                if isLast || !bundle.maps.areKept {
                    held.append(maps.components(separatedBy: bundle.url.path + "/").count - 1)
                }
                return bundle.maps.areKept && isLast
            }
        }

        @Test(arguments: [[1, 2, 3], [1]]) func whereAddressesRunOutNoMapIsHeld(_ prompt: [Int]) throws {
            let copy = try tiedBundle().copy()
            func text(refusing: Bool) throws -> (tokens: [Int], held: [Int]) {
                let bundle = try ModelBundle(url: copy.resolvingSymlinksInPath())
                let last = LastFile(bundle)
                let areUsedUp: @Sendable () -> Bool = { last.isRefused && refusing }
                return try Addresses.$areUsedUp.withValue(areUsedUp) {
                    return (try Generator(CachedModel(bundle)).text(prompt, maxTokens: 4), last.held)
                }
            }
            let (refused, plain) = (try text(refusing: true), try text(refusing: false))
            #expect(refused.tokens == plain.tokens)
            #expect(refused.held[0] > 0 && refused.held[1] == 0, "\(refused.held)")
        }
    #endif

    @Test(arguments: cases) func textsWrittenTogetherAreTheSame(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        let adapters = try fixture.saveAdapters()
        let generator = try Generator(fixture.bundle, adapters: [.init(adapters)])
        let requests = (0..<7).map { i in
            var request = Generator.Request(prompt: Array(1...3 + 2 * min(i, 4)))
            (request.maxTokens, request.temperature, request.seed) = (4 + 3 * (i % 3), i % 2 == 0 ? 0 : 1, UInt64(i))
            return request
        }
        func read(_ token: Int, _ text: inout [Int], of request: Int) throws {
            text.append(token)
            if request == 3, text.count == 2 { throw CancellationError() }
        }
        let alone = try requests.enumerated().map { i, request in
            var text = [Int]()
            let summary = try generator.generate(request) { try read($0, &text, of: i) }
            return (text, summary.reason, summary.tokens)
        }
        let isPlain = folder.lastPathComponent.hasPrefix("tied")
        let ways = isPlain ? [(1, Int.max), (3, .max), (16, .max), (16, 1)] : [(3, .max), (16, .max)]
        for (atOnce, cacheLimit) in ways {
            var texts = [[Int]](repeating: [], count: requests.count)
            var summaries = [Generator.Summary?](repeating: nil, count: requests.count)
            try generator.generate(
                requests, atOnce: atOnce, cacheLimit: cacheLimit,
                onToken: { try read($1, &texts[$0], of: $0) }, onEnd: { summaries[$0] = $1 })
            for (i, (text, reason, tokens)) in alone.enumerated() {
                #expect(texts[i] == text && summaries[i]?.reason == reason && summaries[i]?.tokens == tokens)
            }
        }
        #expect(throws: MeSPError.self) {
            try generator.generate(requests, atOnce: 17, onToken: { _, _ in }, onEnd: { _, _ in })
        }
    }

    @Test func theAnswersOfAGroupAreDrawnEach() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let trainer = try fixture.trainer(.mesp) { ($0.groupSize, $0.maxTokens) = (4, 8) }
        let prompt = Example(tokens: try fixture.example().tokens, counted: Array(4..<fixture.length))
        let (groups, _) = try trainer.model.sampleAnswers(
            to: [prompt, prompt], groupSize: 4, lengths: [fixture.length], number: 0, cacheLimit: .max)
        #expect(groups.count == 2 && Set(groups.flatMap(\.answers)).count == 8)
    }

    @Test(arguments: cases) func aTurnReadsOnlyWhatIsNew(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        let generator = Generator(try CachedModel(fixture.bundle, chunk: 1))
        let whole = try Generator(fixture.bundle)
        let tokens = Array(1...10)
        var cache = PromptCache()
        var said = Array(tokens.prefix(5))
        let isRecurrent = fixture.bundle.architecture.isRecurrent
        func check(_ prompt: [Int], known: Int) throws {
            let (text, read) = try generator.text(prompt, maxTokens: 3, continuing: &cache)
            #expect(try text == whole.text(prompt, maxTokens: 3))
            #expect(read == (prompt.count - known + 2) * fixture.layers)
            #expect(cache.tokens == prompt + text.dropLast())
            said = prompt + text
        }
        try generator.generate(.init(prompt: [1])) { _ in throw CancellationError() }
        try check(said, known: 0)
        try check(said + tokens[5..<8], known: said.count - 1)
        try check(Array(said.prefix(7)) + tokens[8..<10], known: isRecurrent ? 0 : 7)
        try check(Array(said.prefix(5)), known: isRecurrent ? 0 : 4)

        var left = 2 * fixture.layers + 1
        let stop = {
            if left == 0 { throw CancellationError() }
            left -= 1
        }
        let request = Generator.Request(said + tokens[5..<8], maxTokens: 3)
        try generator.generate(request, continuing: &cache, atBlock: stop) { _ in }
        #expect(cache.tokens == said + tokens[5..<6])
        try check(said + tokens[5..<8], known: isRecurrent ? 0 : said.count + 1)
    }

    @Test(arguments: cases.filter { ["qwen3_5", "lfm2", "granite-mamba"].contains($0.lastPathComponent) }, [1, 256])
    func aRecurrentModelGoesBackToItsMark(_ folder: URL, _ chunk: Int) throws {
        let fixture = try Fixture(folder, "gradients")
        let generator = Generator(try CachedModel(fixture.bundle, chunk: chunk))
        let whole = try Generator(fixture.bundle)

        var cache = PromptCache()
        let prompt = Array(1...30)
        let mark = prompt.count - PromptCache.opening
        for (next, known) in [
            (prompt, 0), (prompt, mark), (Array(prompt.prefix(mark + 2)) + [40, 41], mark),
            (Array(prompt.prefix(mark - 1)) + [42], 0),
        ] {
            var started = cache
            #expect(started.begin(next) == next[known...])
            let ours = try generator.text(next, maxTokens: 3, continuing: &cache).text
            #expect(try ours == whole.text(next, maxTokens: 3))
            #expect(cache.tokens == next + ours.dropLast())
        }
        // A cache above its limit keeps only the tokens up to the mark, or nothing.
        for (limit, kept) in [(cache.size - 1, mark), (0, 0)] {
            var small = PromptCache(limit: limit)
            _ = try generator.text(prompt, maxTokens: 3, continuing: &small)
            #expect(small.tokens.count == kept && small.size <= limit)
        }
    }

    @Test func theCacheKeepsTheBeginningThatFits() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let generator = try Generator(fixture.bundle)
        guard case .attention(let mixer) = fixture.bundle.architecture.mixers[0] else { return }
        let token = 2 * 4 * mixer.keyValueWidth * fixture.layers
        var cache = PromptCache(limit: 6 * token + 1)
        let request = Generator.Request(Array(1...5), maxTokens: 4)
        let text = try generator.text(request.prompt, maxTokens: 4, continuing: &cache).text
        #expect(cache.tokens == request.prompt + text.prefix(1) && cache.size == 6 * token)

        var (stopped, blocks) = (PromptCache(limit: 0), 0)
        let stop = {
            blocks += 1
            if blocks > 1 { throw CancellationError() }
        }
        try generator.generate(request, continuing: &stopped, atBlock: stop) { _ in }
        #expect(blocks == 2 && stopped.size == 0)
    }

    /// The tokens have the probabilities 0.5, 0.3, 0.15 and 0.05.
    @Test(arguments: [
        (1.0, 1.0, [0.5, 0.3, 0.15, 0.05]), (0.6, 1.0, [0.5, 0.3, 0, 0]), (0.85, 1.0, [0.5, 0.3, 0.15, 0]),
        (0.79, 0.5, [0.25, 0.09, 0, 0]), (1.0, 2.0, [0.7071, 0.5477, 0.3873, 0.2236]), (1e-9, 5.0, [1, 0, 0, 0]),
        (1.0, 1e-9, [1, 0, 0, 0]), (1.0, 1e-44, [1, 0, 0, 0]), (1e-44, 1.0, [1, 0, 0, 0]), (1.0, 1e38, [1, 1, 1, 1]),
    ]) func drawsWithTheRightProbabilities(_ topP: Double, _ temperature: Double, _ weights: [Double]) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let generator = try Generator(fixture.bundle)
        let order = [2, 0, 3, 1]  // the order of the tokens in the logits
        let logits = log(MLXArray(order.map { [0.5, 0.3, 0.15, 0.05][$0] } as [Float])) + 3
        var request = Generator.Request(prompt: [0])
        (request.topP, request.temperature) = (Float(topP), Float(temperature))
        let random = MLXRandom.RandomState(seed: 1)

        let draws = 1000
        var counts = [Int](repeating: 0, count: 4)
        for _ in 0..<draws { counts[order[try generator.choose(logits, request, random)]] += 1 }
        for (count, weight) in zip(counts, weights) {
            let p = weight / weights.reduce(0, +)
            // The tolerance is five standard deviations of a binomial distribution.
            #expect(abs(Double(count) - p * Double(draws)) <= 5 * (p * (1 - p) * Double(draws)).squareRoot())
        }
    }

    @Test(arguments: cases, ["", "peft"]) func adaptersRoundTrip(_ folder: URL, _ format: String) throws {
        let fixture = try Fixture(folder, "gradients")
        let adapters = try fixture.saveAdapters()
        let loaded = try loadAdapters(
            from: adapters.appendingPathComponent(format), architecture: fixture.bundle.architecture)
        #expect(loaded.rank == Int(try fixture.number("rank")))
        #expect(loaded.scale == (try fixture.number("alpha")) / (try fixture.number("rank")))
        for (block, vector) in loaded.lora.enumerated() {
            #expect(vector.arrayEqual(try fixture.array("lora.\(block)")).item(Bool.self))
        }
    }

    /// Untrained modules stay as in the base model, even if PEFT's format joins them with a trained module in one layer.
    @Test(arguments: cases, ["", "peft"]) func magnitudesRoundTrip(_ folder: URL, _ format: String) throws {
        let architecture = try Fixture(folder, "gradients").bundle.architecture
        let (last, all) = (architecture.numHiddenLayers - 1, architecture.modules)
        func layouts(_ modules: [Module]) -> [LoRALayout] {
            architecture.layers.indices.map {
                LoRALayout(block: architecture.block($0), rank: 3, modules: modules, hasMagnitudes: true)
            }
        }
        func magnitudes(_ block: Int, _ layout: LoRALayout) -> MLXArray {
            MLXArray.ones([layout.magnitudes]) * Float(block + 2)
        }
        let vectors = layouts(all).map { MLXRandom.normal([$0.count], key: MLXRandom.key(1)) }
        let some = all.filter { ["q", "qkv", "gate", "down", "out"].contains($0.shortName) }
        for (blocks, modules) in [(0..<last + 1, all), (last..<last + 1, some)] {
            let adapters = temporaryFolder()
            let trained = layouts(modules)
            try saveAdapterFolder(
                architecture, rank: 3, blocks: blocks, modules: modules, scale: 2, model: "a model",
                magnitudes: magnitudes, to: adapters
            ) { trained[$0].part(of: vectors[$0], in: layouts(all)[$0]) }
            let loaded = try loadAdapters(from: adapters.appendingPathComponent(format), architecture: architecture) {
                $0.base(magnitudes($1, $0))
            }
            for (block, layout) in layouts(all).enumerated() {
                #expect(loaded.layouts[block].hasMagnitudes)
                let base = layout.base(magnitudes(block, layout))
                for module in layout.modules {
                    let isTrained = blocks.contains(block) && modules.contains(module)
                    let found = layout.matrices(module, in: loaded.lora[block])
                    let expected = layout.matrices(module, in: isTrained ? vectors[block] : base)
                    let isEqual = [
                        found.a.arrayEqual(expected.a), found.b.arrayEqual(expected.b),
                        try #require(found.m).arrayEqual(try #require(expected.m)),
                    ]
                    #expect(isEqual.allSatisfy { $0.item(Bool.self) }, "block \(block), \(module.name)")
                }
            }
        }
    }

    @Test(arguments: ["", "peft"]) func whatWasNotTrainedIsNotWritten(_ format: String) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let last = fixture.layers - 1
        let modules = fixture.bundle.architecture.modules.filter { ["q", "down"].contains($0.shortName) }
        let adapters = try fixture.saveAdapters(blocks: last..<fixture.layers, modules: modules)
        let loaded = try loadAdapters(
            from: adapters.appendingPathComponent(format), architecture: fixture.bundle.architecture)
        for (block, vector) in loaded.lora.enumerated() {
            let expected = try fixture.array("lora.\(block)")
            let layout = LoRALayout(block: fixture.bundle.architecture.block(block), rank: loaded.rank)
            for module in layout.modules {
                let ours = layout.matrices(module, in: vector)
                let saved = layout.matrices(module, in: expected)
                let trained = block == last && modules.contains(module)
                #expect(ours.a.arrayEqual(trained ? saved.a : MLXArray.zeros(saved.a.shape)).item(Bool.self))
                #expect(ours.b.arrayEqual(trained ? saved.b : MLXArray.zeros(saved.b.shape)).item(Bool.self))
            }
        }
    }
}
