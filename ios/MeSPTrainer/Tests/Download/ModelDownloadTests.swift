import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPDownload
@testable import MeSPFiles
@testable import MeSPImport

@Suite(.serialized) @MainActor final class ModelDownloadTests: AppSuite {
    private nonisolated static let repository = "someone/tiny-4bit"
    private let source = temporaryFolder()
    private let files = FileManager.default

    override init() throws {
        try super.init()
        try TinyModel.write(to: source)
    }

    private func lookUp(_ hub: Hub, freeBytes: Int? = nil) async -> AppModel {
        await lookUp(Self.repository, on: hub, freeBytes: freeBytes)
    }

    private func lookUp(_ faults: [String: [Any]]) async throws -> (problem: String?, requests: [String]) {
        let hub = try Hub(source, faults)
        let model = await lookUp(hub)
        #expect((model.downloads.offer == nil) == (model.problem != nil))
        #expect(try files.contentsOfDirectory(atPath: documents.path) == [])
        return (model.problem?.english, hub.end())
    }

    private func sizes() throws -> [String: Int] {
        let names = try files.contentsOfDirectory(atPath: source.path)
        return try Dictionary(
            uniqueKeysWithValues: ModelImport.neededFiles(names).map {
                ($0, try Data(contentsOf: source.appendingPathComponent($0)).count)
            })
    }

    private func hasBundleAlone() throws -> Bool {
        let bundle = try ModelBundle(url: documents.appendingPathComponent("tiny-4bit.mesp"))  // compares every SHA-256
        return try !bundle.manifest.files.isEmpty
            && files.contentsOfDirectory(atPath: documents.path) == ["tiny-4bit.mesp"]
    }

    private var commitFolder: URL {
        documents.appendingPathComponent(".downloading-someone--tiny-4bit/0123456789abcdef")
    }

    @Test func aModelIsOfferedBeforeItsWeightsAreAskedFor() async throws {
        let hub = try Hub(source)
        let model = await lookUp(hub)
        let offer = try #require(model.downloads.offer)
        #expect(hub.end() == ["manifest.json whole", "api whole", "config.json whole", "README.md whole"])
        #expect(offer.isModel && offer.model?.commit == "0123456789abcdef")
        #expect(offer.size == (try sizes().values.reduce(0, +)))
        let opened = try ModelImport(model: source)
        #expect(offer.bundleSize >= opened.manifest.mappedBytes)
        #expect(model.downloads.spaceWhileRewriting == offer.size + offer.bundleSize)
        #expect(model.downloads.fit.english.hasSuffix("it fits this phone."))
        for file in offer.files { #expect((file.sha256 != nil) == file.path.hasSuffix(".safetensors"), "\(file.path)") }
        let stored = try JSONDecoder().decode(HubDownload.Offer.self, from: JSONEncoder().encode(offer))
        #expect(stored.size == offer.size && stored.manifest.mappedBytes == offer.manifest.mappedBytes)
    }

    @Test func aBundlesOfferTakesItsSizeOnce() async throws {
        let hub = try Hub(try tiedBundle())
        let model = await lookUp(hub)
        let offer = try #require(model.downloads.offer)
        #expect(hub.end() == ["manifest.json whole"])
        #expect(!offer.isModel && offer.bundleSize == offer.size && model.downloads.spaceWhileRewriting == nil)
    }

    @Test func aLicenceIsNamedAndLedTo() {
        #expect(DownloadState.license("apache-2.0", name: nil) == "apache-2.0")
        #expect(DownloadState.license("other", name: "gemma") == "gemma")
        #expect(DownloadState.license(nil, name: "") == "not named")
        func link(_ link: String?) -> String? {
            HubDownload.Offer.link(link, in: "https://huggingface.co/a/b/blob/0123456/")?.absoluteString
        }
        #expect(link("https://example.org/terms") == "https://example.org/terms")
        #expect(link("LICENSE") == "https://huggingface.co/a/b/blob/0123456/LICENSE")
        for other in [nil, "", "javascript:alert(1)", "file:///etc/passwd", "tel:1"] { #expect(link(other) == nil) }
    }

    @Test(arguments: ["config.json", "safetensors"])
    func whatIsNeitherABundleNorAModelIsRefused(_ ending: String) async throws {
        for name in try files.contentsOfDirectory(atPath: source.path) where name.hasSuffix(ending) {
            try files.removeItem(at: source.appendingPathComponent(name))
        }
        let (problem, requests) = try await lookUp([:])
        #expect(
            problem
                == "someone/tiny-4bit has neither a bundle nor a model in MLX's format, with config.json and safetensors; take another repository."
        )
        #expect(requests == ["manifest.json whole", "api whole"])
        #expect(
            try await lookUp(["api": [404]]).problem
                == "There is no someone/tiny-4bit on the Hub; write the repository as owner/name.")
    }

    @Test func aFamilyThatCannotBeRewrittenIsRefusedAsTheImportDoes() async throws {
        let config = source.appendingPathComponent("config.json")
        try config.replace("\"qwen2\"", with: "\"no_such_family\"")
        let sentence = message {
            _ = try ModelImport.manifest(
                config: Data(contentsOf: config), card: nil, of: Self.repository, revision: nil)
        }
        let (problem, requests) = try await lookUp([:])
        #expect(!sentence.isEmpty && problem == sentence)
        #expect(requests == ["manifest.json whole", "api whole", "config.json whole", "README.md whole"])
    }

    private struct Entry: Encodable {
        struct LargeFile: Encodable {
            var sha256: String
            var size: Int
        }
        var rfilename = "config.json"
        var size: Int? = 100
        var lfs: LargeFile?
    }

    private func list(_ entries: [Entry], commit: String = "0123456789abcdef") throws -> [String: [Any]] {
        struct List: Encodable {
            let sha: String
            let siblings: [Entry]
        }
        let json = try JSONEncoder().encode(List(sha: commit, siblings: entries))
        return ["api": [["answer": String(decoding: json, as: UTF8.self)]]]
    }

    @Test func aListOfFilesThatCannotBeIsRefused() async throws {
        let config = Entry()
        let weights = Entry(rfilename: "model.safetensors", size: 1 << 20)
        #expect(try await lookUp(list([config, weights])).problem?.contains("config.json") == true, "it is another's")
        let digest = String(repeating: "0", count: 64)
        let paths = [
            "../model.safetensors", "model/../../x.safetensors", "/model.safetensors", "a//b", "", ".", "a\0b",
        ]
        var lists = try paths.map { try list([config, weights, Entry(rfilename: $0)]) }
        for size in [-1, 1 << 62, nil] {
            lists.append(try list([config, Entry(rfilename: "model.safetensors", size: size)]))
        }
        for (sum, size) in [(digest, -1), (digest, 1 << 62), ("0", 1), (String(repeating: "g", count: 64), 1)] {
            let large = Entry(rfilename: "model.safetensors", size: 1, lfs: .init(sha256: sum, size: size))
            lists.append(try list([config, large]))
        }
        lists.append(try list([config, weights, weights]))
        let many = try list([config, weights] + (0..<999).map { Entry(rfilename: "\($0).txt") })
        #expect(
            try await lookUp(many).problem
                == "someone/tiny-4bit has more files than a model needs; take another repository.")
        for commit in ["", "main", "../../..", "0123", String(repeating: "0", count: 65)] {
            lists.append(try list([config, weights], commit: commit))
        }
        for faults in lists {
            let (problem, requests) = try await lookUp(faults)
            #expect(
                problem == "The file list of someone/tiny-4bit cannot be a model's; take another repository.",
                "\(faults)")
            #expect(requests == ["manifest.json whole", "api whole"])
        }
    }

    @Test func whatIsNoListOfFilesIsRefused() async throws {
        for answer in ["<html>Sign in to this network</html>", "", "[]", "{}", "{\"sha\":1,\"siblings\":[]}"] {
            let (problem, requests) = try await lookUp(["api": [["answer": answer]]])
            #expect(problem == "The file list of someone/tiny-4bit is not one; check the network and try again.")
            #expect(requests == ["manifest.json whole", "api whole"])
        }
        let deep = ["answer": "{\"siblings\":[", "times": 100_000] as [String: Any]
        #expect(try await lookUp(["api": [deep]]).problem?.contains("is not one") == true)
        let long = ["answer": " ", "times": Manifest.largestSize + 1] as [String: Any]
        #expect(try await lookUp(["api": [long]]).problem == "file list of someone/tiny-4bit is longer than it may be.")
    }

    @Test(arguments: ["config.json", "README.md"])
    func aTextThatIsNotAsLongAsListedIsRefused(_ name: String) async throws {
        #expect(try await lookUp([name: ["long"]]).problem == "\(name) of someone/tiny-4bit is longer than it may be.")
        #expect(
            try await lookUp([name: ["short"]]).problem
                == "\(name) of someone/tiny-4bit is shorter than its repository says.")
        try Data(repeating: UInt8(ascii: " "), count: 1 << 20 + 1).write(to: source.appendingPathComponent(name))
        let (problem, requests) = try await lookUp([:])
        #expect(problem == "\(name) of someone/tiny-4bit is longer than it may be.")
        #expect(!requests.contains("\(name) whole"), "it is not asked for")
    }

    @Test func aModelIsDownloadedAndRewritten() async throws {
        let hub = try Hub(source)
        let model = await lookUp(hub)
        await model.download()
        #expect(model.problem == nil && model.form.bundle?.id == "tiny-4bit.mesp")
        #expect(model.form.bundle?.problem == nil)
        #expect(model.downloads.offer == nil && model.downloads.progress == nil && !model.downloads.isRewriting)
        #expect(try hasBundleAlone())
        let fetched = hub.end().dropFirst(4)
        #expect(fetched.sorted() == (try sizes().keys.map { "\($0) whole" }.sorted()))
        await model.download()
        #expect(model.problem == nil, "nothing is offered any longer")
    }

    @Test func whatBreaksOffGoesOnFromThereAndIsChecked() async throws {
        let weights = "model-00002-of-00002.safetensors"
        let hub = try Hub(
            source, [weights: ["flip", "flip", "cut"], "tokenizer.json": ["short", "short", "short", "short"]])
        let model = await lookUp(hub)
        await model.download()
        #expect(model.problem == "\(weights) of someone/tiny-4bit is damaged: its SHA-256 differs.")
        model.problem = nil
        await model.download()
        #expect(model.problem?.english.contains("tokenizer.json of someone/tiny-4bit is") == true)
        #expect(model.library.bundles.isEmpty)
        model.problem = nil
        await model.download()
        #expect(model.problem == nil)
        #expect(try hasBundleAlone())
        #expect(hub.end().contains { $0.hasPrefix("\(weights) bytes=") }, "not from the beginning")
    }

    private func endWhileRewriting(_ hub: Hub) async throws -> HubDownload.Offer {
        let download = try HubDownload(repository: Self.repository, hub: hub.url, patience: 5)
        let offer = try await download.fetchOffer()
        let folder = DocumentsFolder(documents: documents)
        await #expect(throws: CancellationError.self) {
            _ = try await folder.download(offer, by: download, usesAnyNetwork: true) { step in
                if case .rewritten(let bytes) = step, bytes > 0 { withUnsafeCurrentTask { $0?.cancel() } }
            }
        }
        try folder.save(.init(offer: offer, usesAnyNetwork: true))
        #expect(try folder.bundles().isEmpty)
        return offer
    }

    @Test func aRewritingThatTheAppWasEndedInGoesOn() async throws {
        let hub = try Hub(source)
        _ = try await endWhileRewriting(hub)
        let written = { try FileManager.default.subpathsOfDirectory(atPath: self.commitFolder.path) }
        #expect(try written().contains { !$0.hasPrefix("model") }, "the bundle's pieces lie beside the model")
        let next = app(on: hub)
        await next.finishDownload()
        #expect(next.problem == nil && next.form.bundle?.id == "tiny-4bit.mesp")
        #expect(try hasBundleAlone())
        #expect(hub.end().count == (try sizes().count + 4), "nothing is asked for again")
    }

    @Test(arguments: [false, true]) func aRewritingThatEndedWithTheAppIsOver(_ wasMoved: Bool) async throws {
        let hub = try Hub(source)
        _ = try await endWhileRewriting(hub)
        try files.removeItem(at: commitFolder)
        try commitFolder.appendingPathComponent("model").makeFolder()
        let place = wasMoved ? documents : commitFolder
        try tiedBundle().copy(to: place.appendingPathComponent("tiny-4bit.mesp"))
        let next = app(on: hub)
        await next.finishDownload()
        await next.refresh()
        #expect(next.problem == nil && next.library.bundles.map(\.id) == ["tiny-4bit.mesp"])
        #expect(try hasBundleAlone())
        #expect(hub.end().count == (try sizes().count + 4), "nothing is asked for again")
    }

    @Test func filesOfAnotherCommitAreNotKept() async throws {
        let old = commitFolder.deletingLastPathComponent().appendingPathComponent("abcdef0123456789/model")
        try old.makeFolder()
        for (name, size) in try sizes() { try Data(count: size).write(to: old.appendingPathComponent(name)) }
        let hub = try Hub(source)
        let model = await lookUp(hub)
        let both = try #require(model.downloads.spaceWhileRewriting) + DocumentsFolder.spareBytes
        let small = await lookUp(hub, freeBytes: both - 1)
        await small.download()
        #expect(small.problem?.english.hasSuffix("make room for it first.") == true, "they are no part of it")
        await model.download()
        #expect(model.problem == nil)
        #expect(try hasBundleAlone())
        #expect(hub.end().contains("tokenizer.json whole"))
    }

    @Test func aPartWithoutADigestIsNotGoneOnFrom() async throws {
        let folder = commitFolder.appendingPathComponent("model")
        try folder.makeFolder()
        let size = try #require(try sizes()["tokenizer.json"])
        try Data(count: size - 1).write(to: folder.appendingPathComponent("tokenizer.json.part"))
        let hub = try Hub(source)
        let model = await lookUp(hub)
        await model.download()
        #expect(model.problem == nil)
        #expect(try hasBundleAlone())
        #expect(hub.end().contains("tokenizer.json whole"))
    }

    @Test func thereIsRoomForBothOrNothingIsDownloaded() async throws {
        let hub = try Hub(source)
        let both = try #require(await lookUp(hub).downloads.spaceWhileRewriting) + DocumentsFolder.spareBytes
        let small = await lookUp(hub, freeBytes: both - 1)
        await small.download()
        let (needed, free) = ((both - DocumentsFolder.spareBytes).megabytes(.up), (both - 1).megabytes(.down))
        #expect(
            small.problem?.english.hasPrefix("someone/tiny-4bit takes \(needed) more, and the phone has \(free) free")
                == true)
        #expect(try files.contentsOfDirectory(atPath: documents.path) == [])
        let large = await lookUp(hub, freeBytes: both)
        await large.download()
        #expect(large.problem == nil)
        #expect(try hasBundleAlone())
        #expect(hub.end().filter { $0.contains("safetensors whole") }.count == 2)
    }
}
