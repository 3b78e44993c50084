import Foundation
import MeSP
import Testing

@testable import MeSPBundle

@Suite(.serialized) final class ModelsInMLXFormatTests: Sendable {
    private let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
    private var model: URL { folder.appendingPathComponent("Tiny-4bit") }
    private var bundle: URL { folder.appendingPathComponent("tiny.mesp") }

    init() throws {
        try TinyModel.write(to: model)
    }

    deinit { try? FileManager.default.removeItem(at: folder) }

    private func tuner(progress: @escaping @Sendable (Double) -> Void = { _ in }) async throws -> FineTuner {
        try await FineTuner(
            model: model, tokenizer: ByteTokenizer(), bundle: bundle, folder: folder.appendingPathComponent("run"),
            progress: progress)
    }

    private func weights(_ bundle: URL) throws -> [String: Data] {
        let manifest = try ModelBundle(url: bundle).manifest
        return try Dictionary(
            uniqueKeysWithValues: Set(manifest.weightFiles.map(\.file)).map {
                ($0, try Data(contentsOf: bundle.appendingPathComponent($0)))
            })
    }

    @Test func itIsTrainedFromTheSameBytesThatTheExporterWrites() async throws {
        let fractions = Collected<Double>()
        let tuner = try await tuner { fractions.append($0) }
        let exported = try #require(Fixture.tied).appendingPathComponent("bundle.mesp")
        #expect(try weights(bundle) == weights(exported))
        #expect(fractions.values.last == 1 && fractions.values == fractions.values.sorted())
        let size = try await FineTuner.bundleSize(of: model)
        #expect(try weights(bundle).values.reduce(0) { $0 + $1.count } == size)
        let text = folder.appendingPathComponent("text.txt")
        try String(repeating: "The quick brown fox jumps over the lazy dog.\n", count: 40)
            .write(to: text, atomically: true, encoding: .utf8)
        var steps = 0
        for try await update in tuner.train(on: text, TrainingOptions(steps: 2, sequenceLength: 64)) {
            steps = update.step
        }
        #expect(steps == 2)
    }

    @Test func aBundleThatIsThereIsOpened() async throws {
        _ = try await tuner()
        let fractions = Collected<Double>()
        _ = try await tuner { fractions.append($0) }
        #expect(fractions.values.isEmpty)
        // A model whose files have changed counts as another model, so the bundle is not used for it.
        let file = model.appendingPathComponent("model-00001-of-00002.safetensors")
        try FileManager.default.setAttributes(
            [.modificationDate: Date(timeIntervalSince1970: 0)], ofItemAtPath: file.path)
        let error = await #expect(throws: FineTuningError.self) { _ = try await self.tuner() }
        #expect(error?.description == "There is a bundle tiny.mesp already; delete it first.")
    }

    @Test func oneThatIsCancelledIsContinued() async throws {
        let work = Task {
            try await tuner { fraction in if fraction > 0 { withUnsafeCurrentTask { $0?.cancel() } } }
        }
        await #expect(throws: CancellationError.self) { _ = try await work.value }
        #expect(!FileManager.default.fileExists(atPath: bundle.path))
        let fractions = Collected<Double>()
        _ = try await tuner { fractions.append($0) }
        #expect(fractions.values.last == 1)
        let exported = try #require(Fixture.tied).appendingPathComponent("bundle.mesp")
        #expect(try weights(bundle) == weights(exported))
    }

    @Test func aModelOfAnotherKindIsRefused() async throws {
        let config = model.appendingPathComponent("config.json")
        let text = try String(contentsOf: config, encoding: .utf8)
        try text.replacing("\"qwen2\"", with: "\"lfm2\"").write(to: config, atomically: true, encoding: .utf8)
        let error = await #expect(throws: FineTuningError.self) { _ = try await self.tuner() }
        #expect(error?.description.contains("mesp-export --model") == true)
        #expect(!FileManager.default.fileExists(atPath: bundle.path))
    }
}

private final class Collected<Value: Sendable>: Sendable {
    private let lock = NSLock()
    private nonisolated(unsafe) var all = [Value]()  // guarded by the lock

    var values: [Value] { lock.withLock { all } }

    func append(_ value: Value) { lock.withLock { all.append(value) } }
}
