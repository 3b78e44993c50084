import Foundation
import MeSP
import Testing

@testable import MeSPControl
@testable import MeSPCore
@testable import MeSPFiles
@testable import MeSPSentences

@Suite(.serialized) final class FineTuningErrorTests: TunerSuite, @unchecked Sendable {
    private let conversations = (0..<4).map { Conversation([.user("Hi \($0)"), .assistant("Good day")]) }
    private func kind(_ body: () async throws -> Void) async -> FineTuningError.Kind? {
        do {
            try await body()
            return nil
        } catch { return (error as? FineTuningError)?.kind }
    }

    private func kind(_ updates: TrainingUpdates) async -> FineTuningError.Kind? {
        await kind { try await updates.end() }
    }

    @Test func optionsMemoryAndRecordsAreNamed() async throws {
        let tuner = try await tuner()
        #expect(await kind(tuner.train(on: conversations, options(steps: 0))) == .invalidOption("steps"))
        #expect(
            await kind(tuner.train(on: conversations, options(steps: 2) { $0.dropout = 1 }))
                == .invalidOption("dropout"))
        #expect(
            await kind(tuner.train(on: conversations, options(steps: 2) { $0.sequenceLength = 1 << 20 }))
                == .invalidOption("sequenceLength"))
        let limit = await kind(tuner.train(on: conversations, options(steps: 2) { $0.memory = .megabytes(1) }))
        guard case .insufficientMemory(let required, available: 1_000_000) = limit else {
            Issue.record("\(String(describing: limit))")
            return
        }
        let enough = options(steps: 2) { $0.memory = .megabytes((Double(required) / 1e6 * 1.1).rounded(.up)) }
        #expect(try tuner.predictedPeak(enough) > 0)
        let wrong = conversations + [Conversation([.user("Hi")])]
        #expect(await kind(tuner.train(on: wrong, options(steps: 2))) == .invalidRecord(index: 4))
        #expect(
            await kind { _ = try await tuner.preview(of: wrong.reversed(), options(steps: 2)) }
                == .invalidRecord(index: 0))
    }

    @Test func whatIsNotThereAndWhatIsInTheWay() async throws {
        let tuner = try await tuner()
        #expect(await kind(tuner.continueTraining()) == .nothingSaved)
        #expect(await kind { _ = try tuner.adapters } == .nothingSaved)
        let updates = tuner.train(on: conversations, options(steps: 1_000_000))
        #expect(await kind(tuner.train(on: conversations, options(steps: 2))) == .busy)
        await tuner.stop()
        try await updates.end()
        let within = await tuner.whilePaused { await self.kind(tuner.train(on: self.conversations)) }
        #expect(within == .busy)
    }

    @Test func filesAndModels() async throws {
        let nothing = folder.appendingPathComponent("a.mesp")
        let opened = await kind { _ = try await FineTuner(bundle: nothing, tokenizer: ByteTokenizer()) }
        #expect(opened == .damaged(nothing))
        let model = folder.appendingPathComponent("Tiny-4bit")
        try TinyModel.write(to: model)
        let bundle = folder.appendingPathComponent("tiny.mesp")
        func tuner() async throws -> FineTuner {
            try await FineTuner(model: model, tokenizer: ByteTokenizer(), bundle: bundle, folder: runs)
        }
        let config = model.appendingPathComponent("config.json")
        let text = try config.readText()
        try config.changeJSON { $0["model_type"] = "other" }
        #expect(await kind { _ = try await FineTuner.bundleSize(of: model) } == .unsupportedModel)
        #expect(await kind { _ = try await tuner() } == .unsupportedModel)
        try config.write(text)

        try await tuner().train(on: conversations, options(steps: 2)).end()
        try model.appendingPathComponent("model-00001-of-00002.safetensors").flipBit()
        #expect(await kind { _ = try await tuner().adapters } == .otherWeights)
    }

    @Test func aFullDisk() async throws {
        let tuner = try await tuner()
        var found: (any Error)?
        await withFullDisk {
            do { try await tuner.train(on: conversations, options(steps: 2)).end() } catch { found = error }
        }
        #expect((found as? FineTuningError)?.kind == .insufficientDisk(required: nil), "\(String(describing: found))")
    }

    @Test func aLossThatIsNotFinite() async throws {
        let options = options(steps: 50) { $0.learningRate = 1e30 }
        #expect(await kind(try await tuner().train(on: conversations, options)) == .notFinite)
    }

    @Test func theKindOfAnInnerSentenceIsKept() {
        let inner = MeSPError("it is full", .insufficientDisk(required: 3))
        #expect(FineTuningError(.other, "a").kind == .other)
        #expect(MeSPError("Cannot write: \(inner.plainSentence).").sentence.kind == .insufficientDisk(required: 3))
        let refused = MeSPError("No GPU.", .unsupportedDevice)
        #expect("\(refused.plainSentence)" as Sentence == "No GPU")
    }

    @Test func invalidRecordsAreLeftOutAndListed() async throws {
        let tuner = try await tuner()
        var records = conversations
        records.insert(Conversation([.user("Hi")]), at: 1)
        records.append(Conversation([.user("Hi"), .assistant(" ")]))
        let chosen = options(steps: 2) { $0.leavesOutInvalidRecords = true }
        let preview = try await tuner.preview(of: records, chosen)
        #expect(preview.leftOut.map(\.index) == [1, 5])
        #expect(preview.leftOut.last?.reason.contains("an answer is empty") == true)
        #expect(preview.notices.contains("Records that cannot be trained are left out: 2."))
        let last = try await tuner.train(on: records, chosen).end()
        #expect(last?.phase == .finished && last?.leftOut == preview.leftOut)
        let kept = try contents(tuner.adapters)
        try await tuner.train(on: conversations, options(steps: 2)).end()
        #expect(try contents(tuner.adapters) == kept)

        let file = folder.appendingPathComponent("a.jsonl")
        let line = #"{"prompt": "Hi", "completion": "Good day"}"#
        let others = [#"{"prompt": "Hi", "completion": "a", "mood": "glad"}"#, "[]"]
        try file.write([line, others[0], line, others[1], line].joined(separator: "\n"))
        #expect(try await tuner.preview(of: file, chosen).leftOut.map(\.index) == [1, 3])
        #expect(await kind { _ = try await tuner.preview(of: file, options(steps: 2)) } == .invalidRecord(index: 3))
    }

    @Test func updatesTellThePhase() async throws {
        let tuner = try await tuner()
        var phases = [TrainingPhase]()
        for try await update in tuner.train(on: conversations, options(steps: 3)) where phases.last != update.phase {
            phases.append(update.phase)
        }
        #expect(phases.first == .preparing && phases.last == .finished)
        #expect(Set(phases).isSuperset(of: [.preparing, .training, .evaluating, .saving, .finished]))
        for try await update in tuner.train(on: conversations, options(steps: 1_000_000)) {
            phases.append(update.phase)
            if update.step == 2 { Task { await tuner.stop() } }
        }
        #expect(phases.last == .stopped)
    }

    @MainActor @Test func pausesAndTimeAreOfOneTuner() async throws {
        let (monitor, bundle) = (TestMonitor(), try tiedBundle())
        let controller = RunController(monitor: monitor)
        func make(_ name: String) async throws -> FineTuner {
            try await FineTuner(
                bundle: bundle, tokenizer: ByteTokenizer(), folder: folder.appendingPathComponent(name),
                controller: controller)
        }
        let (one, other) = (try await make("one"), try await make("other"))
        other.pause()
        other.setBackgroundTime(.continued)
        for try await update in one.train(on: conversations, options(steps: 2)) {
            #expect(update.pause == nil && controller.grant == nil)
        }
        var (pauses, isInUse) = (Set<MeSP.PauseReason>(), false)
        for try await update in other.train(on: conversations, options(steps: 2)) {
            isInUse = isInUse || monitor.isInUse
            guard let pause = update.pause else { continue }
            pauses.insert(pause)
            #expect(controller.grant == .continued)
            one.resume()
            other.resume()
        }
        #expect(pauses == [.user] && controller.grant == nil && isInUse && !monitor.isInUse)
    }

    @Test func whatAPersonHasTaughtIsDeleted() async throws {
        let tuner = try await tuner()
        let other = folder.appendingPathComponent("runs/keep.txt")
        try await tuner.train(on: conversations, options(steps: 2)).end()
        try other.write("")
        Task { try await tuner.train(on: conversations, options(steps: 1_000_000)).end() }
        try await tuner.deleteLastRun()
        try await tuner.deleteRuns()
        #expect(try FileManager.default.contentsOfDirectory(atPath: runs.path) == ["keep.txt"])
        #expect(await kind { _ = try tuner.adapters } == .nothingSaved)
        let bundle = folder.appendingPathComponent("copy.mesp")
        try tuner.bundle.copy(to: bundle)
        try await FineTuner(bundle: bundle, tokenizer: ByteTokenizer(), folder: runs).deleteBundle()
        #expect(!bundle.exists)
    }

    @Test func runsAreNotInBackups() async throws {
        let (policies, tuner) = (Locked([String: StoragePolicy]()), try await tuner())
        let note: @Sendable (URL, StoragePolicy) -> Void = { url, policy in policies.change { $0[url.path] = policy } }
        try await StoragePolicy.$set.withValue(note) {
            try await tuner.train(on: conversations, options(steps: 2)).end()
        }
        #expect(policies.value[runs.path] == .state)
    }

    @Test func thePrivacyManifestIsAResource() throws {
        let file = try #require(TextData.resources.url(forResource: "PrivacyInfo", withExtension: "xcprivacy"))
        let plist = try PropertyListSerialization.propertyList(from: Data(contentsOf: file), format: nil)
        let accessed = (plist as? [String: Any])?["NSPrivacyAccessedAPITypes"] as? [[String: Any]] ?? []
        let reasons = accessed.map { $0["NSPrivacyAccessedAPITypeReasons"] as? [String] ?? [] }
        #expect(reasons == [["E174.1"], ["C617.1"]])
    }
}
