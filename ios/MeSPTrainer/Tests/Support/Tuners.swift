import Foundation
import MeSP
import MeSPControl
import Testing

class TunerSuite: @unchecked Sendable {
    let folder = newFolder()
    var runs: URL { folder.appendingPathComponent("runs") }

    init() throws {}

    func tuner(_ tokenizer: any TextTokenizer = ByteTokenizer(), _ folder: URL? = nil) async throws -> FineTuner {
        try await FineTuner(bundle: tiedBundle(), tokenizer: tokenizer, folder: folder ?? runs)
    }

    func tuner(_ monitor: TestMonitor) async throws -> FineTuner {
        try await FineTuner(
            bundle: tiedBundle(), tokenizer: ByteTokenizer(), folder: runs,
            controller: RunController(monitor: monitor))
    }

    func options(steps: Int, _ change: (inout TrainingOptions) -> Void = { _ in }) -> TrainingOptions {
        var options = TrainingOptions(steps: steps, sequenceLength: 32)
        change(&options)
        return options
    }

    func text() throws -> URL {
        let file = folder.appendingPathComponent("text.txt")
        try file.write(String(repeating: "The quick brown fox jumps over the lazy dog.\n", count: 40))
        return file
    }

    func contents(_ adapters: Adapters) throws -> Data {
        try Data(contentsOf: adapters.url.appendingPathComponent("adapters.safetensors"))
    }

    func log(_ run: Int = 1) throws -> LogSummary { try LogSummary(folder: runs.appendingPathComponent("run-\(run)")) }
}

extension AsyncSequence {
    @discardableResult func end(isolation: isolated (any Actor)? = #isolation) async throws -> Element? {
        var last: Element?
        for try await element in self { last = element }
        return last
    }
}

extension AsyncSequence where Element == String {
    func joined(isolation: isolated (any Actor)? = #isolation) async throws -> String {
        var text = ""
        for try await piece in self { text += piece }
        return text
    }
}
