import Foundation
import MLX
import MeSP
import Testing

@testable import MeSPBundle
@testable import MeSPControl
@testable import MeSPCore

@Suite(.serialized) final class FineTunerTests: TunerSuite, @unchecked Sendable {
    private func sentence(_ updates: TrainingUpdates) async throws -> String {
        let error = await #expect(throws: FineTuningError.self) { try await updates.end() }
        return try #require(error?.errorDescription)
    }

    @Test func itLearnsAndItsAdaptersAreWritten() async throws {
        let tuner = try await tuner()
        var updates = [TrainingUpdate]()
        for try await update in tuner.train(on: try text(), options(steps: 20)) { updates.append(update) }
        #expect(Set(updates.map(\.step)) == Set(0...20))
        #expect(updates.map(\.fraction) == updates.map(\.fraction).sorted())
        let last = try #require(updates.last)
        #expect(last.fraction == 1 && last.steps == 20 && last.pause == nil)
        let heldOut = updates.compactMap(\.heldOutLoss)
        #expect(try #require(heldOut.last) < #require(heldOut.first))
        #expect(last.peakFootprint > 1_000_000 && last.footprint > 1_000_000)
        #expect(try last.predictedPeak == tuner.predictedPeak(options(steps: 20)))

        let copy = folder.appendingPathComponent("copy")
        try tuner.adapters.write(to: copy)
        try tuner.adapters.write(to: copy)  // replaces the first copy
        for file in ["adapters.safetensors", "adapter_config.json", "peft/adapter_model.safetensors"] {
            #expect(copy.appendingPathComponent(file).exists)
        }
        #expect(await !tuner.canContinueTraining)
        #expect(
            try await sentence(tuner.continueTraining())
                == "There is no training to continue in \(runs.path); begin one.")
    }

    @Test func epochsSetTheSteps() async throws {
        let tuner = try await tuner()
        let conversations = (0..<10).map { Conversation([.user("Hi \($0)"), .assistant("Good day")]) }
        var options = options(steps: 1)
        (options.epochs, options.batchSize) = (2, 2)
        var updates = [TrainingUpdate]()
        for try await update in tuner.train(on: conversations, options) { updates.append(update) }
        // One conversation is held out.
        #expect(updates.first?.steps == 0 && updates.last?.steps == 9 && updates.last?.step == 9)
        options.epochs = 0
        #expect(try await sentence(tuner.train(on: conversations, options)).contains("epochs"))
        options.epochs = 1e9
        #expect(try await sentence(tuner.train(on: conversations, options)).contains("steps of a run; lower them."))
    }

    @Test func theDefaultsAreTheRules() async throws {
        let tuner = try await tuner()
        try await tuner.train(on: try text(), options(steps: 1)).end()
        let settings = try #require(try log().start?.settings)
        #expect(settings.optimizer == .adamw8bit)
        let manifest = try ModelBundle(url: tuner.bundle, checksums: false).manifest
        var plain = RunSettings(bundle: settings.bundle, output: settings.output)
        #expect(settings.learningRate == plain.defaultLearningRate(for: manifest.architecture))
        (plain.seqLen, plain.steps, plain.data, plain.rank) = (32, 1, settings.data, settings.rank)
        (plain.optimizer, plain.learningRate, plain.device) = (settings.optimizer, settings.learningRate, .standard)
        #expect(settings == plain, "an option has another default")
    }

    @Test func choicesAreLearned() async throws {
        let tuner = try await tuner()
        let choices = try (0..<8).map { number in
            try Choice(prompt: [.init(role: "user", content: "Hi \(number)")], chosen: "Good day", rejected: "Go away")
        }
        try await tuner.train(on: choices, options(steps: 5)).end()
        let log = try log()
        #expect(log.start?.settings.objective == .dpo && log.steps.last?.margin != nil)
    }

    @Test func conversationsAreLearnedAndAnswered() async throws {
        let tuner = try await tuner()
        let conversation = Conversation([.user("Hi"), .assistant("Good day")])
        let preview = try await tuner.preview(of: [conversation], options(steps: 1))
        #expect(preview.spans.filter(\.isTrained).map(\.text).joined().hasPrefix("Good day"))
        let conversations = Array(repeating: conversation, count: 4)
        try await tuner.train(on: conversations, options(steps: 150) { $0.learningRate = 0.02 }).end()
        let asked = Conversation([.user("Hi")])
        let answer = try await tuner.answer(to: asked).joined()
        // A tiny untrained model learns the letters, but not their order.
        #expect(answer.count > 8 && answer.filter { "Good day".contains($0) }.count > answer.count * 9 / 10)
        let base = try await tuner.answer(to: asked, usesAdapters: false, maxTokens: 8).joined()
        #expect(base != answer && base.utf8.count <= 8 * 4)
        func said(_ adapters: [URL: Float], maxTokens: Int = 256) async throws -> String {
            try await tuner.answer(to: asked, adapters: adapters, maxTokens: maxTokens).joined()
        }
        let (learned, copy) = (try tuner.adapters.url, folder.appendingPathComponent("copy"))
        try tuner.adapters.write(to: copy)
        for adapters in [[learned: 1], [learned: 0.5, copy: 0.5]] as [[URL: Float]] {
            #expect(try await said(adapters) == answer)
        }
        for adapters in [[:], [copy: 0]] as [[URL: Float]] {
            #expect(try await said(adapters, maxTokens: 8) == base)
        }
        await #expect(throws: FineTuningError.self) { try await said([copy: 1, self.folder: 1]) }
        var drawn = Set<String>()
        for _ in 0..<2 { drawn.insert(try await tuner.answer(to: asked, usesAdapters: false, temperature: 1).joined()) }
        #expect(drawn.count == 2)
        let none = await #expect(throws: FineTuningError.self) {
            try await tuner.answer(to: asked, maxTokens: 0).end()
        }
        #expect(none?.errorDescription == "maxTokens must be at least 1.")
        for try await _ in tuner.answer(to: asked, maxTokens: .max) { break }
        await tuner.stop()
        await #expect(throws: FineTuningError.self) {
            try await tuner.answer(to: Conversation([])).end()
        }
    }

    @Test func whatTheModelForgetsIsLimited() async throws {
        let tuner = try await tuner()
        try await tuner.train(on: try text(), options(steps: 2) { $0.maxForgetting = 3 }).end()
        #expect(try log().strength != nil)
    }

    @Test func aPreviewShowsWhatIsTrained() async throws {
        let file = folder.appendingPathComponent("records.jsonl")
        try file.write(String(repeating: #"{"prompt": "Hi", "completion": "Hello"}"# + "\n", count: 4))
        let preview = try await tuner().preview(of: file, options(steps: 1))
        #expect(preview.spans.filter(\.isTrained).map(\.text).joined().hasPrefix("Hello"))
        #expect(preview.spans.first?.isTrained == false)
        let notice = "The chat template writes no token after an answer, so the token that ends a text is added there."
        #expect(preview.notices == [notice])
    }

    private struct AwayFromMain: WrappedTokenizer {
        let wrapped: any TextTokenizer = ByteTokenizer()

        func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
            #expect(!Thread.isMainThread)
            return wrapped.encode(text, addsSpecialTokens: addsSpecialTokens)
        }

        func applyChatTemplate(
            messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
            options: [String: any Sendable]
        ) throws -> [Int] {
            #expect(!Thread.isMainThread)
            return try wrapped.applyChatTemplate(
                messages: messages, tools: tools, addsGenerationPrompt: addsGenerationPrompt, options: options)
        }
    }

    @MainActor @Test func nothingThatTakesTimeIsOnTheMainActor() async throws {
        let (tuner, text) = (try await tuner(AwayFromMain()), try text())
        _ = try await tuner.preview(of: text, options(steps: 1))
        try await tuner.train(on: text, options(steps: 1)).end()
    }

    @Test func aCancelledTaskKeepsWhatWasLearnedAndGoesOnToTheSameBits() async throws {
        let (tuner, text) = (try await tuner(), try text())
        try await tuner.train(on: text, options(steps: 12)).end()
        let whole = try contents(tuner.adapters)

        let (steps, sender) = AsyncStream.makeStream(of: Int.self)
        let task = Task { [self] in
            for try await update in tuner.train(on: text, options(steps: 12)) { sender.yield(update.step) }
        }
        for await step in steps where step >= 3 { break }
        task.cancel()
        try await task.value
        let part = try contents(tuner.adapters)
        #expect(part != whole)
        #expect(await tuner.canContinueTraining)
        try runs.appendingPathComponent("run-3/data").makeFolder()
        let other = try await self.tuner()
        let last = try await other.continueTraining().end()
        #expect(last?.fraction == 1)
        #expect(try contents(other.adapters) == whole)
        #expect(await !other.canContinueTraining)
    }

    @Test func leavingTheLoopStopsTheRun() async throws {
        let tuner = try await tuner()
        for try await update in tuner.train(on: try text(), options(steps: 1_000_000)) where update.step == 3 { break }
        await tuner.stop()
        let log = try log()
        #expect(log.end?.reason == .stopped && log.lastStep >= 3)
        #expect(try !contents(tuner.adapters).isEmpty)
    }

    @Test func aRunThatIsStoppedBeforeItBeginsLeavesNothing() async throws {
        let tuner = try await tuner()
        let updates = tuner.train(on: try text(), options(steps: 1_000_000))
        await tuner.stop()
        try await updates.end()
        #expect(try FileManager.default.contentsOfDirectory(atPath: runs.path).count <= 1)
    }

    @Test func theAdaptersOfBeforeStayUntilThereAreNew() async throws {
        let (tuner, text) = (try await tuner(), try text())
        #expect(throws: FineTuningError.self) { try tuner.adapters }
        try await tuner.train(on: text, options(steps: 2)).end()
        let before = try contents(tuner.adapters)
        let none = folder.appendingPathComponent("none.txt")
        #expect(try await sentence(tuner.train(on: none)) == "none.txt cannot be read.")
        #expect(try contents(tuner.adapters) == before)
        for try await update in tuner.train(on: text, options(steps: 1_000_000)) where update.step > 0 { break }
        await tuner.stop()
        #expect(runs.appendingPathComponent("run-1/adapters").exists, "no other run has finished")
        let url = try tuner.adapters.url
        try await tuner.train(on: text, options(steps: 3) { $0.initialAdapters = url }).end()
        #expect(try contents(tuner.adapters) != before)
        #expect(try FileManager.default.contentsOfDirectory(atPath: runs.path) == ["run-3"])
    }

    @Test func nothingButFormerRunsIsRemoved() async throws {
        try runs.appendingPathComponent("2024").makeFolder()
        let tuner = try await tuner(ByteTokenizer(), URL(string: "file://localhost\(runs.path)"))
        for _ in 0..<2 { try await tuner.train(on: try text(), options(steps: 1)).end() }
        #expect(try !contents(tuner.adapters).isEmpty)
        #expect(try FileManager.default.contentsOfDirectory(atPath: runs.path).sorted() == ["2024", "run-2"])
    }

    @Test func adaptersThatAreNotWholeAreNone() async throws {
        let tuner = try await tuner()
        try await tuner.train(on: try text(), options(steps: 1)).end()
        let before = try tuner.adapters
        try runs.appendingPathComponent("run-2/adapters/peft").makeFolder()
        #expect(try tuner.adapters == before)
    }

    @Test func adaptersReplaceAdaptersAlone() async throws {
        let tuner = try await tuner()
        try await tuner.train(on: try text(), options(steps: 1)).end()
        let (adapters, file) = (try tuner.adapters, folder.appendingPathComponent("text.txt"))
        for place in [file, runs, runs.appendingPathComponent("run-1"), folder] {
            let error = #expect(throws: FineTuningError.self) { try adapters.write(to: place) }
            let sentence = "\(place.path) is no folder of adapters, and is not replaced; choose another."
            #expect(error?.errorDescription == sentence)
        }
        let before = try contents(adapters)
        try adapters.write(to: adapters.url)
        #expect(try contents(adapters) == before)
        #expect(file.exists)
        #expect(try FileManager.default.contentsOfDirectory(atPath: folder.path).count == 2, "a copy is left")
    }

    @Test func updatesAreOfTheirRun() async throws {
        let tuner = try await tuner()
        try await tuner.train(on: try text(), options(steps: 3)).end()
        var first: TrainingUpdate?
        for try await update in tuner.train(on: try text(), options(steps: 2)) where first == nil { first = update }
        #expect(first?.step == 0 && first?.fraction == 0 && first?.loss == nil && first?.heldOutLoss == nil)
    }

    @Test func aFolderThatCannotBeMadeIsNamed() async throws {
        let file = try text()
        let tuner = try await tuner(ByteTokenizer(), file)
        let problem = try await sentence(tuner.train(on: file, options(steps: 1)))
        #expect(problem.hasPrefix("Cannot make the folder \(file.path)/run-1: "))
    }

    @Test func optionsOutOfRangeAreRefusedByName() async throws {
        let (tuner, text) = (try await tuner(), try text())
        func refusal(_ change: (inout TrainingOptions) -> Void) async throws -> String {
            let options = options(steps: 1, change)
            #expect(throws: FineTuningError.self) { try tuner.predictedPeak(options) }
            return try await sentence(tuner.train(on: text, options))
        }
        #expect(try await refusal { $0.steps = 0 } == "steps must be at least 1.")
        #expect(try await refusal { $0.learningRate = -1 } == "learningRate must be a finite number above 0.")
        #expect(try await refusal { $0.learningRate = .nan } == "learningRate must be a finite number above 0.")
        #expect(try await refusal { $0.batchSize = 0 } == "batchSize must be at least 1.")
        #expect(try await refusal { $0.batchSize = 1 << 40 }.hasPrefix("batch_size"))
        #expect(try await refusal { $0.evaluationInterval = -1 } == "evaluationInterval must be at least 0.")
        #expect(try await refusal { $0.maxForgetting = 0 } == "maxForgetting must be a finite number above 0.")
        #expect(
            try await refusal { ($0.maxForgetting, $0.usesDoRA) = (3, true) }
                == "maxForgetting must be nil with usesDoRA.")
        #expect(try await refusal { $0.dropout = 1 } == "dropout must be below 1.")
        #expect(try await refusal { $0.memory = .megabytes(0) } == "memory must be above 0 megabytes.")
        #expect(try await refusal { $0.memory = .megabytes(.infinity) } == "memory must be a finite number.")
        #expect(try await refusal { $0.sequenceLength = 0 } == "sequenceLength must be at least 1.")
        #expect(try await refusal { $0.rank = 0 } == "rank must be at least 1.")
        let limit = try await refusal { $0.memory = .megabytes(1) }
        #expect(limit.hasPrefix("A memory limit of ") && limit.contains("MB is too low"))
        #expect(await !tuner.canContinueTraining)
        #expect(!runs.appendingPathComponent("run-1").exists, "a run has left something")
    }

    @Test func oneRunAtATime() async throws {
        let (tuner, text) = (try await tuner(), try text())
        let updates = tuner.train(on: text, options(steps: 1_000_000))
        #expect(try await sentence(tuner.train(on: text)) == "A run is in progress; stop it first.")
        for try await _ in updates { break }
        await tuner.stop()
    }

    @Test func twoFineTunersHaveOneTurn() async throws {
        let (tuner, text) = (try await tuner(), try text())
        let other = try await self.tuner(ByteTokenizer(), folder.appendingPathComponent("other"))
        for try await update in tuner.train(on: text, options(steps: 1_000_000)) where update.step == 2 {
            #expect(try await sentence(other.train(on: text)) == "A run is in progress; stop it first.")
            await other.stop()
            try await other.whilePaused {
                let before = try log()
                try await Task.sleep(for: .milliseconds(200))
                let after = try log()
                #expect(before.lastStep == after.lastStep && after.end == nil)
            }
            break
        }
        await tuner.stop()
        try await other.train(on: text, options(steps: 1)).end()
    }

    @MainActor @Test func theRunWaitsWhileTheAppUsesMLX() async throws {
        let monitor = TestMonitor()
        let tuner = try await tuner(monitor)
        let updates = tuner.train(on: try text(), options(steps: 1_000_000))
        defer { withExtendedLifetime(updates) {} }
        for try await update in updates where update.step == 2 { break }
        let result = await tuner.whilePaused { () -> Float in
            let before = try? self.log().lastStep
            let sum = (MLXArray([1, 2] as [Float]) + 1).sum().item(Float.self)
            try? await Task.sleep(for: .milliseconds(200))
            let after = try? self.log().lastStep
            #expect(before == after)
            return sum
        }
        #expect(result == 5)
        #expect(try log().end == nil, "the run had ended")
        await tuner.stop()
    }

    @MainActor @Test func whatEndsOrAnswersWaitsWhileTheAppUsesMLX() async throws {
        let tuner = try await tuner(TestMonitor())
        for try await update in tuner.train(on: try text(), options(steps: 1_000_000)) where update.step == 2 {
            await tuner.whilePaused {
                Task { await tuner.stop() }
                try? await Task.sleep(for: .milliseconds(200))
                #expect(throws: FineTuningError.self) { try tuner.adapters }
            }
            break
        }
        await tuner.stop()
        _ = try tuner.adapters

        let count = Locked(0)
        let answer = Task {
            for try await _ in tuner.answer(to: Conversation([.user("Hi")]), maxTokens: 1_000_000) {
                count.change { $0 += 1 }
            }
        }
        while count.value < 3 { try await Task.sleep(for: .milliseconds(1)) }
        try await tuner.whilePaused {
            try await Task.sleep(for: .milliseconds(50))  // pieces written before arrive
            let before = count.value
            try await Task.sleep(for: .milliseconds(200))
            #expect(count.value == before)
        }
        let before = count.value
        while count.value == before { try await Task.sleep(for: .milliseconds(1)) }
        await tuner.stop()
        try await answer.value
    }

    /// Within `whilePaused`, a run or an answer is refused, because it would wait forever for the end of `whilePaused`.
    @Test func nothingBeginsWhereItWouldWaitForItself() async throws {
        let (tuner, text) = (try await tuner(), try text())
        let refusal = "A run or an answer would wait for the end of whilePaused; begin it afterwards."
        try await tuner.whilePaused {
            let said = try await sentence(tuner.train(on: text, options(steps: 1)))
            #expect(said == refusal)
            await #expect(throws: FineTuningError.self) {
                try await tuner.answer(to: Conversation([.user("Hi")]), usesAdapters: false).end()
            }
        }
        for try await update in tuner.train(on: text, options(steps: 1_000_000)) where update.step == 2 {
            await tuner.whilePaused { await tuner.stop() }
            break
        }
        await tuner.stop()
        #expect(await tuner.canContinueTraining)
    }

    @Test func adaptersOfNoStepAreNone() async throws {
        let (tuner, text) = (try await tuner(), try text())
        try await tuner.train(on: text, options(steps: 2)).end()
        let before = try contents(tuner.adapters)
        for try await update in tuner.train(on: text, options(steps: 1_000_000))
        where update.step == 0 && update.phase != .preparing { break }
        await tuner.stop()
        let log = try log(2)
        if log.lastStep == 0 { #expect(try contents(tuner.adapters) == before) }
    }

    @Test func magnitudesAreTrainedWrittenAndContinued() async throws {
        let (tuner, text) = (try await tuner(), try text())
        var options = options(steps: 2)
        options.usesDoRA = true
        try await tuner.train(on: text, options).end()
        let copy = folder.appendingPathComponent("copy")
        try tuner.adapters.write(to: copy)
        #expect(try copy.appendingPathComponent("adapter_config.json").readText().contains("\"dora\""))
        try await tuner.answer(to: Conversation([.user("Hi")]), maxTokens: 2).end()
        options.initialAdapters = copy
        try await tuner.train(on: text, options).end()
        options.usesDoRA = false
        #expect(try await sentence(tuner.train(on: text, options)).hasSuffix("lose their magnitudes; set dora."))
    }

    @Test func initialAdaptersAreKept() async throws {
        let (tuner, text) = (try await tuner(), try text())
        try await tuner.train(on: text, options(steps: 2)).end()
        let initial = folder.appendingPathComponent("initial")
        try tuner.adapters.write(to: initial)
        var options = options(steps: 1_000_000)
        options.initialAdapters = initial
        for try await update in tuner.train(on: text, options) where update.step > 0 { break }
        await tuner.stop()
        try FileManager.default.removeItem(at: initial)
        for try await update in tuner.continueTraining() where update.step > 0 { break }
        await tuner.stop()
        options.initialAdapters = initial
        #expect(try await sentence(tuner.train(on: text, options)).hasPrefix("Cannot read the adapters in "))
    }

    @Test func updatesNeverGoBack() async throws {
        let (tuner, text) = (try await tuner(), try text())
        for try await update in tuner.train(on: text, options(steps: 12)) where update.step == 4 { break }
        await tuner.stop()
        var updates = [TrainingUpdate]()
        for try await update in tuner.continueTraining() { updates.append(update) }
        let steps = updates.map(\.step)
        #expect(steps == steps.sorted() && steps.first ?? 0 >= 4 && steps.last == 12)
        #expect(updates.last?.notices == [], "it tells no more than happened")
    }

    @MainActor @Test func aPauseHoldsTheNextRun() async throws {
        let tuner = try await tuner(TestMonitor())
        tuner.pause()
        var pauses = Set<MeSP.PauseReason>()
        for try await update in tuner.train(on: try text(), options(steps: 3)) {
            guard let pause = update.pause else { continue }
            #expect(update.step == 0)
            pauses.insert(pause)
            tuner.resume()
        }
        #expect(pauses == [.user])
    }

    @MainActor @Test func aMemoryWarningHoldsNoLaterRun() async throws {
        let monitor = TestMonitor()
        let tuner = try await tuner(monitor)
        var isWarned = false
        do {
            for try await update in tuner.train(on: try text(), options(steps: 1_000_000)) {
                if update.step >= 2, !isWarned {
                    isWarned = true
                    monitor.tell(.memoryWarning)
                }
                if update.pause == .memory { break }
            }
        } catch {
            // A run that the warning finds between two steps does not wait. It ends, because no plan takes less memory.
            #expect(error.localizedDescription.contains("no plan takes less memory"))
        }
        await tuner.stop()
        var pauses = Set<MeSP.PauseReason>()
        for try await update in tuner.train(on: try text(), options(steps: 2)) {
            if let pause = update.pause {
                pauses.insert(pause)
                break
            }
        }
        await tuner.stop()
        #expect(pauses.isEmpty)
    }

    @MainActor @Test func aPauseSaysWhyAndTheRunGoesOn() async throws {
        let monitor = TestMonitor()
        let tuner = try await tuner(monitor)
        var (pauses, after): ([MeSP.PauseReason], Int) = ([], 0)
        for try await update in tuner.train(on: try text(), options(steps: 1_000_000)) {
            if update.step == 2, pauses.isEmpty { monitor.thermalState = .serious }
            if let pause = update.pause, pauses.last != pause {
                pauses.append(pause)
                if pause == .heat {
                    monitor.thermalState = .nominal
                    await tuner.pause()
                } else {
                    await tuner.resume()
                }
            }
            if pauses.contains(.user), update.pause == nil { after += 1 }
            if after > 3 { break }
        }
        await tuner.stop()
        #expect(pauses == [.heat, .user] || pauses == [.heat, .user, .heat])
        #expect(MeSP.PauseReason.allCases.map(\.rawValue) == MeSPControl.PauseReason.allCases.map(\.rawValue))
        #expect(MeSP.PauseReason.heat.message == "The device is too warm. Training continues when it has cooled down.")
    }

    @Test func itSetsNoVariableOfTheProcess() async throws {
        let names = ["MLX_ENABLE_TF32", "MLX_MAX_OPS_PER_BUFFER", "MLX_METAL_GPU_ARCH"]
        let before = names.map { getenv($0).map { String(cString: $0) } }
        for name in names { unsetenv(name) }
        defer { for (name, value) in zip(names, before) { if let value { setenv(name, value, 1) } } }
        let tuner = try await tuner()
        try await tuner.train(on: try text(), options(steps: 1)).end()
        #expect(names.allSatisfy { getenv($0) == nil })
        FineTuner.prepareProcess()
        #expect(getenv("MLX_ENABLE_TF32") != nil && getenv("MLX_MAX_OPS_PER_BUFFER") != nil)
        for name in names { unsetenv(name) }
    }
}

@Suite(.serialized) struct MLXLimitsTests {
    @Test func ofTheProcessComeBack() {
        let before = (Memory.cacheLimit, Memory.memoryLimit)
        defer { (Memory.cacheLimit, Memory.memoryLimit) = before }
        (Memory.cacheLimit, Memory.memoryLimit) = (1000, 2000)
        MLXLimits.set(.cache, to: 10) {
            MLXLimits.set(.memory, to: 20) {
                MLXLimits.set(.memory, to: 30) {
                    MLXLimits.giveBack {
                        #expect((Memory.cacheLimit, Memory.memoryLimit) == (1000, 2000))
                        Memory.memoryLimit = 3000
                    }
                    #expect((Memory.cacheLimit, Memory.memoryLimit) == (10, 30))
                }
                #expect((Memory.cacheLimit, Memory.memoryLimit) == (10, 20))
                Memory.cacheLimit = 4000
            }
            #expect((Memory.cacheLimit, Memory.memoryLimit) == (4000, 3000))
        }
        #expect((Memory.cacheLimit, Memory.memoryLimit) == (4000, 3000))
    }
}
