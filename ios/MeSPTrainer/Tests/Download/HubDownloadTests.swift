import Foundation
import MeSPSentences
import Testing

@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPDownload
@testable import MeSPFiles

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

final class Hub {
    let url: URL
    private let process = Process()
    private let output = Pipe()
    private let input = Pipe()

    init(_ folder: URL, _ faults: [String: [Any]] = [:]) throws {
        let script = URL(fileURLWithPath: #filePath).deletingLastPathComponent().appendingPathComponent("hub_server.py")
        process.executableURL = URL(fileURLWithPath: "/usr/bin/env")
        let json = String(decoding: try JSONSerialization.data(withJSONObject: faults), as: UTF8.self)
        process.arguments = ["python3", script.path, folder.path, json]
        process.standardOutput = output
        process.standardInput = input
        try process.run()
        var line = Data()
        while let byte = try output.fileHandleForReading.read(upToCount: 1), byte != Data("\n".utf8), !byte.isEmpty {
            line += byte
        }
        let port = try #require(Int(String(decoding: line, as: UTF8.self)))
        url = try #require(URL(string: "http://127.0.0.1:\(port)"))
    }

    func end() -> [String] {
        kill(process.processIdentifier, SIGKILL)  // the server has inherited blocked signals
        let text = String(decoding: output.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
        return text.split(separator: "\n").map(String.init)
    }
}

extension AppSuite {
    func app(on hub: Hub, freeBytes: Int? = nil, network: (any NetworkPath)? = nil) -> AppModel {
        let url = hub.url
        monitor.availableMemory = 1 << 40
        return AppModel(
            monitor: monitor, folder: DocumentsFolder(documents: documents, freeBytes: { _ in freeBytes }),
            network: network, openDownload: { try HubDownload(repository: $0, hub: url, patience: 5) },
            loadTokenizer: { _ in ByteTokenizer() })
    }

    func lookUp(
        _ repository: String, on hub: Hub, freeBytes: Int? = nil, network: (any NetworkPath)? = nil
    ) async -> AppModel {
        let model = app(on: hub, freeBytes: freeBytes, network: network)
        model.downloads.repository = repository
        await model.lookUp()
        return model
    }
}

enum Way: CaseIterable { case foreground, background }

@Suite(.serialized) @MainActor final class HubDownloadTests: AppSuite {
    private let transfer = BackgroundTransfer(.ephemeral, home: temporaryFolder().deletingLastPathComponent())
    private var folder: URL { documents }
    private var blockFile: URL { folder.appendingPathComponent("blocks/00.bin") }
    deinit { transfer.session.finishTasksAndInvalidate() }

    private func fetch(
        _ faults: [String: [Any]], by way: Way = .foreground, from source: URL? = nil
    ) async throws -> ([String], String?) {
        let hub = try Hub(try source ?? tiedBundle(), faults)
        let stalls = faults.values.joined().contains { $0 as? String == "stall" }
        var problem: String?
        do {
            let download = try HubDownload(
                repository: "someone/tied-mesp", hub: hub.url, patience: stalls ? 2 : 60,
                background: way == .background ? transfer : nil)
            try await download.fetch(try await download.fetchOffer(), to: folder)
        } catch {
            problem = error.plainSentence.english
        }
        return (hub.end(), problem)
    }

    private func isWhole() throws -> Bool {
        let parts = FileManager.default.enumerator(atPath: folder.path)?.compactMap { $0 as? String }
        _ = try ModelBundle(url: folder)  // compares every SHA-256
        return parts?.contains { $0.hasSuffix(".part") || $0.hasSuffix(".resume") } == false
    }

    @Test(arguments: Way.allCases) func aBundleComesWholeAndEachFileOnce(_ way: Way) async throws {
        let (requests, problem) = try await fetch([:], by: way)
        #expect(problem == nil)
        #expect(try isWhole())
        let manifest = try ModelBundle(url: try tiedBundle()).manifest
        #expect(requests.first == "manifest.json whole")
        #expect(requests.sorted() == (["manifest.json"] + manifest.files.map(\.path)).map { "\($0) whole" }.sorted())
        let (fetched, _) = try await fetch([:], by: way)
        #expect(fetched == ["manifest.json whole"], "everything is there")
    }

    @Test(
        arguments: [
            (["cut"], .foreground), (["stall"], .foreground), (["cut", "cut", "stall"], .foreground),
            ([503], .foreground), (["cut", "other"], .foreground), (["cut", 429, "cut"], .foreground),
            (["cut", "whole"], .foreground), (["flip"], .foreground), (["expired"], .foreground),
            (["cut"], .background), ([503, "cut"], .background), (["flip"], .background), (["expired"], .background),
        ] as [([any Sendable], Way)])
    func whatBreaksOffIsAskedForAgain(_ faults: [any Sendable], _ way: Way) async throws {
        let (requests, problem) = try await fetch(["blocks/00.bin": faults], by: way)
        #expect(problem == nil)
        #expect(try isWhole())
        let ofBlock = requests.filter { $0.hasPrefix("blocks/00.bin ") }
        #expect(ofBlock.count == faults.count { "\($0)" != "whole" } + 1)
        if way == .foreground, ["cut", "stall"].contains("\(faults[0])") {
            #expect(ofBlock.last?.hasPrefix("blocks/00.bin bytes=") == true, "not from the beginning")
        } else if "\(faults[0])" == "flip", way == .foreground {
            #expect(ofBlock.allSatisfy { $0 == "blocks/00.bin whole" })
        }
    }

    @Test func whatTheSystemBringsMeanwhileIsNotAskedForAgain() async throws {
        let hub = try Hub(try tiedBundle(), ["blocks/01.bin": ["trickle"]])
        let download = try HubDownload(
            repository: "someone/tied-mesp", hub: hub.url, patience: 60, background: transfer)
        let offer = try await download.fetchOffer()
        try folder.appendingPathComponent("blocks").makeFolder()
        for path in ["blocks/00.bin", "blocks/01.bin"] {
            let task = transfer.session.downloadTask(
                with: hub.url.appendingPathComponent("someone/tied-mesp/resolve/0123456789abcdef/\(path)"))
            task.taskDescription = "\(folder.lastPathComponent)/\(path).part"
            task.resume()
        }
        try await wait { folder.appendingPathComponent("blocks/00.bin.part").exists }

        let slow = try #require(offer.manifest.files.first { $0.path == "blocks/01.bin" })
        let (bytes, sender) = AsyncStream.makeStream(of: Int.self)
        async let fetched: Void = download.fetch(offer, to: folder) { sender.yield($0) }
        for await count in bytes where count > offer.size - slow.size { break }
        _ = try await URLSession.shared.data(from: hub.url.appendingPathComponent("go-on"))
        try await fetched
        #expect(try isWhole())
        let requests = hub.end()
        #expect(requests.count == Set(requests).count && requests.count == offer.manifest.files.count + 1)
    }

    @Test(
        arguments: [
            (["flip", "flip"], "blocks/00.bin of someone/tied-mesp is damaged: its SHA-256 differs."),
            (["long"], "blocks/00.bin of someone/tied-mesp is longer than it may be."),
            (
                [404],
                "There is no blocks/00.bin of someone/tied-mesp on the Hub; look the repository up again, or take another."
            ),
            (
                [403],
                "someone/tied-mesp is not open to everybody; see https://huggingface.co/someone/tied-mesp, or take another repository."
            ),
            ([503, 503, 503], "The Hub is busy (503); try again later."),
        ] as [([any Sendable], String)], Way.allCases)
    func whatCannotBeIsASentence(_ fault: ([any Sendable], String), _ way: Way) async throws {
        let (faults, sentence) = fault
        let (_, problem) = try await fetch(["blocks/00.bin": faults], by: way)
        #expect(problem == sentence)
        #expect(!folder.appendingPathComponent("manifest.json").exists && !blockFile.exists)
        #expect(try await fetch([:], by: way).1 == nil)
        #expect(try isWhole())
    }

    @Test func aFileThatStaysShortIsRefused() async throws {
        let (_, problem) = try await fetch(["blocks/00.bin": ["short", "short", "short", "short", "short"]])
        #expect(problem?.contains("blocks/00.bin of someone/tied-mesp") == true)
    }

    @Test func aManifestThatLeadsOutOfTheFolderIsRefused() async throws {
        let source = try tiedBundle().copy()
        let manifest = source.appendingPathComponent("manifest.json")
        let text = try manifest.readText()
        for path in ["../escape.bin", "/escape.bin", "a//b", "manifest.json"] {
            try manifest.write(text.replacing("\"path\": \"blocks/00.bin\"", with: "\"path\": \"\(path)\""))
            let (requests, problem) = try await fetch([:], from: source)
            #expect(
                problem
                    == "someone/tied-mesp: the manifest names \(path), which no bundle has; do not use the bundle.")
            #expect(requests == ["manifest.json whole"])
        }
        try manifest.write(text.replacing("\"format\": \(Manifest.format)", with: "\"format\": 99"))
        #expect(
            try await fetch([:], from: source).1?.contains("has bundle format 99, and this build reads format") == true)
        try manifest.write("no JSON")
        #expect(try await fetch([:], from: source).1?.contains("is damaged") == true)
    }

    @Test(arguments: Way.allCases) func noLinkInTheFolderIsFollowed(_ way: Way) async throws {
        let outside = temporaryFolder()
        let old = Data("of somebody else".utf8)
        for path in ["blocks/00.bin", "blocks/01.bin", "embedding.bin", "head.bin"] {
            let file = outside.appendingPathComponent(path)
            try file.deletingLastPathComponent().makeFolder()
            try old.write(to: file)
        }
        for (link, file) in [
            ("blocks", "blocks"), ("embedding.bin", "embedding.bin"), ("head.bin.part", "head.bin"),
            ("config.json.part.resume", "embedding.bin"), ("config.json.part.resume.partial", "embedding.bin"),
            ("manifest.json.partial", "embedding.bin"),
        ] { try folder.appendingPathComponent(link).link(to: outside.appendingPathComponent(file)) }
        #expect(try await fetch([:], by: way).1 == nil)
        #expect(try isWhole())
        let files = try FileManager.default.subpathsOfDirectory(atPath: outside.path).filter { $0.hasSuffix(".bin") }
        #expect(files.sorted() == ["blocks/00.bin", "blocks/01.bin", "embedding.bin", "head.bin"])
        for file in files { #expect(try Data(contentsOf: outside.appendingPathComponent(file)) == old) }
    }

    @Test(arguments: Way.allCases) func aBundleThatChangedMeanwhileComesAsItIsNow(_ way: Way) async throws {
        let source = try tiedBundle().copy()
        let block = source.appendingPathComponent("blocks/00.bin")
        let last = try #require(try ModelBundle(url: source).manifest.files.last)
        #expect(try await fetch([last.path: [404]], by: way, from: source).1 != nil)
        let stale = folder.appendingPathComponent("generation_config.json")
        try stale.write("of that commit")

        let old = try sha256(of: block)
        try block.flipBit(ofByte: 0)
        try source.appendingPathComponent("manifest.json").replace(old, with: sha256(of: block))
        let (requests, problem) = try await fetch([:], by: way, from: source)
        #expect(problem == nil)
        #expect(try isWhole())
        #expect(try Data(contentsOf: blockFile) == Data(contentsOf: block))
        #expect(requests.filter { $0.hasPrefix("blocks/") }.map { String($0.prefix(13)) } == ["blocks/00.bin"])
        #expect(!stale.exists || last.path == "generation_config.json")
    }

    @Test(arguments: ["", "name", "a/b/c", "../b", "a/..", "a b/c", "https://example.org/a/b"]) func whatIsNoRepository(
        _ name: String
    ) {
        #expect(throws: MeSPError("\(name) is not a repository; write it as owner/name.")) {
            _ = try HubDownload(repository: name)
        }
    }

    @Test func theHubsAddressWillDo() throws {
        let download = try HubDownload(repository: "https://huggingface.co/someone/Qwen2.5-0.5B-mesp")
        #expect(download.repository == "someone/Qwen2.5-0.5B-mesp" && download.name == "Qwen2.5-0.5B")
    }

    @MainActor private final class Path: NetworkPath {
        var isCostly = false { didSet { onChange?() } }
        var onChange: (() -> Void)?
    }

    private func lookUp(_ hub: Hub, freeBytes: Int? = nil, network: Path? = nil) async -> AppModel {
        await lookUp("someone/tied-mesp", on: hub, freeBytes: freeBytes, network: network)
    }

    private func untilItStalls() async throws {
        let stalling = folder.appendingPathComponent(".downloading-someone--tied-mesp/blocks/02.bin.part")
        try await wait { (try? Data(contentsOf: stalling))?.isEmpty == false }
    }

    @Test func theAppShowsWhatItIsAndDownloadsIt() async throws {
        let hub = try Hub(try tiedBundle())
        defer { _ = hub.end() }
        let model = await lookUp(" someone/tied-mesp ", on: hub)
        let offer = try #require(model.downloads.offer)
        #expect(model.problem == nil && offer.size > 10_000)
        #expect(model.downloads.fit.english.hasSuffix("it fits this phone."))
        await model.download()
        #expect(model.problem == nil && model.downloads.offer == nil)
        #expect(model.form.bundle?.id == "tied.mesp" && model.canStart)
        await model.lookUp()
        await model.download()
        #expect(model.problem == "There is a bundle tied.mesp already; delete it first.")
        model.askToDelete(.bundle(try #require(model.form.bundle)))
        await model.confirmDeletion()
        await model.download()
        #expect(model.form.bundle?.id == "tied.mesp")
    }

    @Test func aStoppedDownloadGoesOn() async throws {
        let hub = try Hub(try tiedBundle(), ["blocks/02.bin": ["stall"]])
        let model = await lookUp(hub)
        let work = Task { await model.download() }
        try await untilItStalls()
        model.downloads.stop()
        await work.value
        #expect(model.problem == nil && model.library.bundles.isEmpty && model.downloads.progress == nil)
        await model.finishDownload()
        #expect(model.library.bundles.isEmpty, "what the person stopped begins when they want it")
        await model.download()
        #expect(model.form.bundle?.id == "tied.mesp")
        let requests = hub.end()
        #expect(requests.filter { $0 == "embedding.bin whole" }.count <= 2)
    }

    @Test func aLargeDownloadOverACostlyNetworkWaitsForAnAnswer() async throws {
        let hub = try Hub(try tiedBundle())
        let network = Path()
        let model = await lookUp(hub, network: network)
        model.downloads.askedFrom = 10_000
        network.isCostly = true
        #expect(model.downloads.networkQuestion == nil, "nothing is wanted yet")
        await model.download()
        let question = try #require(model.downloads.networkQuestion)
        let size = try #require(model.downloads.offer).size.megabytes
        #expect(question.english.contains("the download takes \(size) more"))
        #expect(model.downloads.progress == nil && model.library.bundles.isEmpty)
        network.isCostly = false
        #expect(model.downloads.networkQuestion == nil)
        network.isCostly = true
        await model.downloadNow()
        #expect(model.problem == nil && model.form.bundle?.id == "tied.mesp")
        #expect(model.downloads.networkQuestion == nil)
        model.askToDelete(.bundle(try #require(model.form.bundle)))
        await model.confirmDeletion()
        await model.lookUp()
        await model.download()
        #expect(model.downloads.networkQuestion == question, "an answer is for one download")
        #expect(model.library.bundles.isEmpty)
        _ = hub.end()
    }

    @Test func aSmallDownloadAsksNothing() async throws {
        let hub = try Hub(try tiedBundle())
        defer { _ = hub.end() }
        let network = Path()
        network.isCostly = true
        let model = await lookUp(hub, network: network)
        await model.download()
        #expect(model.problem == nil && model.form.bundle?.id == "tied.mesp")
    }

    @Test func aDownloadThatMeetsACostlyNetworkAsksAndGoesOn() async throws {
        let hub = try Hub(try tiedBundle(), ["blocks/02.bin": ["stall"]])
        let network = Path()
        let model = await lookUp(hub, network: network)
        model.downloads.askedFrom = 10_000
        let work = Task { await model.download() }
        try await untilItStalls()
        let documents = DocumentsFolder(documents: folder)
        #expect(try documents.readBegunDownload()?.usesAnyNetwork == false)
        #expect(model.downloads.networkQuestion == nil)
        network.isCostly = true
        #expect(model.downloads.networkQuestion != nil)
        await model.downloadNow()
        await work.value
        #expect(model.problem == nil && model.form.bundle?.id == "tied.mesp")
        #expect(model.downloads.progress == nil && model.downloads.networkQuestion == nil)
        #expect(hub.end().filter { $0 == "embedding.bin whole" }.count == 1, "what has come stays")
    }

    @Test func aDownloadThatTheAppWasEndedInGoesOn() async throws {
        let hub = try Hub(try tiedBundle(), ["blocks/01.bin": [404]])
        defer { _ = hub.end() }
        let offer = try #require(await lookUp(hub).downloads.offer)
        let documents = DocumentsFolder(documents: folder)
        try documents.save(.init(offer: offer, usesAnyNetwork: true))

        let model = app(on: hub)
        await model.finishDownload()
        #expect(model.problem?.english.hasPrefix("There is no blocks/01.bin of someone/tied-mesp") == true)
        #expect(try documents.readBegunDownload() == nil, "the person has been told, and can begin it again")
        try documents.save(.init(offer: offer, usesAnyNetwork: true))
        await model.finishDownload()
        #expect(model.form.bundle?.id == "tied.mesp")
        #expect(try documents.readBegunDownload() == nil)
        await model.finishDownload()
        #expect(model.library.bundles.count == 1)
    }

    @Test func aDownloadThatEndedWithTheAppIsOver() async throws {
        let hub = try Hub(try tiedBundle())
        let ended = await lookUp(hub)
        let offer = try #require(ended.downloads.offer)
        await ended.download()
        let documents = DocumentsFolder(documents: folder)
        try documents.save(.init(offer: offer, usesAnyNetwork: true))

        let model = app(on: hub)
        await model.finishDownload()
        #expect(model.problem == nil)
        #expect(try documents.readBegunDownload() == nil)
        #expect(hub.end().filter { $0 == "manifest.json whole" }.count == 1)
    }

    @Test func withoutRoomNothingIsDownloaded() async throws {
        let hub = try Hub(try tiedBundle())
        let model = await lookUp(hub, freeBytes: 1000)
        await model.download()
        #expect(model.problem?.english.hasSuffix("and the phone has 0.0 MB free; make room for it first.") == true)
        #expect(hub.end() == ["manifest.json whole"])
    }
}
