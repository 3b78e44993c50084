import Foundation
import MLX
import MeSPAppModel
import MeSPSentences
import Testing

@testable import MeSP
@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPControl
@testable import MeSPCore
@testable import MeSPDownload
@testable import MeSPFiles

@Suite(.serialized) struct FuzzTests {
    /// The number of cases of each kind. `make test-slow` sets it to 10,000.
    static let cases = ProcessInfo.processInfo.environment["MESP_FUZZ_CASES"].flatMap(Int.init) ?? 400

    struct Generator: RandomNumberGenerator {
        var state: UInt64

        mutating func next() -> UInt64 {
            state &+= 0x9e37_79b9_7f4a_7c15
            var z = state
            z = (z ^ (z >> 30)) &* 0xbf58_476d_1ce4_e5b9
            z = (z ^ (z >> 27)) &* 0x94d0_49bb_1331_11eb
            return z ^ (z >> 31)
        }
    }

    private let hostile: [Any] = [
        0, -1, 1, 2, 3, 65536, 1 << 31, (1 << 31) - 1, 1 << 53, Int.max, Int.min, 1e300, -1e-300, 0.5, "", "../x",
        "/etc/passwd", "blocks",
        "blocks/../../x", "a\0b", "U32", NSNull(), [Any](), [String: Any](), true, [0, -1, Int.max],
        [String](repeating: "x", count: 1000), ["a": ["b": ["c": 1]]],
    ]

    private func mutated(_ value: Any, _ random: inout Generator) -> Any {
        func change(_ value: Any, _ random: inout Generator) -> Any {
            if Int.random(in: 0..<6, using: &random) == 0 { return hostile.randomElement(using: &random) ?? 0 }
            if var list = value as? [Any], let index = list.indices.randomElement(using: &random) {
                switch Int.random(in: 0..<8, using: &random) {
                case 0: list.remove(at: index)
                case 1: list.append(list[index])
                default: list[index] = change(list[index], &random)
                }
                return list
            }
            if var object = value as? [String: Any], let key = object.keys.sorted().randomElement(using: &random) {
                switch Int.random(in: 0..<12, using: &random) {
                case 0: object[key] = nil
                case 1: object["x" + key] = object[key]
                default: object[key] = change(object[key] ?? 0, &random)
                }
                return object
            }
            return hostile.randomElement(using: &random) ?? 0
        }
        return (0..<Int.random(in: 1...3, using: &random)).reduce(value) { value, _ in change(value, &random) }
    }

    private func mutatedJSON(_ json: Data, _ random: inout Generator) throws -> Data {
        if Int.random(in: 0..<4, using: &random) == 0 { return mutatedBytes(json, &random) }
        let value = mutated(try JSONSerialization.jsonObject(with: json), &random)
        return try JSONSerialization.data(withJSONObject: value, options: [.fragmentsAllowed, .sortedKeys])
    }

    private func mutatedBytes(_ data: Data, _ random: inout Generator) -> Data {
        var data = Data(data)
        for _ in 0..<Int.random(in: 1...4, using: &random) where !data.isEmpty {
            let index = Int.random(in: 0..<min(data.count, 4096), using: &random)
            switch Int.random(in: 0..<5, using: &random) {
            case 0: data[index] ^= 1 << UInt8.random(in: 0..<8, using: &random)
            case 1: data = data.prefix(index)
            case 2: data.insert(contentsOf: Data(repeating: UInt8(ascii: "["), count: 600), at: index)
            case 3: data.append(0)
            default:
                let numbers: [UInt64] = [.max, 1 << 63, 1 << 40, 0, UInt64(data.count)]
                let number = numbers.randomElement(using: &random) ?? 0
                let bytes = withUnsafeBytes(of: number.littleEndian) { Data($0) }
                data.replaceSubrange(index..<min(index + 8, data.count), with: bytes.prefix(data.count - index))
            }
        }
        return data
    }

    private func fuzz(seed: UInt64, _ body: (inout Generator) throws -> Void) throws {
        let sampler = FootprintSampler()
        defer { sampler.stop() }
        let before = memoryFootprint()
        var random = Generator(state: seed)
        var refused = 0
        for _ in 0..<Self.cases {
            do {
                try body(&random)
            } catch let error as MeSPError {
                refused += 1
                #expect(!error.sentence.english.isEmpty)
            }
        }
        #expect(refused > Self.cases / 4 && refused < Self.cases, "cases of both kinds")
        #expect(sampler.takePeak() - before < 100_000_000, "memory by a number in a file")
    }

    private func bundle(_ fixture: String = "tied-32") throws -> (URL, Data) {
        let source = try #require(Fixture.cases.first { $0.lastPathComponent == fixture })
        let folder = try source.appendingPathComponent("bundle.mesp").copy()
        var manifest = try folder.appendingPathComponent("manifest.json").readJSON()
        manifest["end_tokens"] = [0, 3]  // which is optional
        return (folder, try JSONSerialization.data(withJSONObject: manifest, options: .sortedKeys))
    }

    private func settings(_ folder: URL, _ manifest: Manifest) throws -> RunSettings {
        var settings = RunSettings(bundle: folder.path, output: folder.path)
        settings.seqLen = try #require(manifest.seqLens.max())
        settings.rank = try #require(manifest.ranks.max())
        return settings
    }

    @Test(arguments: ["tied-32", "gemma4"]) func manifests(_ fixture: String) throws {
        let (folder, manifest) = try bundle(fixture)
        try fuzz(seed: 1) { random in
            try mutatedJSON(manifest, &random).write(to: folder.appendingPathComponent("manifest.json"))
            let bundle = try ModelBundle(url: folder, checksums: false)
            for file in bundle.manifest.files { #expect(!file.path.contains("..") && !file.path.hasPrefix("/")) }
            for split in ["train", "valid"] { _ = try bundle.tokens(split) }
            var settings = try settings(folder, bundle.manifest)
            settings.memoryLimitMb = Double.random(in: 1...100, using: &random)
            _ = try Planner(bundle.manifest, settings, systemLimit: nil).plan()
        }
    }

    @Test(arguments: ["tied-32", "gemma4"]) func offers(_ fixture: String) throws {
        let (folder, manifest) = try bundle(fixture)
        try fuzz(seed: 8) { random in
            let json = try mutatedJSON(manifest, &random)
            let offer = try HubDownload.Offer(repository: "a/b", json: json, commit: nil)
            #expect(offer.size >= json.count)
            var settings = try settings(folder, offer.manifest)
            settings.method = GradientMethod.allCases.randomElement(using: &random) ?? .mesp
            settings.batchSize = [1, 4, 1 << 16].randomElement(using: &random) ?? 1
            _ = try Planner(offer.manifest, settings, systemLimit: 1 << 34).plan()
        }
    }

    @Test func logs() throws {
        let folder = newFolder()
        var settings = try RunSettings.ofATest(folder.appendingPathComponent("run"))
        settings.steps = 3
        try Run.run(settings)
        let sound = try Data(contentsOf: LogWriter.url(in: URL(fileURLWithPath: settings.output)))
        let log = LogWriter.url(in: folder)
        try fuzz(seed: 9) { random in
            var lines = sound.split(separator: UInt8(ascii: "\n")).map { Data($0) }
            let index = Int.random(in: 0..<lines.count, using: &random)
            lines[index] = try mutatedJSON(lines[index], &random)
            try Data(lines.joined(separator: Data("\n".utf8))).write(to: log)
            let resumeAt = [0, UInt64(sound.count / 2), UInt64(sound.count), .max].randomElement(using: &random) ?? 0
            let result = Result { (try LogSummary(folder: folder), try LogOutline(folder: folder)) }
            _ = try LogWriter(folder: folder, resumeAt: resumeAt)
            let mended = try LogSummary(folder: folder)
            #expect(try mended.start != nil || Data(contentsOf: log).isEmpty)
            _ = try result.get()
        }
    }

    @Test func indexesOfTokens() throws {
        let folder = temporaryFolder()
        let text = String(repeating: "Some text to train on.\n", count: 50)
        try TextData(tokenizer: ByteTokenizer(), length: 32).write(.text(text), to: folder)
        let index = folder.appendingPathComponent("data.json")
        let json = try Data(contentsOf: index)
        let source = try tiedBundle()
        try fuzz(seed: 10) { random in
            try mutatedJSON(json, &random).write(to: index)
            let bundle = try ModelBundle(url: source, text: folder, checksums: false)
            for split in ["train", "valid"] { _ = try bundle.tokens(split)?.sequences(lengths: [8]).count }
        }
    }

    /// Some bytes of a function file are changed, which may belong to sizes, shapes or indices. MLX runs the functions that pass the checks.
    @Test func functions() throws {
        let (folder, _) = try bundle()
        let bundle = try ModelBundle(url: folder, checksums: false)
        let length = try #require(bundle.manifest.seqLens.max())
        let (rank, hidden) = (try #require(bundle.manifest.ranks.first), bundle.architecture.hiddenSize)
        let arguments = [
            MLXArray.zeros([1, length, hidden]),
            .zeros([LoRALayout(block: bundle.architecture.block(0), rank: rank).count]),
            MLXArray(Float(1)), .zeros([bundle.manifest.blocks[0].words], dtype: .uint32),
        ]
        let words: [Int32] = [-4, -1, 0, 1, 2, 3, 4, 10, 12, 256, .max, .min]
        let sound = try Data(contentsOf: folder.appendingPathComponent("block.\(length).mlxfn"))
        try fuzz(seed: 11) { random in
            var file = sound
            for _ in 0..<Int.random(in: 1...3, using: &random) {
                let index = Int.random(in: 0..<(file.count - 4), using: &random)
                let word = words.randomElement(using: &random) ?? 0
                file.replaceSubrange(index..<(index + 4), with: withUnsafeBytes(of: word.littleEndian) { Data($0) })
            }
            if Int.random(in: 0..<10, using: &random) == 0 { file = mutatedBytes(file, &random) }
            _ = try checkFunctions(file, onGPU: false)
            let url = folder.appendingPathComponent("\(UUID().uuidString).mlxfn")
            try file.write(to: url)
            try MLXErrors.collect {
                let outputs = try importFunction(from: url).dynamicallyCall(
                    withKeywordArguments: ["": arguments[0], "": arguments[1], "": arguments[2], "": arguments[3]])
                for output in outputs { try output.compute() }
            }
        }
    }

    @Test func tokensAndExamples() throws {
        func data(_ numbers: [UInt32]) -> Data { numbers.withUnsafeBytes { Data($0) } }
        let tokens = data((0..<200).map { $0 % 50 })
        let examples = data((0..<20).flatMap { [$0 * 10, 10] })
        let mask = Data((0..<200).map { $0 % 7 < 4 ? 1 : 0 })
        let places = data((0..<200).map { $0 % 7 == 6 ? $0 % 3 : 0 })
        try fuzz(seed: 2) { random in
            let stream = TokenStream(
                tokens: Bool.random(using: &random) ? mutatedBytes(tokens, &random) : tokens,
                examples: Bool.random(using: &random) ? mutatedBytes(examples, &random) : nil,
                mask: Bool.random(using: &random) ? mutatedBytes(mask, &random) : nil,
                images: Bool.random(using: &random)
                    ? ImageRows(rows: Data(count: 8), dtype: .float16, width: 4, places: mutatedBytes(places, &random))
                    : nil)
            try stream.check(vocabulary: 50)
            for length in [1, 7, 300] {
                let sequences = stream.sequences(lengths: [length])
                for index in 0..<sequences.count {
                    let example = sequences[index]
                    #expect(example.tokens.count == length + 1 && !example.counted.isEmpty)
                    #expect(example.images.map { $0.bytes.count == 4 * $0.positions.count } ?? true)
                    #expect(
                        example.tokens.allSatisfy { (0..<50).contains($0) }
                            && example.counted.allSatisfy { (0..<length).contains($0) })
                }
                if sequences.count > 0 {
                    _ = sequences.training(Int.random(in: 0...(1 << 60), using: &random), seed: .max)
                }
            }
        }
    }

    @Test func textOfOnesOwn() throws {
        let folder = newFolder()
        let (file, target) = (folder.appendingPathComponent("text.jsonl"), folder.appendingPathComponent("tokens"))
        let records = (0..<12).map { Data(#"{"prompt": "Question \#($0)?", "completion": "Answer \#($0)."}"#.utf8) }
        try fuzz(seed: 7) { random in
            var lines = records
            let line = Int.random(in: 0..<lines.count, using: &random)
            lines[line] = try mutatedJSON(lines[line], &random)
            try Data(lines.joined(separator: Data("\n".utf8))).write(to: file)
            try? FileManager.default.removeItem(at: target)
            do {
                try TextData(tokenizer: ByteTokenizer(), length: 64).write(.file(file), to: target)
            } catch {
                #expect(try FileManager.default.contentsOfDirectory(atPath: folder.path) == ["text.jsonl"])
                throw error
            }
            for entry in try TokenFolder.entries(in: target).values {
                let examples = try entry.examples.map { try Data(contentsOf: target.appendingPathComponent($0.file)) }
                let mask = try entry.mask.map { try Data(contentsOf: target.appendingPathComponent($0)) }
                let tokens = try Data(contentsOf: target.appendingPathComponent(entry.file))
                let stream = TokenStream(tokens: tokens, examples: examples, mask: mask)
                try stream.check(vocabulary: 256)
                #expect(stream.sequences(lengths: [64]).count > 0)
            }
        }
    }

    @Test(arguments: GradientMethod.allCases) func theLargestSizes(_ method: GradientMethod) throws {
        let (folder, json) = try bundle()
        var manifest = try #require(try JSONSerialization.jsonObject(with: json) as? [String: Any])
        var architecture = try #require(manifest["architecture"] as? [String: Any])
        for name in ["hidden_size", "vocab_size"] { architecture[name] = 1 << 20 }
        var mlp = try #require((architecture["mlps"] as? [[String: Any]])?.first)
        mlp["intermediate_size"] = 1 << 20
        architecture["mlps"] = [mlp]
        var attention = try #require((architecture["mixers"] as? [[String: Any]])?.first)
        (attention["num_attention_heads"], attention["num_key_value_heads"]) = (1 << 12, 1 << 12)
        attention["head_dim"] = 1 << 8
        func modules(_ names: [String]) -> [[Any]] { names.map { ["m.\($0)", [$0]] } }
        let net: [String: Any] = [
            "type": "gated_delta_net", "modules": modules(["qkv", "z", "b", "a", "out"]), "num_key_heads": 1 << 10,
            "num_value_heads": 1 << 10, "key_head_dim": 1 << 8, "value_head_dim": 1 << 9, "kernel_size": 1 << 12,
        ]
        let convolution: [String: Any] = [
            "type": "short_convolution", "modules": modules(["in", "out"]), "kernel_size": 1 << 12,
        ]
        let mamba: [String: Any] = [
            "type": "mamba2", "modules": modules(["in", "out"]), "num_heads": 1 << 10, "head_dim": 1 << 8,
            "num_groups": 1 << 5, "state_size": 1 << 12, "kernel_size": 1 << 12, "norm_eps": 1e-5,
        ]
        var shared = attention
        (shared["keys_of"], shared["modules"]) = (0, modules(["q", "o"]))
        architecture["mixers"] = [attention, net, convolution, mamba, shared]
        architecture["layers"] = (0..<1 << 12).map { $0 % 5 }
        architecture["per_layer"] = ["modules": modules(["ple_gate", "ple_out"]), "size": 1 << 12] as [String: Any]
        architecture["post_norms"] = true
        architecture["mlp_layers"] = [Int](repeating: 0, count: 1 << 12)
        (manifest["architecture"], manifest["seq_lens"]) = (architecture, [1 << 20])
        let largest = try JSONDecoder.snakeCase.decode(
            Manifest.self, from: try JSONSerialization.data(withJSONObject: manifest))
        #expect(largest.architecture.isConsistent)
        var settings = RunSettings(bundle: folder.path, output: folder.path)
        (settings.method, settings.seqLen, settings.rank) = (method, 1 << 20, 1 << 12)
        (settings.optimizer, settings.maxGradNorm, settings.skipBadSteps) = (.adamw, 1, true)
        #expect(throws: MeSPError.self) { _ = try Planner(largest, settings, systemLimit: 1 << 40).plan() }
        (settings.batchSize, settings.order, settings.offload) = (1 << 16, .blocks, .inputs)
        #expect(throws: MeSPError.self) { _ = try Planner(largest, settings, systemLimit: 1 << 40).plan() }
    }

    @Test func runSettings() throws {
        let file = temporaryFolder()
        let (folder, _) = try bundle()
        let manifest = try ModelBundle(url: folder, checksums: false).manifest
        let json = try JSONEncoder.snakeCase.encode(settings(folder, manifest))
        try fuzz(seed: 3) { random in
            try mutatedJSON(json, &random).write(to: file)
            let settings = try RunSettings(contentsOf: file)
            try settings.check()
            try manifest.check(settings)
            _ = try Planner(manifest, settings, systemLimit: nil).plan()
        }
    }

    @Test func savedStates() throws {
        let (folder, _) = try bundle()
        let bundle = try ModelBundle(url: folder)
        var settings = try RunSettings.ofATest(folder.appendingPathComponent("run"), bundle: folder)
        settings.steps = 1
        try Run.run(settings)
        let output = URL(fileURLWithPath: settings.output)
        let (file, sound) = (
            try Data(contentsOf: SavedState.url(in: output)), try StateFile(SavedState.url(in: output))
        )
        let trainer = try Trainer(bundle: bundle, settings: settings, plan: Plan(tileBytes: 1 << 20), folder: output)
        let planner = Planner(bundle.manifest, settings, systemLimit: nil)
        try fuzz(seed: 4) { random in
            let changed: Data
            switch Int.random(in: 0..<4, using: &random) {
            case 0: changed = mutatedBytes(file, &random)
            case 1: changed = StateFile.sealed(mutatedBytes(file.dropLast(32), &random))
            default:  // a valid header with other numbers
                var other = sound
                other.text = try mutatedJSON(sound.text, &random)
                changed = try other.data()
            }
            try changed.write(to: SavedState.url(in: output))
            guard let (state, plan, vectors) = try SavedState.load(from: output, settings) else { return }
            #expect(state.step >= 0 && state.evaluationsSinceBest >= 0)
            if let plan {
                guard planner.isPossible(plan) else { throw SavedState.damaged(in: output) }
                #expect(planner.peak(plan) > 0)
                _ = planner.cheaper(than: plan)
            }
            try SavedState.restore(trainer) { vectors[$0] }
        }
    }

    @Test(arguments: ["", "peft"], [false, true]) func adapters(_ format: String, _ isDoRA: Bool) throws {
        let (folder, _) = try bundle()
        let architecture = try ModelBundle(url: folder, checksums: false).architecture
        let modules = [architecture.modules[0]]
        let layouts = architecture.layers.indices.map {
            LoRALayout(block: architecture.block($0), rank: 2, modules: modules, hasMagnitudes: isDoRA)
        }
        let adapters = folder.appendingPathComponent("adapters")
        try saveAdapterFolder(
            architecture, rank: 2, blocks: architecture.layers.indices, modules: modules, scale: 2,
            model: "m", magnitudes: isDoRA ? { MLXArray.ones([$1.magnitudes]) } : nil, to: adapters,
            lora: { layouts[$0].initial(seed: 0, block: $0, magnitudes: MLXArray.ones([layouts[$0].magnitudes])) })
        let from = format.isEmpty ? adapters : adapters.appendingPathComponent(format)
        let files = ["adapter_config.json", format.isEmpty ? "adapters.safetensors" : "adapter_model.safetensors"].map {
            from.appendingPathComponent($0)
        }
        let contents = try files.map { try Data(contentsOf: $0) }
        try fuzz(seed: 5) { random in
            let config = Int.random(in: 0...1, using: &random)
            try (config == 0 ? mutatedJSON(contents[0], &random) : contents[0]).write(to: files[0])
            try (config == 1 ? mutatedBytes(contents[1], &random) : contents[1]).write(to: files[1])
            let loaded = try loadAdapters(from: from, architecture: architecture)
            #expect(loaded.lora.count == architecture.numHiddenLayers)
        }
    }

    @Test(arguments: [
        #"{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}"#,
        #"{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 16]}}"#,
        #"{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}"#,
        #"{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}"#,
        #"{"a": {"dtype": "F32", "shape": [4], "data_offsets": [9223372036854775807, 16]}}"#,
        #"{"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}"#,
        #"{"a": {"dtype": "F32", "shape": [4], "data_offsets": []}}"#,
        #"{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}"#,
    ]) func headersThatLie(_ header: String) throws {
        func file(_ header: String) -> Data {
            withUnsafeBytes(of: UInt64(header.utf8.count).littleEndian) { Data($0) } + Data(header.utf8)
                + Data(count: 16)
        }
        #expect(Safetensors(file(header)) == nil)
        let sound = try #require(Safetensors(file(#"{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}"#)))
        #expect(sound["a"]?.shape == [4])
    }

    @Test(arguments: ["file", "folder", "manifest"]) func symbolicLinks(_ kind: String) throws {
        let (folder, _) = try bundle()
        let elsewhere = folder.appendingPathExtension("elsewhere")
        let moved = folder.appendingPathComponent(
            ["file": "embedding.bin", "folder": "blocks", "manifest": "manifest.json"][kind] ?? "")
        if kind == "manifest" {  // which must not be a link
            try FileManager.default.removeItem(at: moved)
            try FileManager.default.createSymbolicLink(atPath: moved.path, withDestinationPath: "/dev/zero")
        } else {
            try FileManager.default.moveItem(at: moved, to: elsewhere)
            try moved.link(to: elsewhere)
        }
        #expect(throws: MeSPError.self) { _ = try ModelBundle(url: folder) }
    }
}
