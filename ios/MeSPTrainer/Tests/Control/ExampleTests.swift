import Foundation
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPSentences
import Testing

// Not @testable: the example is what an app of your own can write.
@testable import MeSP

/// Fine-tunes a bundle on a text file and returns the folder with the adapters. Cancelling the task stops the run and keeps what it
/// has learned.
@MainActor func fineTune(
    _ bundle: URL, on text: URL, tokenizer: any TextTokenizer, in folder: URL, monitor: any DeviceMonitor,
    steps: Int = 20, show: (String) -> Void
) async throws -> URL {
    var settings = RunSettings(bundle: bundle.path, output: folder.appendingPathComponent("run").path)
    settings.seqLen = 32
    settings.steps = steps

    let tokens = folder.appendingPathComponent("tokens")
    try TextData(tokenizer: tokenizer, length: settings.seqLen).write(.file(text), to: tokens)
    settings.data = tokens.path

    let controller = RunController(monitor: monitor)
    for try await record in try controller.train(settings) {
        if case .step(let step) = record { show("Step \(step.step): loss \(step.loss)") }
    }
    return folder.appendingPathComponent("run/adapters")
}

@Suite(.serialized) @MainActor final class ExampleTests {
    private let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
    private let text = String(repeating: "The quick brown fox jumps over the lazy dog.\n", count: 40)

    private func bundle() throws -> URL { try #require(Fixture.tied).appendingPathComponent("bundle.mesp") }

    private func textFile() throws -> URL {
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        let file = folder.appendingPathComponent("text.txt")
        try text.write(to: file, atomically: true, encoding: .utf8)
        return file
    }

    deinit { try? FileManager.default.removeItem(at: folder) }

    @Test func theExampleLearns() async throws {
        var lines = [String]()
        let adapters = try await fineTune(
            try bundle(), on: try textFile(), tokenizer: ByteTokenizer(), in: folder, monitor: TestMonitor()
        ) { lines.append($0) }
        #expect(lines.count == 20)
        #expect(lines.first?.hasPrefix("Step 1: loss ") == true)
        let file = adapters.appendingPathComponent("adapters.safetensors").path
        #expect(FileManager.default.fileExists(atPath: file))
        let log = try LogSummary(folder: folder.appendingPathComponent("run"))
        #expect(try #require(log.evals.last).loss < #require(log.evals.first).loss)
    }

    @Test func cancellingTheTaskStopsTheRunAndSaves() async throws {
        let (bundle, file, folder) = (try bundle(), try textFile(), folder)
        let (lines, sender) = AsyncStream.makeStream(of: String.self)
        let task = Task {
            try await fineTune(
                bundle, on: file, tokenizer: ByteTokenizer(), in: folder, monitor: TestMonitor(), steps: 1_000_000
            ) { sender.yield($0) }
        }
        for await line in lines where line.hasPrefix("Step 2:") { break }
        task.cancel()
        let adapters = try await task.value
        #expect(FileManager.default.fileExists(atPath: adapters.appendingPathComponent("adapters.safetensors").path))
        let log = try LogSummary(folder: folder.appendingPathComponent("run"))
        #expect(log.end?.reason == .stopped)
        #expect(log.lastStep >= 2)
    }

    @Test func leavingTheLoopStopsTheRun() async throws {
        let controller = RunController(monitor: TestMonitor())
        var settings = RunSettings(bundle: try bundle().path, output: folder.appendingPathComponent("run").path)
        settings.seqLen = 32
        settings.steps = 1_000_000
        for try await record in try controller.train(settings) {
            if case .step(let step) = record, step.step == 3 { break }
        }
        while controller.isRunning { try await Task.sleep(for: .milliseconds(5)) }
        #expect(controller.state == .finished(.stopped))
    }

    @Test func aFailureEndsTheLoopWithItsSentence() async throws {
        let controller = RunController(monitor: TestMonitor())
        let settings = RunSettings(bundle: "/nowhere", output: folder.path)
        await #expect(
            throws: MeSPError("/nowhere is not a bundle: it has no manifest.json. Make one with mesp-export.")
        ) {
            for try await _ in try controller.train(settings) {}
        }
    }

    @Test func oneRunAtATime() async throws {
        let controller = RunController(monitor: TestMonitor())
        var settings = RunSettings(bundle: try bundle().path, output: folder.appendingPathComponent("run").path)
        settings.seqLen = 32
        let records = try controller.train(settings)
        #expect(throws: MeSPError("A run is in progress; stop it first.")) { _ = try controller.train(settings) }
        for try await _ in records { break }
        while controller.isRunning { try await Task.sleep(for: .milliseconds(5)) }
    }
}
