import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPFiles
@testable import MeSPSelfCheck

@Suite(.serialized) @MainActor final class SelfCheckerTests: AppSuite {
    private func quick() throws -> SelfCheck.Settings {
        var settings = SelfCheck.Settings(bundle: try tiedBundle().path)
        (settings.repeats, settings.seconds) = (2, 0.01)
        return settings
    }

    @Test func theReportIsOnTheScreenAndInAFile() async throws {
        let (checker, file) = (model.selfChecker, model.library.folder.newSelfCheck(bundle: "tiny"))
        checker.start(try quick(), file: file)
        #expect(checker.isRunning && !model.isFree && model.staysAwake)
        try await ended()
        #expect(checker.problem == nil && checker.current == nil && !model.staysAwake)
        let report = try #require(checker.report)
        #expect(report.end?.verdict == .pass && report.checks.count == report.start.names.count)
        #expect(file.deletingLastPathComponent().lastPathComponent == "self-check")
        let written = try JSONDecoder.snakeCase.decode(SelfCheckReport.self, from: Data(contentsOf: file))
        #expect(written.checks.map(\.name) == report.checks.map(\.name) && written.end != nil)
    }

    @Test func plansCountWhatWasMeasuredOfMetal() async throws {
        defer { MetalMemory[.cpu] = nil }
        let manifest = try ModelBundle(url: tiedBundle()).manifest
        func counted() async -> Int? {
            MetalMemory[.cpu] = nil
            await model.refresh()
            return Processor.$cpu.withValue(.appleCPU) {
                Planner(manifest, RunSettings(bundle: "", output: "")).metalBytes
            }
        }
        let folder = model.library.folder.selfChecksFolder
        try folder.makeFolder()
        func write(_ name: String, _ bytes: Double, host: String = LogRecord.Start.host, age: Double) throws {
            let json = """
                {"start": {"version": "1", "mlx_version": "\(MLXSupport.version)", "host": "\(host)", "bundle": "b",
                  "device": "cpu", "dtype": "float32", "neural_accelerators": "none", "names": ["metal.footprint"],
                  "settings": {"bundle": "b", "repeats": 1, "seconds": 1, "minutes": 0}},
                 "checks": [{"name": "metal.footprint", "verdict": "note", "sentence": "", "seconds": 1,
                   "measured": [{"name": "after the first step", "value": \(bytes), "unit": "bytes"}]}]}
                """
            let file = folder.appendingPathComponent(name)
            try file.write(json)
            try FileManager.default.setAttributes(
                [.modificationDate: Date(timeIntervalSinceNow: -age)], ofItemAtPath: file.path)
        }
        #expect(await counted() == MetalMemory.assumed)
        try write("b.json", 7_000_000, age: 20)
        try write("a.json", 9_000_000, age: 10)
        try write("c.json", 5_000_000, host: "another machine", age: 0)
        try write("d.json", -1, age: 0)
        try folder.appendingPathComponent("e.json").write("{")
        #expect(await counted() == 9_000_000)
        #expect(Planner(manifest, RunSettings(bundle: "", output: "")).metalBytes == nil, "Linux has no Metal")
    }

    @Test func theLaunchArgumentStartsItAndStoppingKeepsWhatThereIs() async throws {
        try await importTied()
        model.begin(arguments: ["MeSPTrainer"])
        #expect(!model.selfChecker.isRunning)
        model.begin(arguments: ["MeSPTrainer", "--self-check", "other.mesp"])
        #expect(model.problem == "There is no usable bundle other.mesp." && !model.selfChecker.isRunning)
        model.begin(arguments: ["MeSPTrainer", "--self-check", "bundle.mesp"])
        #expect(model.selfChecker.isRunning)
        try await wait { model.selfChecker.report?.checks.count ?? 0 >= 2 }
        #expect(model.selfChecker.current != nil)
        model.selfChecker.stop()
        try await ended()
        #expect(model.selfChecker.problem == "The self-check was stopped.")
        let folder = model.library.folder.selfChecksFolder
        let files = try FileManager.default.contentsOfDirectory(at: folder, includingPropertiesForKeys: nil)
        #expect(files.count == 1 && files[0].pathExtension == "json")
    }

    @Test func itWaitsWhileTheAppIsAway() async throws {
        monitor.scene = .background
        model.selfChecker.start(try quick(), file: documents.appendingPathComponent("a.json"))
        try await Task.sleep(for: .milliseconds(300))
        #expect(model.selfChecker.report?.checks.isEmpty ?? true)
        monitor.scene = .active
        try await ended()
        #expect(model.selfChecker.report?.end != nil)
    }

    @Test func aBundleThatIsNoneIsASentence() async throws {
        model.selfChecker.start(.init(bundle: "/nowhere"), file: documents.appendingPathComponent("a.json"))
        try await ended()
        #expect(
            model.selfChecker.problem?.english.contains("is not a bundle") == true && model.selfChecker.report == nil)
    }
}
