import Foundation
import MeSPSentences
import Testing

@testable import MeSP
@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPFiles

@Suite(.serialized) struct ModelBundleTests {
    @Test func refusesWhatIsNoBundle() {
        let missing = URL(fileURLWithPath: "/nowhere/x.mesp")
        #expect(message { _ = try ModelBundle(url: missing) }.contains("manifest.json"))
    }

    @Test(arguments: ["blocks/00.bin", "embedding.bin"]) func noticesAFlippedByte(_ file: String) throws {
        let folder = try tiedBundle().copy()
        try folder.appendingPathComponent(file).flipBit(ofByte: 1000)
        #expect(message { _ = try ModelBundle(url: folder) }.contains("\(file) in \(folder.path) is damaged"))
    }

    @Test func noticesATruncatedAndAMissingFile() throws {
        let folder = try tiedBundle().copy()
        let url = folder.appendingPathComponent("blocks/01.bin")
        let data = try Data(contentsOf: url)
        try data.dropLast(1).write(to: url)
        #expect(message { _ = try ModelBundle(url: folder) }.contains("blocks/01.bin"))
        try FileManager.default.removeItem(at: url)
        #expect(message { _ = try ModelBundle(url: folder) }.contains("lacks blocks/01.bin"))
    }

    @Test(arguments: [
        (
            "\"format\": 7", "\"format\": 6",
            "format 6, and this build reads format 7; write it again with mesp-export --from BUNDLE --overwrite."
        ),
        ("\"num_attention_heads\":", "\"heads\":", "num"),
        ("\"path\": \"embedding.bin\"", "\"path\": \"../embedding.bin\"", "embedding.bin"),
        ("\"hidden_size\": ", "\"hidden_size\": 64", "export the bundle again"),
        ("{", "", "damaged"),
    ]) func refusesAWrongManifest(_ text: String, _ replacement: String, _ expected: String) throws {
        let folder = try tiedBundle().copy()
        let url = folder.appendingPathComponent("manifest.json")
        #expect(try url.readText().contains(text))
        try url.replace(text, with: replacement)
        let sentence = message { _ = try ModelBundle(url: folder) }
        #expect(sentence.lowercased().contains(expected.lowercased()), "\(sentence)")
    }

    @Test(arguments: [
        "a block of two kinds", "a block of no kind", "a kind with two attentions", "many dimensions", "another dtype",
        "scales of no format", "a norm that is stacked", "a matrix that is stacked",
    ]) func refusesBlocksThatDoNotFit(_ damage: String) throws {
        let gemma3 = try #require(Fixture.cases.first { $0.lastPathComponent == "gemma3" })
        let folder = try gemma3.appendingPathComponent("bundle.mesp").copy()
        let url = folder.appendingPathComponent("manifest.json")
        var manifest = try url.readJSON()
        var blocks = try #require(manifest["blocks"] as? [[String: Any]])
        var architecture = try #require(manifest["architecture"] as? [String: Any])
        var arrays = try #require(blocks[0]["arrays"] as? [[String: Any]])
        let index = try #require(arrays.firstIndex { ($0["name"] as? String)?.hasSuffix("q_proj.scales") == true })
        let sound = try ModelBundle(url: folder)
        #expect(sound.manifest.blocks.count == 2)
        switch damage {
        case "a block of two kinds": blocks[1]["layers"] = [0, 1]
        case "a block of no kind": blocks[1]["layers"] = [Int]()
        case "a kind with two attentions": architecture["layers"] = [1, 0]
        case "many dimensions": arrays[index]["shape"] = [64, 1 << 24, 1 << 24, 1 << 24]
        case "another dtype": arrays[index]["dtype"] = "uint8"
        case "a norm that is stacked":
            let norm = try #require(arrays.firstIndex { $0["name"] as? String == "input_layernorm.weight" })
            arrays[norm]["stride"] = 1
        case "a matrix that is stacked": arrays[index]["stride"] = 1
        default: arrays[index]["shape"] = [(arrays[index]["shape"] as? [Int])?[0] ?? 0, 3]
        }
        if damage == "a kind with two attentions" {
            blocks = [blocks[0]]
            blocks[0]["layers"] = [0, 1]
        }
        blocks[0]["arrays"] = arrays
        manifest["blocks"] = blocks
        manifest["architecture"] = architecture
        try JSONSerialization.data(withJSONObject: manifest).write(to: url)
        let sentence = message { _ = try ModelBundle(url: folder) }
        #expect(sentence.hasSuffix("export the bundle again."), "\(sentence)")
    }

    @Test(arguments: ["functions", "plain_functions", "packed_functions"])
    func refusesAKindWithSomeFunctions(_ kind: String) throws {
        let folder = try copyWithoutFunctions(demoBundle)
        let url = folder.appendingPathComponent("manifest.json")
        let bare = try ModelBundle(url: folder).manifest
        #expect(bare.blocks.allSatisfy { !$0.hasFunctions })
        let length = try #require(bare.seqLens.first)
        func write(_ kinds: [String]) throws {
            try url.changeJSON {
                var blocks = try #require($0["blocks"] as? [[String: Any]])
                for kind in kinds {
                    blocks[0][kind] = Dictionary(
                        uniqueKeysWithValues: bare.seqLens.map { ("\($0)", "block.\($0).mlxfn") })
                }
                $0["blocks"] = blocks
            }
        }
        try write([kind])
        let sentence = message { _ = try ModelBundle(url: folder) }
        #expect(sentence.hasSuffix("no function for \(length) tokens; export the bundle again."), "\(sentence)")
        try write(["functions", "plain_functions", "packed_functions"])
        #expect(try ModelBundle(url: folder).manifest.blocks.allSatisfy(\.hasFunctions))
    }

    @Test func theLicenceOfAModelsOwnHasNameAndLink() throws {
        let folder = try tiedBundle().copy()
        #expect(try ModelBundle(url: folder).manifest.model.licenseName == nil)
        let named = "\"model\": {\"license_name\": \"gemma\", \"license_link\": \"https://ai.google.dev/gemma/terms\", "
        try folder.appendingPathComponent("manifest.json").replace("\"model\": {", with: named)
        let model = try ModelBundle(url: folder).manifest.model
        #expect(model.licenseName == "gemma" && model.licenseLink == "https://ai.google.dev/gemma/terms")
    }

    @Test(arguments: [[-1], [0, 0], [0, 1 << 20], ["0"], 0] as [any Sendable])
    func refusesEndTokensThatAreNone(_ tokens: any Sendable) throws {
        let folder = try tiedBundle().copy()
        let url = folder.appendingPathComponent("manifest.json")
        try url.changeJSON { $0["end_tokens"] = [0, 1] }
        #expect(try ModelBundle(url: folder).manifest.endTokens == [0, 1])
        try url.changeJSON { $0["end_tokens"] = tokens }
        #expect(message { _ = try ModelBundle(url: folder) }.hasSuffix("export the bundle again."))
    }

    @Test func sha256KnownAnswers() throws {
        let url = temporaryFolder()
        for (text, digest) in [
            ("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            ("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
            ),
            (
                String(repeating: "a", count: 1_000_000),
                "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
            ),
            (
                String(repeating: "a", count: 3_000_000),
                "2a152c894398719c0570f83fac34ac03a0f6e8e474b995c2403aa5434f7b9dd4"
            ),
        ] {
            try text.write(to: url, atomically: true, encoding: .utf8)
            #expect(try sha256(of: url) == digest)
        }
    }
}

@Suite struct TokenStreamTests {
    @Test(arguments: [1, 2, 7, 10, 97, 100]) func anEpochVisitsEachWindowOnce(_ count: Int) {
        let length = 3
        let stream = TokenStream(tokens: data(Array(0...UInt32(count * length))))
        let windows = stream.sequences(lengths: [length])
        #expect(windows.count == count)
        let first = (0..<count).map { windows.training($0, seed: 5) }
        #expect(Set(first.map { $0.tokens[0] }).count == count)
        #expect(first.allSatisfy { $0.tokens.count == length + 1 && $0.counted == Array(0..<length) })
        #expect(windows.training(count, seed: 5) == first[0])
    }

    private let stream = TokenStream(
        tokens: data([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9]), examples: data([0, 5, 5, 3, 8, 5]),
        mask: Data([0, 0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1]))

    @Test func anExampleIsCutOrPaddedAndWhatIsMaskedDoesNotCount() {
        let short = stream.sequences(lengths: [3])
        #expect(short.count == 2)
        #expect(short[0] == Example(tokens: [1, 2, 3, 4], counted: [1]))
        #expect(short[1] == Example(tokens: [6, 7, 8, 0], counted: [0, 1]))
        #expect(short[0].targets == [3])
        let long = stream.sequences(lengths: [8])
        #expect(long.count == 3)
        #expect(long[0] == Example(tokens: [1, 2, 3, 4, 5, 0, 0, 0, 0], counted: [1, 3]))
        #expect(long[0].targets == [3, 5] && long[2].targets == [9])
    }

    @Test(arguments: [[0, 14], [0, 1], [12, 2], [UInt32.max, 2]]) func refusesAnExampleOutsideTheStream(
        _ bounds: [UInt32]
    ) {
        let stream = TokenStream(tokens: data((0..<13).map { $0 }), examples: data(bounds))
        #expect(throws: MeSPError.self) { try stream.check(vocabulary: 100) }
        #expect(throws: MeSPError.self) { try self.stream.check(vocabulary: 9) }
        #expect(throws: Never.self) { try self.stream.check(vocabulary: 10) }
        let short = TokenStream(tokens: data([1, 2, 3]), mask: Data([1, 1]))
        #expect(throws: MeSPError.self) { try short.check(vocabulary: 10) }
    }

    @Test func anExampleIsAsShortAsALengthAllows() {
        let sequences = stream.sequences(lengths: [1, 2, 4, 8])
        #expect(sequences.count == 3)
        #expect(sequences[0] == Example(tokens: [1, 2, 3, 4, 5], counted: [1, 3]))
        #expect(sequences[1] == Example(tokens: [6, 7, 8], counted: [0, 1]))
        #expect(sequences[2] == Example(tokens: [9, 9, 9, 9, 9], counted: [3]))
        let early = TokenStream(
            tokens: data([1, 2, 3, 4, 5, 6]), examples: data([0, 6]), mask: Data([0, 1, 1, 0, 0, 0]))
        #expect(early.sequences(lengths: [2, 8])[0] == Example(tokens: [1, 2, 3], counted: [0, 1]))
        #expect(early.sequences(lengths: [3, 8])[0] == Example(tokens: [1, 2, 3, 4], counted: [0, 1]))
        let windows = TokenStream(tokens: data([0, 1, 2, 3, 4])).sequences(lengths: [1, 2])
        #expect(windows.count == 2 && windows[0] == Example(tokens: [0, 1, 2], counted: [0, 1]))
    }

    @Test func windowsBeginAsTheModelsTextsDo() {
        let windows = TokenStream(tokens: data([9, 1, 2, 3, 4]), begin: 9).sequences(lengths: [2])
        #expect(windows.count == 2)
        #expect(windows[0].tokens == [9, 1, 2] && windows[1].tokens == [9, 3, 4])
        let examples = TokenStream(tokens: data([1, 2, 3, 4]), examples: data([0, 2, 2, 2]), begin: 9)
        #expect(examples.sequences(lengths: [2])[1].tokens == [3, 4, 0])
        #expect(throws: MeSPError.self) { try TokenStream(tokens: data([1, 2]), begin: 9).check(vocabulary: 9) }
        #expect(throws: Never.self) { try TokenStream(tokens: data([1, 2]), begin: 8).check(vocabulary: 9) }
    }

    @Test func aPairOfWhichOneAnswerDoesNotCountIsLeftOut() {
        let stream = TokenStream(
            tokens: data(Array(0..<12)), examples: data([0, 3, 3, 3, 6, 3, 9, 3]),
            mask: Data([0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 1]), labels: Data([3, 2, 3, 2]))
        let sequences = stream.sequences(lengths: [4])
        #expect((0..<sequences.count).map { sequences.label($0).number } == [2, 3])
    }

    @Test func shortExamplesShareASequence() {
        let stream = TokenStream(
            tokens: data([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]), examples: data([0, 3, 3, 2, 5, 5, 10, 2]),
            mask: Data([0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1]), packsExamples: true)
        let sequences = stream.sequences(lengths: [2, 6], packed: true)
        #expect(sequences.count == 2)
        #expect(
            sequences[0]
                == Example(tokens: [1, 2, 3, 4, 5, 11, 12], counted: [0, 1, 3, 5], records: [0..<3, 3..<5, 5..<6]))
        #expect(sequences[0].targets == [2, 3, 5, 12])
        #expect(sequences[1] == Example(tokens: [6, 7, 8, 9, 10, 0, 0], counted: [1, 2, 3], records: [0..<6]))
        #expect(stream.sequences(lengths: [2, 6]).count == 4)
        #expect(!stream.hasWholeRecords)
    }

    @Test func rowsOfImagesTakeThePlacesOfTokens() throws {
        func stream(_ places: [UInt32], mask: [UInt8] = [0, 0, 0, 1, 0, 0, 1], packs: Bool = false) -> TokenStream {
            TokenStream(
                tokens: data([1, 2, 2, 3, 4, 2, 5]), examples: data([0, 4, 4, 3]), mask: Data(mask),
                packsExamples: packs,
                images: ImageRows(
                    rows: Data([10, 11, 20, 21, 30, 31]), dtype: .float16, width: 2, places: data(places)))
        }
        let places: [UInt32] = [0, 2, 3, 0, 0, 1, 0]
        #expect(throws: Never.self) { try stream(places).check(vocabulary: 6) }
        let alone = stream(places).sequences(lengths: [2, 4])
        #expect(alone[0].images?.positions == [1, 2] && alone[0].images?.bytes == Data([20, 21, 30, 31]))
        #expect(alone[1].images?.positions == [1] && alone[1].images?.bytes == Data([10, 11]))
        #expect(stream(places).sequences(lengths: [3])[0].images?.positions == [1, 2])
        #expect(stream([0, 0, 0, 0, 0, 1, 0]).sequences(lengths: [4])[0].images == nil)
        let packed = stream(places, packs: true).sequences(lengths: [8], packed: true)
        #expect(packed[0].images?.positions == [1, 2, 5])
        #expect(packed[0].images?.bytes == Data([20, 21, 30, 31, 10, 11]))
        for wrong in [
            stream([0, 4, 0, 0, 0, 0, 0]), stream([0, 0, 0, 1, 0, 0, 0]), stream([0, 1]),
            stream(places, mask: [1, 1, 1, 1, 1, 1, 1]),
        ] {
            #expect(throws: MeSPError.self) { try wrong.check(vocabulary: 6) }
        }
    }

    @Test func aWindowInWhichNothingCountsIsNoSequence() {
        let stream = TokenStream(tokens: data([0, 1, 2, 3, 4, 5, 6, 7, 8]), mask: Data([1, 0, 1, 0, 0, 0, 0, 1, 1]))
        let windows = stream.sequences(lengths: [2])
        #expect(windows.count == 2)
        #expect(windows[0] == Example(tokens: [0, 1, 2], counted: [1]))
        #expect(windows[1] == Example(tokens: [6, 7, 8], counted: [0, 1]))
    }
}

private func data(_ numbers: [UInt32]) -> Data { numbers.withUnsafeBytes { Data($0) } }
