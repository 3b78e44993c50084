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

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

@Suite(.serialized) final class HostileFilesTests {
    private let folder = newFolder()
    private let files = FileManager.default
    private var outside: URL { folder.appendingPathComponent("outside.bin") }
    private var bundle: URL { folder.appendingPathComponent("bundle.mesp") }

    init() throws {
        try tiedBundle().copy(to: bundle)
        try outside.write("not to be touched")
    }

    private func isUntouched() throws -> Bool { try outside.readText() == "not to be touched" }

    private func manifest(_ change: (inout [String: Any]) throws -> Void = { _ in }) throws -> Data {
        var manifest = try bundle.appendingPathComponent("manifest.json").readJSON()
        try change(&manifest)
        return try JSONSerialization.data(withJSONObject: manifest)
    }

    @Test(arguments: ["file", "examples", "mask", "labels"])
    func noDataOfABundleLiesOutsideIt(_ kind: String) throws {
        let json = try manifest {
            var splits = try #require($0["data"] as? [String: [String: Any]])
            if kind == "examples" {
                splits["train"]?[kind] = ["file": "../outside.bin", "count": 1]
            } else {
                splits["train"]?[kind] = "../outside.bin"
            }
            $0["data"] = splits
        }
        try json.write(to: bundle.appendingPathComponent("manifest.json"))
        #expect(message { _ = try ModelBundle(url: bundle) }.contains("does not list ../outside.bin"))
    }

    @Test(
        arguments: ["file", "examples", "mask", "labels"],
        ["../outside.bin", "absolute", "linked.bin", "folder/outside.bin"])
    func noTokensOfAFolderLieOutsideIt(_ kind: String, _ path: String) throws {
        let data = folder.appendingPathComponent("data")
        let text = String(repeating: "Some text to train on.\n", count: 100)
        try TextData(tokenizer: ByteTokenizer(), length: 32).write(.text(text), to: data)
        try Data(count: 4 * 2000).write(to: outside)
        try data.appendingPathComponent("linked.bin").link(to: outside)
        try data.appendingPathComponent("folder").link(to: folder)
        let file = path == "absolute" ? outside.path : path
        try data.appendingPathComponent("data.json").changeJSON {
            var train = try #require($0["train"] as? [String: Any])
            switch kind {
            case "file": train = ["file": file, "tokens": 2000]
            case "examples": train[kind] = ["file": file, "count": 1000]
            default: train[kind] = file
            }
            $0["train"] = train
        }
        let sentence = message { _ = try ModelBundle(url: bundle, text: data, checksums: false).tokens("train") }
        #expect(sentence.contains(data.path), "\(sentence)")
        #expect(sentence.contains("tokenize the text again") || sentence.contains("is not a file of"), "\(sentence)")
    }

    @Test func aLockThatIsALinkIsNotWritten() throws {
        try folder.appendingPathComponent(".lock").link(to: outside)
        #expect(message { _ = try FolderLock(folder) }.contains("is a symbolic link"))
        #expect(try isUntouched())
    }

    @Test func aLockThatIsAnotherFilesNameIsNotWritten() throws {
        #expect(link(outside.path, folder.appendingPathComponent(".lock").path) == 0)
        #expect(message { _ = try FolderLock(folder) }.contains("is another file's name too"))
        #expect(try isUntouched())
    }

    @Test func aFolderThatIsALinkIsNotLocked() throws {
        let named = folder.appendingPathComponent("link")
        try named.link(to: folder)
        #expect(message { _ = try FolderLock(named) }.contains("is a symbolic link"))
        #expect(!folder.appendingPathComponent(".lock").exists)
        #expect(message { try makeNewFolder(named) } == "File exists")
        #expect(message { try makeFolder(outside) } == "it is not a folder")
    }

    @Test(arguments: [false, true]) func aPartialFileIsNew(isHard: Bool) throws {
        let file = folder.appendingPathComponent("file")
        let partial = file.appendingPathExtension("partial")
        if isHard {
            #expect(link(outside.path, partial.path) == 0)
        } else {
            try partial.link(to: outside)
        }
        try writeWhole(file) { try $0.write(contentsOf: Data("new".utf8)) }
        #expect(try isUntouched())
        #expect(try file.readText() == "new")
    }

    @Test func aFileThatIsNotWrittenLeavesNothing() throws {
        let file = folder.appendingPathComponent("file")
        try file.write("old")
        #expect(throws: CancellationError.self) {
            try writeWhole(file) {
                try $0.write(contentsOf: Data("new".utf8))
                throw CancellationError()
            }
        }
        #expect(try file.readText() == "old")
        #expect(!file.appendingPathExtension("partial").exists)
    }

    @Test func anAdapterConfigurationHasABound() throws {
        let architecture = try ModelBundle(url: bundle).architecture
        let config = folder.appendingPathComponent("adapter_config.json")
        try config.write("{}")
        #expect(truncate(config.path, 200 << 20) == 0)
        let sentence = message { _ = try AdapterConfig(folder, of: architecture) }
        #expect(sentence == "its adapter_config.json is not a regular file of at most 4 MiB")
    }

    @Test func onlyJSONIsRead() throws {
        for text in ["1e999", "-1e400", String(repeating: "9", count: 400), "inf", "Infinity", "NaN"] {
            #expect(throws: (any Error).self) { _ = try JSONValue(json: text.utf8) }
        }
        func nested(_ levels: Int) -> String {
            String(repeating: "[", count: levels) + String(repeating: "]", count: levels)
        }
        #expect(throws: Never.self) { _ = try JSONValue(json: nested(Bounds.jsonLevels).utf8) }
        #expect(throws: (any Error).self) { _ = try JSONValue(json: nested(Bounds.jsonLevels + 1).utf8) }
    }

    @Test func noNumberTraps() {
        #expect([1e300, -1e300, .infinity, -.infinity, .nan].map { Int(whole: $0) } == [.max, .min, .max, .min, 0])
        #expect([0x1p63, -0x1p63, 1.9, -1.9].map { Int(whole: $0) } == [.max, .min, 1, -1])
        #expect(Int64(whole: Float.greatestFiniteMagnitude) == .max && UInt32(whole: -1.0) == 0)
    }

    @Test func whatCannotBeShownIsRefusedInAManifest() throws {
        for name in ["a\u{1b}b", "a\u{202e}b", "a\u{2028}b"] {
            let json = try manifest { $0["name"] = name }
            #expect(message { _ = try Manifest.read(json, of: "it") }.contains("cannot be shown"))
        }
    }

    @Test func anErrorOfTheSystemIsNamed() {
        let cause = NSError(domain: NSPOSIXErrorDomain, code: Int(EFBIG))
        let error = NSError(domain: NSCocoaErrorDomain, code: 512, userInfo: [NSUnderlyingErrorKey: cause])
        #expect((error as any Error).plainSentence == "File too large")
    }

    @Test func aLockThatIsAPipeIsNotWaitedFor() throws {
        #expect(mkfifo(folder.appendingPathComponent(".lock").path, 0o600) == 0)
        #expect(message { _ = try FolderLock(folder) }.contains("is not a regular file"))
    }

    @Test func aLogThatIsALinkIsNotWritten() throws {
        try LogWriter.url(in: folder).link(to: outside)
        #expect(message { _ = try LogWriter(folder: folder, resumeAt: 0) }.contains("is a symbolic link"))
        #expect(message { _ = try LogWriter(folder: folder) }.contains("already holds a run"))
        #expect(try isUntouched())
    }

    @Test func aLogThatIsNoFileIsNotRead() throws {
        let log = LogWriter.url(in: folder)
        try files.createSymbolicLink(atPath: log.path, withDestinationPath: "/dev/zero")
        #expect(message { _ = try LogRecord.readAll(in: folder) }.contains("holds no run"))
        #expect(message { _ = try LogOutline(folder: folder) }.contains("holds no run"))
        try files.removeItem(at: log)
        #expect(mkfifo(log.path, 0o600) == 0)
        #expect(message { _ = try LogRecord.readAll(in: folder) }.contains("holds no run"))
        #expect(message { _ = try LogOutline(folder: folder) }.contains("holds no run"))
    }

    @Test func aFileThatBecomesALinkIsNotRead() throws {
        let opened = try ModelBundle(url: bundle)
        let block = bundle.appendingPathComponent(ModelBundle.blockFile(0))
        try files.moveItem(at: block, to: folder.appendingPathComponent("moved.bin"))
        try block.link(to: folder.appendingPathComponent("moved.bin"))
        #expect(message { try opened.withBlock(0) { _ in } }.contains("is a symbolic link"))
        #expect(message { try opened.checkSums(of: opened.manifest.files) }.contains("Cannot read"))
    }

    @Test func endTokensComeFromNoDevice() throws {
        let config = bundle.appendingPathComponent("generation_config.json")
        try? files.removeItem(at: config)
        try files.createSymbolicLink(atPath: config.path, withDestinationPath: "/dev/zero")
        #expect(endTokens(of: bundle, ByteTokenizer()).count <= 1)
    }

    @Test(arguments: ["part", "part.resume"]) func aDownloadWritesNoLink(_ ending: String) async throws {
        let link = folder.appendingPathComponent("file.bin").appendingPathExtension(ending)
        try link.link(to: outside)
        let page = folder.appendingPathComponent("page")
        try Data(count: 100).write(to: page)
        let wanted = RequestedFile(
            request: URLRequest(url: page), file: folder.appendingPathComponent("file.bin.part"), limit: 1000,
            path: "file.bin", repository: "a/b")
        if ending == "part" {
            let error = await #expect(throws: (any Error).self) {
                _ = try await ForegroundTransfer().receive(wanted) { _ in }
            }
            #expect(error?.plainSentence.english.contains("is a symbolic link") == true)
        } else {
            let transfer = BackgroundTransfer(.ephemeral, home: folder)
            _ = try? await transfer.receive(wanted) { _ in }
            transfer.session.finishTasksAndInvalidate()
        }
        #expect(try isUntouched())
    }

    /// A run is planned from the manifest of a bundle on the Hub, before the bundle's other files are downloaded.
    @Test(arguments: [
        "no mixers", "a layer that is not there", "a zero in a shape", "words", "no layers", "a window", "no ranks",
        "a length of zero", "a rank of 2⁶²", "a rank above the width", "a size of 2⁶²", "a factor of RoPE",
        "a frequency",
    ]) func whatIsLookedUpIsChecked(_ damage: String) throws {
        func offer(_ json: Data) throws {
            let offer = try HubDownload.Offer(repository: "a/b", json: json, commit: nil)
            _ = offer.size
            var settings = RunSettings(bundle: "", output: "")
            (settings.seqLen, settings.rank) = (offer.manifest.seqLens.min() ?? 1, offer.manifest.ranks.min() ?? 1)
            _ = try Planner(offer.manifest, settings, systemLimit: nil).plan()
        }
        try offer(manifest())
        let json = try manifest {
            var architecture = try #require($0["architecture"] as? [String: Any])
            var mixers = try #require(architecture["mixers"] as? [[String: Any]])
            var blocks = try #require($0["blocks"] as? [[String: Any]])
            var files = try #require($0["files"] as? [[String: Any]])
            switch damage {
            case "no mixers": mixers = []
            case "a layer that is not there": architecture["layers"] = [0, 0, 7]
            case "a zero in a shape":
                var arrays = try #require(blocks[0]["arrays"] as? [[String: Any]])
                for index in arrays.indices { arrays[index]["shape"] = [0, 0] }
                blocks[0]["arrays"] = arrays
            case "words": blocks[0]["words"] = 1 << 62
            case "no layers":
                blocks[0]["layers"] = [Int]()
                architecture["layers"] = [Int]()
            case "a window": mixers[0]["sliding_window"] = 1 << 31
            case "a factor of RoPE": mixers[0]["rope_scale"] = -1
            case "a frequency": mixers[0]["frequencies"] = [-1]
            case "no ranks": $0["ranks"] = [Int]()
            case "a length of zero": $0["seq_lens"] = [0]
            case "a rank of 2⁶²": $0["ranks"] = [1 << 62]
            case "a rank above the width": $0["ranks"] = [8, 129]
            default: for index in files.indices { files[index]["size"] = 1 << 62 }
            }
            architecture["mixers"] = mixers
            ($0["architecture"], $0["blocks"], $0["files"]) = (architecture, blocks, files)
        }
        let sentence = message { try offer(json) }
        #expect(sentence.hasPrefix("a/b: the manifest"), "\(sentence)")
    }

    /// Decoding takes much more memory than the manifest's size, so a manifest above `Manifest.largestSize` is refused before it is decoded.
    @Test func aLongManifestTakesLittleMemory() throws {
        let entry = #"{"path":"x","size":0,"sha256":""}"#
        let short = String(decoding: try manifest { $0["files"] = [Any]() }, as: UTF8.self)
        let list = "\"files\":[\(String(repeating: "\(entry),", count: 700_000))\(entry)]"
        let json = Data(short.replacing("\"files\":[]", with: list).utf8)
        #expect(json.count > 20_000_000)
        let sampler = FootprintSampler()
        defer { sampler.stop() }
        let before = memoryFootprint()
        #expect(throws: MeSPError.self) { _ = try HubDownload.Offer(repository: "a/b", json: json, commit: nil) }
        #expect(sampler.takePeak() - before < 100_000_000)
    }

    @Test(arguments: ["[", "{\"a\":"]) func deeplyNestedJSONIsRefused(_ opening: String) async throws {
        let json = Data(String(repeating: opening, count: 1_000_000).utf8)
        try json.write(to: folder.appendingPathComponent("data.json"))
        let folder = folder
        let sentences = await Task.detached {
            [
                message { _ = try HubDownload.Offer(repository: "a/b", json: json, commit: nil) },
                message { _ = try TokenFolder.entries(in: folder) },
                message { _ = try LogRecord.read(json) },
                message { _ = try RunSettings(contentsOf: folder.appendingPathComponent("data.json")) },
            ]
        }.value
        #expect(sentences.allSatisfy { !$0.isEmpty }, "\(sentences)")
    }

    @Test func noFunctionIsImportedBeforeItsSumIsRight() throws {
        let bundle = try ModelBundle(url: bundle, checksums: false)
        let (length, rank) = (try #require(bundle.manifest.seqLens.max()), bundle.manifest.ranks[0])
        let file = try #require(bundle.manifest.blocks[0].plainFunctions["\(length)"])
        func imported() throws -> [ImportedFunction?] {
            try bundle.importFunctions(\.plainFunctions, length: length, rank: rank)
        }
        #expect(try imported().allSatisfy { $0 != nil })
        try bundle.url.appendingPathComponent(file).flipBit()
        #expect(message { _ = try imported() }.contains("its SHA-256 differs"))
    }

    @Test(arguments: ["kept_blocks", "cache_bytes", "tile_bytes"])
    func aPlanThatCannotBeIsRefused(_ name: String) throws {
        var settings = try RunSettings.ofATest(folder.appendingPathComponent("run"))
        settings.steps = 1
        try Run.run(settings)
        let url = SavedState.url(in: URL(fileURLWithPath: settings.output))
        var file = try StateFile(url)
        try file.change {
            var plan = try #require($0["plan"] as? [String: Any])
            plan[name] = name == "kept_blocks" ? 1 << 20 : name == "tile_bytes" ? 0 : -(1 << 40)
            $0["plan"] = plan
        }
        try file.data().write(to: url)
        (settings.steps, settings.resume) = (2, true)
        #expect(message { try Run.run(settings) }.contains("is damaged; start the run again in another folder."))
    }
}
