import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPControl
@testable import MeSPCore

@Suite(.serialized) @MainActor final class LibraryTests {
    private let documents = temporaryFolder()
    deinit { try? FileManager.default.removeItem(at: documents) }

    /// Returns the longest time between two runs of a task on the main thread during `work`, in seconds. While the thread is free, the task runs
    /// every 5 ms.
    private func longestHitch(while work: () async -> Void) async -> Double {
        let beat = Task {
            var (last, longest) = (Date.now, 0.0)
            while !Task.isCancelled {
                try? await Task.sleep(for: .milliseconds(5))
                longest = max(longest, Date.now.timeIntervalSince(last))
                last = .now
            }
            return longest
        }
        await work()
        beat.cancel()
        return await beat.value
    }

    @Test func aListThatCannotBeReadDoesNotHideTheOther() async throws {
        let fixture = try #require(Fixture.tied).appendingPathComponent("bundle.mesp").resolvingSymlinksInPath()
        try FileManager.default.createDirectory(at: documents, withIntermediateDirectories: true)
        try FileManager.default.copyItem(at: fixture, to: documents.appendingPathComponent("bundle.mesp"))
        func model(without broken: String) -> AppModel {
            let folder = DocumentsFolder(
                documents: documents,
                list: { url in
                    if url.lastPathComponent == broken { throw CocoaError(.fileReadUnknown) }
                    return try FileManager.default.contentsOfDirectory(at: url, includingPropertiesForKeys: nil)
                })
            return AppModel(monitor: TestMonitor(), folder: folder) { _ in ByteTokenizer() }
        }
        let run = documents.appendingPathComponent("runs/run")
        try FileManager.default.createDirectory(at: run, withIntermediateDirectories: true)
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
        let (files, folder) = (FileManager.default, DocumentsFolder(documents: documents))
        let first = folder.runsFolder.appendingPathComponent("run 0")
        var settings = try RunSettings.ofATest(first)
        settings.steps = 1
        try Run.run(settings)
        let log = first.appendingPathComponent("metrics.jsonl")
        var lines = String(decoding: try Data(contentsOf: log), as: UTF8.self).split(separator: "\n")
        let place = try #require(lines.firstIndex { $0.contains("\"type\":\"step\"") })
        lines.insert(
            contentsOf: (2...10_000).map { lines[place].replacing("\"step\":1,", with: "\"step\":\($0),") }.map {
                $0[...]
            },
            at: place + 1)
        try Data((lines.joined(separator: "\n") + "\n").utf8).write(to: log)
        for number in 1..<20 {
            try files.copyItem(at: first, to: folder.runsFolder.appendingPathComponent("run \(number)"))
        }

        let model = AppModel(monitor: TestMonitor(), folder: folder) { _ in ByteTokenizer() }
        // The limits are relative to the time to read one log, so that they also hold on a busy machine.
        var start = Date.now
        #expect(try LogSummary(folder: first).steps.count == 10_000)
        let whole = Date.now.timeIntervalSince(start)
        start = .now
        #expect(await longestHitch { await model.refresh() } < whole / 2)
        #expect(Date.now.timeIntervalSince(start) < whole, "twenty lists read less than one log")
        #expect(model.library.runs.count == 20)
        #expect(model.library.runs.allSatisfy { $0.status == .finished && $0.log?.lastLoss != nil })

        var opened: LogSummary?
        let run = try #require(model.library.runs.first)
        #expect(await longestHitch { opened = await model.library.log(of: run) } < whole / 2)
        #expect(opened?.steps.count == 10_000)
    }
}
