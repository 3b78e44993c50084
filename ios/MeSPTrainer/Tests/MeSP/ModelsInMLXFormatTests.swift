import Foundation
import MeSP
import Testing

@testable import MeSPBundle

@Suite(.serialized) final class ModelsInMLXFormatTests: TunerSuite, @unchecked Sendable {
    private var model: URL { folder.appendingPathComponent("Tiny-4bit") }
    private var bundle: URL { folder.appendingPathComponent("tiny.mesp") }

    override init() throws {
        try super.init()
        try TinyModel.write(to: model)
    }

    private func imported(progress: @escaping @Sendable (Double) -> Void = { _ in }) async throws -> FineTuner {
        try await FineTuner(model: model, tokenizer: ByteTokenizer(), bundle: bundle, folder: runs, progress: progress)
    }

    private func weights(_ bundle: URL) throws -> [String: Data] {
        let manifest = try ModelBundle(url: bundle).manifest
        return try Dictionary(
            uniqueKeysWithValues: Set(manifest.weightFiles.map(\.file)).map {
                ($0, try Data(contentsOf: bundle.appendingPathComponent($0)))
            })
    }

    @Test func itIsTrainedFromTheSameBytesThatTheExporterWrites() async throws {
        let fractions = Locked([Double]())
        let tuner = try await imported { fraction in fractions.change { $0.append(fraction) } }
        #expect(try weights(bundle) == weights(tiedBundle()))
        #expect(fractions.value.last == 1 && fractions.value == fractions.value.sorted())
        let size = try await FineTuner.bundleSize(of: model)
        #expect(try weights(bundle).values.reduce(0) { $0 + $1.count } == size)
        #expect(try await tuner.train(on: text(), options(steps: 2)).end()?.step == 2)
    }

    @Test func aBundleThatIsThereIsOpened() async throws {
        _ = try await imported()
        let fractions = Locked([Double]())
        _ = try await imported { fraction in fractions.change { $0.append(fraction) } }
        #expect(fractions.value.isEmpty)
        // A model whose files have other times counts as another model, whose weights are compared.
        let weights = bundle.appendingPathComponent("embedding.bin").path
        func number() throws -> Int? {
            try FileManager.default.attributesOfItem(atPath: weights)[.systemFileNumber] as? Int
        }
        let (file, before) = (model.appendingPathComponent("model-00001-of-00002.safetensors"), try number())
        try FileManager.default.setAttributes(
            [.modificationDate: Date(timeIntervalSince1970: 0)], ofItemAtPath: file.path)
        _ = try await imported { fraction in fractions.change { $0.append(fraction) } }
        #expect(fractions.value.last == 1 && before != nil)
        #expect(try number() == before, "a file was written again")
        try file.flipBit()
        _ = try await imported()
        #expect(try number() != before)
    }

    @Test func aFolderOfAnotherKindIsNotReplaced() async throws {
        try bundle.makeFolder()
        let own = bundle.appendingPathComponent("own.txt")
        try own.write("mine")
        let error = await #expect(throws: FineTuningError.self) { _ = try await self.imported() }
        #expect(error?.description == "There is a bundle tiny.mesp already; delete it first.")
        #expect(try own.readText() == "mine")
        // Nor is a bundle that `mesp-export` wrote, which has functions.
        try FileManager.default.removeItem(at: bundle)
        try tiedBundle().copy(to: bundle)
        await #expect(throws: FineTuningError.self) { _ = try await self.imported() }
    }

    @Test func runsOfOtherWeightsAreKeptAndRefused() async throws {
        let first = try await imported()
        let conversations = Array(repeating: Conversation([.user("Hi"), .assistant("Good day")]), count: 4)
        for try await update in first.train(on: conversations, options(steps: 1_000_000)) where update.step > 0 {
            break
        }
        await first.stop()
        #expect(await first.canContinueTraining)
        let file = model.appendingPathComponent("model-00001-of-00002.safetensors")
        try file.flipBit()
        let second = try await imported()
        #expect(await !second.canContinueTraining)
        let run = second.folder.appendingPathComponent("run-1")
        let refusal = "The run in \(run.path) has trained for other weights of the model; begin a new run."
        let error = await #expect(throws: FineTuningError.self) { try await second.continueTraining().end() }
        #expect(error?.description == refusal)
        #expect((#expect(throws: FineTuningError.self) { try second.adapters })?.description == refusal)
        #expect(run.exists)
    }

    @Test func oneThatIsCancelledIsContinued() async throws {
        let work = Task {
            try await imported { fraction in if fraction > 0 { withUnsafeCurrentTask { $0?.cancel() } } }
        }
        await #expect(throws: CancellationError.self) { _ = try await work.value }
        #expect(!bundle.exists)
        let fractions = Locked([Double]())
        _ = try await imported { fraction in fractions.change { $0.append(fraction) } }
        #expect(fractions.value.last == 1)
        #expect(try weights(bundle) == weights(tiedBundle()))
    }

    @Test func aModelOfAnotherKindIsRefused() async throws {
        let config = model.appendingPathComponent("config.json")
        try config.replace("\"qwen2\"", with: "\"lfm2\"")
        let error = await #expect(throws: FineTuningError.self) { _ = try await self.imported() }
        #expect(error?.description.contains("mesp-export --model") == true)
        #expect(!bundle.exists)
    }
}
