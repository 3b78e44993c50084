import Foundation
import Testing

@testable import MeSPCore

@Suite(.serialized) struct ModelBundleTests {
    /// A private copy of the first fixture's bundle.
    private func copy() throws -> URL {
        let source = try #require(TrainerTests.cases.first).appendingPathComponent("bundle.mesp")
            .resolvingSymlinksInPath()
        let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
        try FileManager.default.copyItem(at: source, to: folder)
        return folder
    }

    private func message(_ body: () throws -> Void) -> String {
        do {
            try body()
            return ""
        } catch {
            return error.localizedDescription
        }
    }

    @Test func refusesWhatIsNoBundle() {
        let missing = URL(fileURLWithPath: "/nowhere/x.mesp")
        #expect(message { _ = try ModelBundle(url: missing) }.contains("manifest.json"))
    }

    @Test(arguments: [
        ("blocks/00.bin", "damaged"), ("embedding.bin", "damaged"),
    ]) func noticesAFlippedByte(_ file: String, _ expected: String) throws {
        let folder = try copy()
        defer { try? FileManager.default.removeItem(at: folder) }
        let url = folder.appendingPathComponent(file)
        var data = try Data(contentsOf: url)
        data[data.count / 3] ^= 1
        try data.write(to: url)
        let text = message { _ = try ModelBundle(url: folder) }
        #expect(text.contains(expected) && text.contains(file))
    }

    @Test func noticesATruncatedAndAMissingFile() throws {
        let folder = try copy()
        defer { try? FileManager.default.removeItem(at: folder) }
        let url = folder.appendingPathComponent("blocks/01.bin")
        let data = try Data(contentsOf: url)
        try data.dropLast(1).write(to: url)
        #expect(message { _ = try ModelBundle(url: folder) }.contains("blocks/01.bin"))
        try FileManager.default.removeItem(at: url)
        #expect(message { _ = try ModelBundle(url: folder) }.contains("lacks blocks/01.bin"))
    }

    @Test(arguments: [
        ("\"format\": 1", "\"format\": 2", "format 2"),
        ("\"mlx_version\": \"0.31.1\"", "\"mlx_version\": \"0.32.0\"", "MLX 0.32.0"),
        ("\"device\": \"cpu\"", "\"device\": \"gpu\"", "--device cpu"),
        ("\"num_attention_heads\":", "\"heads\":", "num"),
        ("\"path\": \"embedding.bin\"", "\"path\": \"../embedding.bin\"", "embedding.bin"),
        ("\"hidden_size\": ", "\"hidden_size\": 64", "export the bundle again"),
        ("{", "", "damaged"),
    ]) func refusesAWrongManifest(_ text: String, _ replacement: String, _ expected: String) throws {
        let folder = try copy()
        defer { try? FileManager.default.removeItem(at: folder) }
        let url = folder.appendingPathComponent("manifest.json")
        let manifest = try String(contentsOf: url, encoding: .utf8)
        #expect(manifest.contains(text))
        try manifest.replacingOccurrences(of: text, with: replacement).write(to: url, atomically: true, encoding: .utf8)
        let sentence = message { _ = try ModelBundle(url: folder) }
        #expect(sentence.lowercased().contains(expected.lowercased()), "\(sentence)")
    }

    @Test func sha256KnownAnswers() throws {
        let url = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
        defer { try? FileManager.default.removeItem(at: url) }
        // FIPS 180-4 examples; 1,000,000 times "a" spans several pieces.
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
        ] {
            try text.write(to: url, atomically: true, encoding: .utf8)
            #expect(try sha256(of: url) == digest)
        }
    }
}

@Suite struct TokenStreamTests {
    @Test(arguments: [1, 2, 7, 10, 97, 100]) func anEpochVisitsEachWindowOnce(_ count: Int) {
        let length = 3
        let stream = TokenStream(tokens: (0..<Int32(count * length + 1)).map { $0 })
        #expect(stream.windowCount(length: length) == count)
        let first = (0..<count).map { stream.trainingWindow(step: $0, seed: 5, length: length) }
        #expect(Set(first.map { $0.first }).count == count)
        #expect(first.allSatisfy { $0.count == length + 1 })
        #expect(stream.trainingWindow(step: count, seed: 5, length: length) == first[0])
    }
}
