import Foundation
import MeSPSentences
import Testing

@testable import MeSP
@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPControl
@testable import MeSPCore
@testable import MeSPFiles

@Suite(.serialized) @MainActor final class DocumentsFolderTests {
    private let documents = newFolder()
    private lazy var store = DocumentsFolder(documents: documents)
    private let files = FileManager.default

    private func settings(_ name: String, steps: Int) throws -> RunSettings {
        var settings = try RunSettings.ofATest(store.runsFolder.appendingPathComponent(name))
        (settings.steps, settings.saveEvery, settings.learningRate) = (steps, 2, 0.05)
        return settings
    }

    @Test func listsRunsTheNewestFirstAndDeletes() throws {
        #expect(try store.runs().isEmpty)
        try Run.run(try settings("first", steps: 1))
        try Run.run(try settings("second", steps: 2))
        #expect(try store.runs().map(\.name) == ["second", "first"])
        let run = try #require(try store.runs().last)
        #expect(run.status == .finished)
        #expect(run.log?.lastStep == 1)
        #expect(run.adapters?.lastPathComponent == "adapters")
        #expect(!run.canResume, "it has finished")
        try store.delete(run)
        #expect(try store.runs().map(\.name) == ["second"])
    }

    @Test func sharesLogAndAdaptersButNotTheText() throws {
        var settings = try settings("run", steps: 2)
        let folder = URL(fileURLWithPath: settings.output).appendingPathComponent("data")
        let text = String(repeating: "A line of text.\n", count: 20)
        try TextData(tokenizer: ByteTokenizer(), length: 32).write(.text(text), to: folder)
        settings.data = folder.path
        try Run.run(settings)
        let target = documents.appendingPathComponent("export")
        for _ in 0..<2 { try #require(try store.runs().first).export(to: target) }
        #expect(Set(try files.contentsOfDirectory(atPath: target.path)) == ["metrics.jsonl", "adapters"])
    }

    @Test func aNewRunHasAFolderOfItsOwn() throws {
        let date = Date(timeIntervalSince1970: 1_700_000_000)
        let first = store.newRun(bundle: "Demo", method: .mebp, at: date)
        #expect(first.lastPathComponent.hasPrefix("Demo mebp 2023-11-1"))
        try first.makeFolder()
        let second = store.newRun(bundle: "Demo", method: .mebp, at: date)
        #expect(second.lastPathComponent == first.lastPathComponent + " 2")
    }

    @Test func aLogThatCannotBeReadIsListedWithTheReason() throws {
        let folder = store.runsFolder.appendingPathComponent("bad")
        try folder.makeFolder()
        let log = folder.appendingPathComponent("metrics.jsonl")
        try log.write("{}\n{}\n")
        #expect(try store.runs().map(\.status) == [.unreadable("Line 1 of \(log.path) is not a log record.")])
    }

    @Test func aBegunDownloadThatCannotBeReadIsSaidSoOnce() throws {
        try documents.appendingPathComponent(".download.json").write("{}")
        #expect(message { _ = try store.readBegunDownload() }.hasPrefix("The download cannot continue: "))
        #expect(try store.readBegunDownload() == nil)
    }

    @Test func aLastLineThatWasCutOffIsLeftOut() throws {
        try Run.run(try settings("run", steps: 3))
        let log = store.runsFolder.appendingPathComponent("run/metrics.jsonl")
        let data = try Data(contentsOf: log)
        try data.dropLast(20).write(to: log)
        let run = try #require(try store.runs().first)
        #expect(run.status == .interrupted)
        #expect(run.log?.lastStep == 3)
    }

    @Test func anOutlineIsWhatTheLogBeginsAndEndsWith() throws {
        try Run.run(try settings("run", steps: 3))
        let folder = store.runsFolder.appendingPathComponent("run")
        let (outline, log) = (try LogOutline(folder: folder), try LogSummary(folder: folder))
        #expect(outline.start?.settings == log.start?.settings && outline.start?.device == .cpu)
        #expect(outline.lastStep == 3 && outline.lastLoss == log.steps.last?.loss && outline.end == .finished)
        let url = folder.appendingPathComponent("metrics.jsonl")
        let data = try Data(contentsOf: url)
        for length in stride(from: 0, through: data.count, by: 97) {
            try data.prefix(length).write(to: url)
            let (outline, log) = (try LogOutline(folder: folder), try LogSummary(folder: folder))
            #expect((outline.start == nil) == (log.start == nil))
            #expect(outline.lastStep == log.lastStep && outline.lastLoss == log.steps.last?.loss)
            #expect(outline.end == log.end?.reason)
        }
        try (data + Data("{}\n{}\n".utf8)).write(to: url)
        #expect(throws: MeSPError("The end of \(url.path) is not that of a log.")) {
            _ = try LogOutline(folder: folder)
        }
    }

    @Test func aKilledRunGoesOnFromItsLastSavedStateAndGivesTheSameLosses() async throws {
        var uninterrupted = try settings("uninterrupted", steps: 9)
        uninterrupted.optimizer = .adamw
        uninterrupted.learningRate = 1e-3
        try Run.run(uninterrupted)

        var settings = uninterrupted
        let original = documents.appendingPathComponent("original")
        let killed = store.runsFolder.appendingPathComponent("killed")
        settings.output = original.path
        try store.runsFolder.makeFolder()
        try Run.run(settings) { record, _ in
            if case .step(let step) = record, step.step == 5 { try original.copy(to: killed) }
        }

        try tiedBundle().copy(to: documents.appendingPathComponent("bundle.mesp"))
        let run = try #require(try store.runs().first { $0.name == "killed" })
        #expect(run.status == .interrupted)
        #expect(run.canResume)
        let resumed = try store.settingsToResume(run)
        #expect(resumed.bundle == documents.appendingPathComponent("bundle.mesp").path)

        let next = RunController(monitor: TestMonitor())
        next.start(resumed)
        while next.log.steps.isEmpty { try await Task.sleep(for: .milliseconds(1)) }
        #expect(next.log.steps.count >= 4, "what it had logged is shown before it goes on")
        while next.isRunning { try await Task.sleep(for: .milliseconds(5)) }
        #expect(next.state == .finished(.finished))
        let expected = try LogSummary(folder: URL(fileURLWithPath: uninterrupted.output)).steps.map(\.loss)
        #expect(try LogSummary(folder: killed).steps.map(\.loss) == expected)
        #expect(next.log.steps.map(\.loss) == expected)
        #expect(try store.runs().first { $0.name == "killed" }?.status == .finished)
    }

    @Test func aRunWhoseBundleIsGoneSaysSo() throws {
        var settings = try settings("run", steps: 2)
        try Run.run(settings, atBlock: { _ in throw CancellationError() })
        let run = try #require(try store.runs().first)
        #expect(run.status == .stopped && run.canResume)
        #expect(throws: MeSPError("The bundle bundle.mesp of run is no longer there; import it again.")) {
            settings = try store.settingsToResume(run)
        }
    }

    @Test func theRunInProgressIsNotOfferedToResume() throws {
        let settings = try settings("run", steps: 2)
        try Run.run(settings, atBlock: { _ in throw CancellationError() })
        let run = try #require(try store.runs(running: URL(fileURLWithPath: settings.output)).first)
        #expect(run.status == .running && !run.canResume)
    }

    @Test func importsABundle() throws {
        let bundle = try store.importBundle(at: try tiedBundle())
        #expect(bundle.problem == nil)
        #expect(try store.bundles().map(\.url.lastPathComponent) == ["bundle.mesp"])
        #expect(throws: MeSPError("There is a bundle bundle.mesp already; delete it first.")) {
            _ = try store.importBundle(at: try tiedBundle())
        }
        try store.delete(bundle)
        #expect(try store.bundles().isEmpty)
    }

    @Test func whatABundleDoesNotListIsNotImported() throws {
        let source = temporaryFolder().appendingPathExtension("mesp")
        try tiedBundle().copy(to: source)
        try files.createSymbolicLink(
            atPath: source.appendingPathComponent("chat_template.jinja").path, withDestinationPath: "/dev/zero")
        let bundle = try store.importBundle(at: source)
        let imported = try #require(files.enumerator(atPath: bundle.url.path)).compactMap { $0 as? String }
        let listed = try #require(bundle.manifest).files.map(\.path) + ["manifest.json"]
        #expect(Set(imported).isSuperset(of: listed) && !imported.contains("chat_template.jinja"))
    }

    @Test func aBundleThatHasNoRoomIsRefusedBeforeItIsCopied() throws {
        let full = DocumentsFolder(documents: documents, freeBytes: { _ in 100_000_000 })
        let said = message { _ = try full.importBundle(at: tiedBundle()) }
        #expect(said.hasPrefix("bundle.mesp takes "))
        #expect(said.hasSuffix("and the phone has 100 MB free; make room for it first."))
        #expect(try files.contentsOfDirectory(atPath: documents.path).isEmpty)
        #expect(documents.freeBytes ?? 0 > 0)
    }

    @Test func filesAreKeptAsTheyAreToBe() throws {
        let kept = Locked([String: StoragePolicy]())
        let store = DocumentsFolder(
            documents: documents,
            applyPolicy: { url, policy in
                let inside = try? FileManager.default.contentsOfDirectory(atPath: url.path)
                if url.path.contains("/.import") { #expect(inside?.isEmpty == true) }
                kept.change { $0[url.lastPathComponent.replacing(/ing-.*/, with: "ing")] = policy }
            })
        _ = try store.importBundle(at: try tiedBundle())
        let run = try settings("run", steps: 2)
        try Run.run(run)
        let left = URL(fileURLWithPath: run.output).appendingPathComponent("state.safetensors.partial")
        try Data().write(to: left)
        try store.applyPoliciesToRuns()
        #expect(
            kept.value == [
                ".importing": .bundle, "run": .run, "state.safetensors": .state, "state.safetensors.partial": .state,
            ])
        #expect(!StoragePolicy.bundle.isInBackup && !StoragePolicy.state.isInBackup && StoragePolicy.run.isInBackup)
        #expect(
            !StoragePolicy.run.isUnreadableWhileLocked && !StoragePolicy.bundle.isUnreadableWhileLocked,
            "a run in the night reads and writes them")
        #expect(StoragePolicy.chat.isUnreadableWhileLocked)
    }

    @Test func whatIsSentBackAreReportsAndLogs() throws {
        let settings = try settings("run", steps: 2)
        try Run.run(settings)
        try URL(fileURLWithPath: settings.output).appendingPathComponent("samples.json").write("[]")
        try store.selfChecksFolder.makeFolder()
        try store.newSelfCheck(bundle: "demo").write("{}")
        let export = temporaryFolder()
        for _ in 0..<2 { try store.exportMeasurements(to: export) }
        let found = try files.subpathsOfDirectory(atPath: export.path).filter { $0.contains(".json") }
        #expect(found.contains("runs/run/metrics.jsonl") && found.count == 2, "\(found)")
        #expect(found.contains { $0.hasPrefix("self-check/demo ") })
    }

    @Test func refusesADamagedBundleAndKeepsNothingOfIt() throws {
        let source = temporaryFolder().appendingPathExtension("mesp")
        try tiedBundle().copy(to: source)
        try source.appendingPathComponent("blocks/00.bin").flipBit(ofByte: 100)
        let said = message { _ = try store.importBundle(at: source) }
        let name = "blocks/00.bin in \(source.lastPathComponent)"
        #expect(said == "\(name) is damaged (its SHA-256 differs); copy or export the bundle again.")
        #expect(try files.contentsOfDirectory(atPath: documents.path).isEmpty)
    }

    @Test func aBadBundleSaysWhy() throws {
        let url = documents.appendingPathComponent("bad.mesp")
        try tiedBundle().copy(to: url)
        try files.removeItem(at: url.appendingPathComponent("embedding.bin"))
        let bundle = try #require(try store.bundles().first)
        #expect(bundle.manifest == nil && bundle.name == "bad")
        #expect(bundle.problem == "bad.mesp lacks embedding.bin; export the bundle again.")
    }

    @Test func aBundleInAFolderOfItsNameIsFoundAndDeletedWhole() throws {
        let folder = documents.appendingPathComponent("bundle.mesp")
        try folder.makeFolder()
        try tiedBundle().copy(to: folder.appendingPathComponent("bundle.mesp"))
        let bundle = try #require(try store.bundles().first)
        #expect(bundle.problem == nil)
        try store.delete(bundle)
        #expect(!folder.exists)
    }

    @Test func bundlesThatCameWithTheAppGiveWayToOnesOfTheSameName() throws {
        let included = newFolder()
        try tiedBundle().copy(to: included.appendingPathComponent("bundle.mesp"))
        let store = DocumentsFolder(documents: documents, included: included)
        let bundle = try #require(try store.bundles().first)
        #expect(bundle.isIncluded)
        #expect(throws: MeSPError("\(bundle.name) came with the app and stays with it.")) { try store.delete(bundle) }
        _ = try store.importBundle(at: try tiedBundle())
        #expect(try store.bundles().map(\.isIncluded) == [false])
    }

    @Test func saysWhetherARunFits() throws {
        let manifest = try ModelBundle(url: try tiedBundle()).manifest
        var settings = try settings("run", steps: 1)
        let fit = try MemoryFit(settings, manifest, available: nil)
        #expect(fit.fits && fit.predictedPeak > 1_000_000)
        #expect(try MemoryFit(settings, manifest, available: fit.predictedPeak).fits)
        #expect(try !MemoryFit(settings, manifest, available: fit.predictedPeak - 1).fits)
        settings.rank = 1 << 20
        #expect(throws: MeSPError.self) { _ = try MemoryFit(settings, manifest, available: nil) }
    }

    @Test func aCurveHasTheMeansOfStretches() throws {
        try Run.run(try settings("run", steps: 5))
        let log = try LogSummary(folder: store.runsFolder.appendingPathComponent("run"))
        let curve = log.curve(points: 3) { Double($0.step) }
        #expect(curve.map(\.id) == [2, 4, 5])
        #expect(curve.map(\.value) == [1.5, 3.5, 5])
        #expect(log.peakFootprint ?? 0 >= log.steps.map(\.footprintPeakBytes).max() ?? .max)
        #expect(log.tokensPerSecond ?? 0 > 0 && log.stepSeconds ?? 0 > 0)
        #expect(log.tokensPerSecond == log.lossTokensPerSecond, "of a packed text all count")
    }
}
