import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPControl
@testable import MeSPCore

@Suite(.serialized) @MainActor final class LibraryTests: AppSuite {
    private var hasRun = false

    private func isFree(while work: () async -> Void) async -> Bool {
        hasRun = false
        Task { hasRun = true }
        await work()
        return hasRun
    }

    /// The number of bytes that this process has read from files, on Linux; elsewhere 0.
    private var readBytes: Int {
        get throws {
            let path = "/proc/self/io"
            guard FileManager.default.fileExists(atPath: path) else { return 0 }
            let text = try String(contentsOfFile: path, encoding: .utf8)
            return try #require(text.firstMatch(of: /rchar: (\d+)/).flatMap { Int($0.1) })
        }
    }

    @Test func aListThatCannotBeReadDoesNotHideTheOther() async throws {
        try tiedBundle().copy(to: documents.appendingPathComponent("bundle.mesp"))
        func model(without broken: String) -> AppModel {
            let folder = DocumentsFolder(
                documents: documents,
                list: { url in
                    if url.lastPathComponent == broken { throw CocoaError(.fileReadUnknown) }
                    return try FileManager.default.contentsOfDirectory(at: url, includingPropertiesForKeys: nil)
                })
            return AppModel(monitor: monitor, folder: folder) { _ in ByteTokenizer() }
        }
        try documents.appendingPathComponent("runs/run").makeFolder()
        let bundles = model(without: "runs")
        await bundles.refresh()
        #expect(bundles.problem?.english.hasPrefix("runs cannot be read") == true)
        #expect(bundles.library.hasLooked && bundles.library.bundles.map(\.id) == ["bundle.mesp"] && bundles.canStart)
        let runs = model(without: documents.lastPathComponent)
        await runs.refresh()
        #expect(runs.problem?.english.contains("cannot be read") == true)
        #expect(runs.library.hasLooked && runs.library.runs.map(\.id) == ["run"] && !runs.canStart)
    }

    @Test func twentyLongRunsOpenWithoutAHitch() async throws {
        let runs = model.library.folder.runsFolder
        let first = runs.appendingPathComponent("run 0")
        var settings = try RunSettings.ofATest(first)
        settings.steps = 1
        try Run.run(settings)
        let log = first.appendingPathComponent("metrics.jsonl")
        var lines = try log.readText().split(separator: "\n")
        let place = try #require(lines.firstIndex { $0.contains("\"type\":\"step\"") })
        let steps = (2...10_000).map { lines[place].replacing("\"step\":1,", with: "\"step\":\($0),")[...] }
        lines.insert(contentsOf: steps, at: place + 1)
        try log.write(lines.joined(separator: "\n") + "\n")
        for number in 1..<20 { try first.copy(to: runs.appendingPathComponent("run \(number)")) }
        let before = try readBytes
        #expect(await isFree { await model.refresh() })
        let whole = try Data(contentsOf: log).count
        #expect(try readBytes - before < 2 * whole, "twenty lists and one log")
        #expect(model.library.runs.count == 20)
        #expect(model.library.runs.allSatisfy { $0.status == .finished && $0.log?.lastLoss != nil })

        var opened: LogSummary?
        let run = try #require(model.library.runs.first)
        #expect(await isFree { opened = await model.library.log(of: run) })
        #expect(opened?.steps.count == 10_000)
    }
}
