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
        // A model whose files have other times counts as another model, whose weights are compared.
        let weights = bundle.appendingPathComponent("embedding.bin").path
        func number() throws -> Int? {
            try FileManager.default.attributesOfItem(atPath: weights)[.systemFileNumber] as? Int
        }
        let (file, before) = (model.appendingPathComponent("model-00001-of-00002.safetensors"), try number())
        try FileManager.default.setAttributes(
            [.modificationDate: Date(timeIntervalSince1970: 0)], ofItemAtPath: file.path)
        _ = try await tuner { fractions.append($0) }
        #expect(fractions.values.last == 1 && before != nil)
        #expect(try number() == before, "a file was written again")
        var data = try Data(contentsOf: file)
        data[data.count - 1] ^= 1
        try data.write(to: file)
        _ = try await tuner()
        #expect(try number() != before)
    }

    @Test func aFolderOfAnotherKindIsNotReplaced() async throws {
        try FileManager.default.createDirectory(at: bundle, withIntermediateDirectories: true)
        let own = bundle.appendingPathComponent("own.txt")
        try Data("mine".utf8).write(to: own)
        let error = await #expect(throws: FineTuningError.self) { _ = try await self.tuner() }
        #expect(error?.description == "There is a bundle tiny.mesp already; delete it first.")
        #expect(try Data(contentsOf: own) == Data("mine".utf8))
        // Nor is a bundle that `mesp-export` wrote, which has functions.
        try FileManager.default.removeItem(at: bundle)
        let exported = try #require(Fixture.tied).appendingPathComponent("bundle.mesp").resolvingSymlinksInPath()
        try FileManager.default.copyItem(at: exported, to: bundle)
        await #expect(throws: FineTuningError.self) { _ = try await self.tuner() }
    }

    @Test func runsOfOtherWeightsAreKeptAndRefused() async throws {
        let first = try await tuner()
        let conversations = Array(repeating: Conversation([.user("Hi"), .assistant("Good day")]), count: 4)
        let options = TrainingOptions(steps: 1_000_000, sequenceLength: 32)
        for try await update in first.train(on: conversations, options) where update.step > 0 { break }
        await first.stop()
        #expect(await first.canContinueTraining)
        let file = model.appendingPathComponent("model-00001-of-00002.safetensors")
        var data = try Data(contentsOf: file)
        data[data.count - 1] ^= 1
        try data.write(to: file)
        let second = try await tuner()
        #expect(await !second.canContinueTraining)
        let run = second.folder.appendingPathComponent("run-1")
        let refusal = "The run in \(run.path) has trained for other weights of the model; begin a new run."
        let error = await #expect(throws: FineTuningError.self) { for try await _ in second.continueTraining() {} }
        #expect(error?.description == refusal)
        #expect((#expect(throws: FineTuningError.self) { try second.adapters })?.description == refusal)
        #expect(FileManager.default.fileExists(atPath: run.path))
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
