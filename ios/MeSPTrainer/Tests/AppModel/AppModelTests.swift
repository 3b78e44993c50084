import Foundation
import MLX
import MeSPSentences
import Testing

@testable import MeSPAppModel
@testable import MeSPControl
@testable import MeSPCore

@Suite(.serialized) @MainActor final class AppModelTests: AppSuite {
    @Test func withoutABundleItSaysWhatToDo() async {
        #expect(model.form.bundle == nil)
        #expect(
            throws: MeSPError(
                "Add a model first, under Models: from the Hugging Face Hub, the Files app or by AirDrop.")
        ) {
            _ = try model.form.fit.get()
        }
        await model.startTraining()
        #expect(model.controller.state == .idle)
    }

    @Test func aBundleIsBroughtInAndChosenWithSettingsThatItHas() async throws {
        try await importTied(steps: 1)
        #expect(model.form.bundle?.url.lastPathComponent == "bundle.mesp")
        #expect(model.form.settings.seqLen == 32 && model.form.settings.rank == 8)
        model.form.bundleID = nil
        #expect(model.form.bundle == nil && !model.canStart)
        model.form.bundleID = "bundle.mesp"
        #expect(model.canStart)
        (model.form.hasLimit, model.form.limit) = (true, 1)
        #expect(throws: MeSPError.self) { _ = try model.form.fit.get() }
        model.form.hasLimit = false
        monitor.availableMemory = 1
        #expect(try !model.form.fit.get().fits)
        await model.importBundle(at: try tiedBundle())
        #expect(model.problem == "There is a bundle bundle.mesp already; delete it first.")
    }

    @Test func theRateFollowsTheMethodAndTheOptimizerUntilOneIsChosen() async throws {
        try await importTied(steps: 1)
        let form = model.form
        let width = try #require(form.bundle?.manifest).architecture.hiddenSize
        #expect(form.optimizer == .adamw8bit)
        #expect(form[text: .learningRate] == String(format: "%.4g", 0.007 / Double(width).squareRoot()))
        form.settings.method = .mezo
        #expect(form.optimizer == .sgd && form[text: .learningRate] == "0.0001")
        form.settings.method = .mesp
        form.optimizer = .sgd
        #expect(form[text: .learningRate] == "0.1")
        form.settings.method = .mezo
        #expect(form.optimizer == .sgd && form[text: .learningRate] == "0.0001")
        form.settings.method = .mesp
        #expect(form.optimizer == .adamw8bit)
        form.optimizer = .adamw
        form.settings.method = .mezo
        #expect(form.optimizer == .sgd && form[text: .learningRate] == "0.0001")
        form.optimizer = .sgd
        form.settings.learningRate = 2e-4
        form.settings.method = .mesp
        form.bundleID = nil
        form.bundleID = "bundle.mesp"
        #expect(form.settings.optimizer == .sgd && form.settings.learningRate == 2e-4)
    }

    private func useDemo() async {
        let folder = DocumentsFolder(documents: documents, included: appSources)
        model = AppModel(monitor: monitor, folder: folder) { _ in ByteTokenizer() }
        await model.refresh()
        (model.form.settings.seqLen, model.form.settings.steps, model.form.settings.valBatches) = (128, 1, 0)
    }

    @Test func theBundleThatComesWithTheAppTrains() async throws {
        await useDemo()
        let demos = try model.library.folder.bundles().filter(\.isIncluded)
        #expect(demos.map(\.name) == ["Demo"] && demos[0].problem == nil && demos[0].size > 0)
        #expect(model.form.bundle?.name == "Demo")
        #expect(model.form.lesson?.english.contains("reference manual of the Python language") == true)

        try await train()
        #expect(model.controller.state == .finished(.finished))
    }

    /// MLX must not be used to list bundles. MLX would report a problem on a machine without a GPU.
    @Test func bundlesAreListedWithoutMLX() async throws {
        await useDemo()
        #expect(model.library.bundles.map(\.problem) == [nil])
        #expect(model.form.bundle?.name == "Demo" && model.canStart)
        guard Device.defaultDevice().deviceType != .gpu else { return }

        model.form.settings.device = .gpu
        try await train()
        #expect(model.controller.state == .failed("This machine has no GPU that MLX can use; choose the device cpu."))
        #expect(model.library.runs.isEmpty, "nothing was written")
    }

    @Test func aBundleFromAirDropMovesOutOfTheInbox() async throws {
        let inbox = documents.appendingPathComponent("Inbox")
        try inbox.makeFolder()
        let dropped = inbox.appendingPathComponent("new.mesp")
        try tiedBundle().copy(to: dropped)
        await model.importBundle(at: dropped)
        #expect(model.form.bundle?.id == "new.mesp")
        #expect(!dropped.exists)
        await model.importBundle(at: documents.appendingPathComponent("new.mesp"))
        #expect(model.problem == nil, "it is there already, and only chosen")
    }

    @Test func trainsOnTheBundlesText() async throws {
        try await importTied(steps: 1_000_000)
        await model.startTraining()
        try await wait { model.controller.state != .preparing }
        await model.refresh()
        #expect(model.library.runs.map(\.status) == [.running])
        try await stop()
        #expect(model.library.runs.map(\.status) == [.stopped])
        model.askToDelete(.run(try #require(model.library.runs.first)))
        #expect(model.deletionQuestion.english.hasSuffix("Its log and adapters cannot be recovered."))
        await model.confirmDeletion()
        #expect(model.library.runs.isEmpty && !model.asksToDelete)
    }

    @Test func whatIsInUseIsNotDeletedAndDeletingAsks() async throws {
        try await importTied(steps: 1_000_000)
        await model.startTraining()
        while model.controller.state != .training { try await Task.sleep(for: .milliseconds(1)) }
        let bundle = try #require(model.form.bundle)
        model.askToDelete(.bundle(bundle))
        #expect(model.problem == "bundle is in use; delete it when that has ended." && !model.asksToDelete)
        await model.refresh()
        model.askToDelete(.run(try #require(model.library.runs.first)))
        #expect(model.problem?.english.hasSuffix("is in progress; stop it first.") == true && !model.asksToDelete)
        try await stop()

        model.askToDelete(.bundle(bundle))
        #expect(model.asksToDelete)
        #expect(model.deletionQuestion.english.hasPrefix("Delete bundle? It takes "))
        #expect(model.deletionQuestion.english.hasSuffix(" MB. A run needs it to resume or to generate text."))
        model.asksToDelete = false
        await model.confirmDeletion()
        #expect(model.library.bundles.count == 1, "the person has decided against it")
        model.askToDelete(.bundle(bundle))
        model.checkDevice()
        await model.confirmDeletion()
        #expect(model.library.bundles.count == 1)
        model.selfChecker.stop()
        try await ended()
        model.askToDelete(.bundle(bundle))
        await model.confirmDeletion()
        #expect(model.library.bundles.isEmpty)
    }

    enum Job: CaseIterable { case train, write, measure }

    @Test(arguments: Job.allCases) func nothingElseBeginsWhileATokenizerIsRead(_ job: Job) async throws {
        let (reads, reading) = AsyncStream.makeStream(of: Void.self)
        let (waiting, wait) = AsyncStream.makeStream(of: Void.self)
        model = makeModel { _ in
            reading.yield()
            for await _ in waiting {}
            return ByteTokenizer()
        }
        try await importTied(steps: 1)
        (model.form.textKind, model.form.pasted) = (.pasted, String(repeating: "A line of text.\n", count: 20))
        let file = try file("records.jsonl", #"{"text": "The quick"}"#)
        let asked = SideBySideChat.Request("The", maxTokens: 1)
        let begun = Task {
            switch job {
            case .train: await model.startTraining()
            case .write: await model.write(asked)
            case .measure: await model.evaluate(file, with: nil)
            }
        }
        for await _ in reads { break }
        #expect(!model.isFree && !model.canStart)
        model.form.textKind = .bundle  // which needs no tokenizer
        await model.startTraining()
        model.checkDevice()
        #expect(model.controller.state == .idle && !model.selfChecker.isRunning)
        model.askToDelete(.bundle(try #require(model.form.bundle)))
        #expect(model.problem == "bundle is in use; delete it when that has ended." && !model.asksToDelete)

        wait.finish()
        await begun.value
        try await ended()
        #expect((model.controller.state == .finished(.finished)) == (job == .train))
        #expect((model.chat.base.summary != nil) == (job == .write))
        #expect((model.evaluation.score != nil) == (job == .measure))
    }

    @Test func trainsOnPastedTextAndGoesOnWithItAfterAKill() async throws {
        try await importTied(steps: 1_000_000)
        model.form.settings.saveEvery = 1
        (model.form.textKind, model.form.pasted) = (.pasted, String(repeating: "A line of text.\n", count: 20))
        await model.startTraining()
        while model.controller.log.steps.count < 3 { try await Task.sleep(for: .milliseconds(5)) }
        try await stop()
        let run = try #require(model.library.runs.first)
        #expect(run.canResume)
        #expect(run.url.appendingPathComponent("data/train.bin").exists)

        let steps = run.log?.lastStep ?? 0
        await model.resume(run)
        try await wait { !model.controller.isRunning || model.controller.log.steps.count > steps }
        #expect(model.problem == nil)
        #expect(model.controller.log.events.contains { $0.name == "resumed" })
        try await stop()
    }

    @Test func aTextThatAnotherAppHandsOverIsTrainedOn() async throws {
        try await importTied(steps: 1)
        (model.tab, model.showsSetup) = (.runs, false)
        let inbox = documents.appendingPathComponent("Inbox")
        try inbox.makeFolder()
        let dropped = inbox.appendingPathComponent("notes.txt")
        try dropped.write(String(repeating: "A line of text.\n", count: 20))
        await model.open(dropped)
        #expect(model.tab == .train && model.showsSetup && model.form.textKind == .file)
        #expect(model.form.file?.lastPathComponent == "notes.txt")
        #expect(!dropped.exists)

        let record = #"{"prompt": "Who?", "completion": "You."}"# + "\n"
        let other = try file("elsewhere.jsonl", String(repeating: record, count: 8))
        let first = try #require(model.form.file)
        await model.open(other)
        #expect(!first.exists, "one copy at a time")
        #expect(other.exists)
        try FileManager.default.removeItem(at: other)
        try await train()
        #expect(model.problem == nil && model.controller.state == .finished(.finished))

        await model.open(other)
        #expect(model.problem?.english.hasPrefix("elsewhere.jsonl cannot be copied") == true)
        #expect(try #require(model.form.file).exists, "the last stays")
        (model.problem, model.form.bundleID) = (nil, nil)
        await model.open(documents.appendingPathComponent("bundle.mesp"))
        #expect(model.tab == .bundles && model.form.bundleID == "bundle.mesp" && model.problem == nil)
    }

    @Test func whatAChatHoldsEndsWithItsTabAndWithARun() async throws {
        try await importTied(steps: 1)
        let request = SideBySideChat.Request("Hello", maxTokens: 2, isChat: true)
        func say() async throws {
            model.tab = .tryIt
            try await write(request)
            #expect(model.chat.bytesRead > 0)
        }
        try await say()
        model.tab = .runs
        #expect(model.chat.bytesRead == 0)
        try await say()
        await model.startTraining()
        #expect(model.chat.bytesRead == 0)
        try await ended()
        #expect(model.chat.turns.count == 2, "the conversation itself stays")
    }

    @Test func textThatCannotBeUsedLeavesNoRun() async throws {
        try await importTied(steps: 1)
        (model.form.textKind, model.form.pasted) = (.pasted, "Too short.")
        await model.startTraining()
        #expect(model.problem?.english.hasPrefix("The text has 11 tokens, too few") == true)
        model.hasProblem = false
        #expect(model.problem == nil)
        model.form.textKind = .file
        await model.startTraining()
        #expect(model.problem == "Choose a text file first.")
        #expect(model.controller.state == .idle && model.library.runs.isEmpty && model.isFree)
    }

    @Test func comparesTheMethodsAndWrites() async throws {
        try await importTied(steps: 1)
        await model.compareMethods(steps: 1)
        #expect(model.benchmark.rows.count == 3)
        #expect(model.library.runs.count == 3)
        for settings in model.library.runs.compactMap({ $0.log?.start?.settings }) {
            #expect(settings.optimizer == .sgd && settings.learningRate == 1e-4, "the paper's, whatever the form has")
        }
        #expect(model.library.trained.isEmpty, "a benchmark's adapters are not to write with")
        try await train()
        let run = try #require(model.library.trained.first)
        #expect(model.library.runs.count == 4)
        #expect(model.library.bundle(of: run)?.id == model.form.bundle?.id)
        try await write(.init("The", maxTokens: 1))
        #expect(model.chat.base.summary != nil && model.chat.tuned.summary != nil)
    }

    @Test func oneOrTwoRunsOfAModelWriteEachWithItsStrength() async throws {
        try await importTied(steps: 3)
        let other = documents.appendingPathComponent("other.mesp")
        try tiedBundle().copy(to: other)
        await model.refresh()
        for (seed, bundle) in ["bundle.mesp", "bundle.mesp", "other.mesp"].enumerated() {
            model.form.select(try #require(model.library.usableBundles.first { $0.id == bundle }))
            (model.form.settings.steps, model.form.settings.valBatches) = (3, 0)
            (model.form.settings.optimizer, model.form.settings.learningRate) = (.sgd, 1)
            model.form.settings.seed = UInt64(seed)
            try await train()
        }
        let runs = model.library.trained
        try #require(runs.count == 3 && runs[0].log?.start?.settings.bundle.hasSuffix("other.mesp") == true)
        #expect(model.writingRuns.map(\.id) == [runs[0].id] && model.secondRuns.isEmpty, "the latest, alone")
        model.secondRun = runs[1].id
        #expect(model.secondRun == nil && model.writingRuns.map(\.id) == [runs[0].id], "it is of another model")

        model.chosenRun = runs[2].id
        #expect(model.secondRuns.map(\.id) == [runs[1].id] && model.writingBundle?.id == "bundle.mesp")
        model.secondRun = runs[0].id
        #expect(model.secondRun == nil && model.writingRuns.map(\.id) == [runs[2].id])
        model.secondRun = runs[2].id
        #expect(model.secondRun == nil, "a run is not stacked on itself")
        model.secondRun = runs[1].id
        #expect(model.writingRuns.map(\.id) == [runs[2].id, runs[1].id])

        let request = SideBySideChat.Request("The quick", maxTokens: 24)
        func texts(_ strengths: [Float]) async throws -> (base: String, tuned: String) {
            model.strengths = strengths
            try await write(request)
            #expect(model.problem == nil && model.chat.problem == nil && model.chat.tuned.summary != nil)
            return (model.chat.base.text, model.chat.tuned.text)
        }
        let none = try await texts([0, 0])
        #expect(none.tuned == none.base && !none.base.isEmpty)
        let both = try await texts([1, 0.5])
        #expect(both.base == none.base && both.tuned != none.base)
        let second = try await texts([0, 1]).tuned
        #expect(second != both.tuned && second != none.base)

        model.openChat(with: runs[1])
        #expect(model.writingRuns.map(\.id) == [runs[1].id] && model.strengths == [1, 1])
        try await write(request)
        #expect(model.chat.tuned.text == second, "a stack of one is that one")
    }

    @Test func theScreenHasItsBrightnessAgainWhenTheAppIsLeftOrTheRunEnds() async throws {
        final class Lamp: Display { var brightness: Double? = 0.7 }
        let lamp = Lamp()
        model = AppModel(monitor: monitor, folder: DocumentsFolder(documents: documents), display: lamp) { _ in
            ByteTokenizer()
        }
        try await importTied(steps: 1_000_000)
        await model.startTraining()
        model.screen.isOvernight = true
        #expect(model.screen.isDimmed && lamp.brightness == 0)
        monitor.scene = .inactive
        #expect(!model.screen.isDimmed && lamp.brightness == 0.7, "a call comes in")
        lamp.brightness = 0.5
        monitor.scene = .active
        #expect(model.screen.isDimmed && lamp.brightness == 0)
        model.screen.isOvernight = false
        #expect(lamp.brightness == 0.5)
        model.screen.isOvernight = true
        try await stop()
        #expect(!model.screen.isDimmed && lamp.brightness == 0.5)
    }

    @Test func whereNothingCanBeTrainedARecordedRunIsShown() async throws {
        let recording = documents.appendingPathComponent("Recorded")
        try appSources.appendingPathComponent("Recorded").copy(to: recording)
        model = AppModel(
            monitor: monitor, folder: DocumentsFolder(documents: documents, included: appSources), refusal: "Not here.",
            recording: recording
        ) { _ in ByteTokenizer() }
        await model.refresh()
        #expect(model.form.bundle != nil && !model.canStart && !model.isFree)
        await model.startTraining()
        #expect(model.controller.state == .idle, "nothing is trained")

        #expect(model.canReplay)
        await model.replay()
        #expect(model.problem == nil && !model.showsSetup && !model.canReplay)
        let recorded = try LogSummary(folder: recording)
        while model.controller.log.steps.count < 2 { try await Task.sleep(for: .milliseconds(5)) }
        #expect(model.controller.state == .training && model.controller.settings?.steps == recorded.steps.count)
        model.controller.pause()
        while model.controller.state != .paused(.user) { try await Task.sleep(for: .milliseconds(5)) }
        let steps = model.controller.log.steps.count
        try await Task.sleep(for: .milliseconds(300))
        #expect(model.controller.log.steps.count == steps)
        model.controller.resume()
        while model.controller.log.steps.count == steps { try await Task.sleep(for: .milliseconds(5)) }
        model.controller.stop()
        while model.controller.isRunning { try await Task.sleep(for: .milliseconds(5)) }
        #expect(model.controller.state == .finished(.stopped))

        await model.refresh()
        let run = try #require(model.library.runs.first)
        #expect(run.name == "Recorded run" && run.status == .finished)
        #expect(await model.library.log(of: run)?.steps.count == recorded.steps.count)
        await model.replay()
        #expect(model.controller.isRunning, "again")
        model.controller.stop()
    }

    @Test func theScreenStaysAwakeOnlyForARun() async throws {
        model.screen.isOvernight = true
        #expect(!model.screen.staysAwake && !model.screen.isDimmed)
        #expect(model.screen.overnightAdvice.english.hasPrefix("Connect the charger"))
        monitor.battery?.isCharging = true
        #expect(model.screen.overnightAdvice.english.hasPrefix("With the app in front"), "the CPU is standard here")
        try await importTied(steps: 1_000_000)
        await model.startTraining()
        #expect(model.screen.staysAwake && model.screen.isDimmed)
        (model.screen.isOvernight, model.screen.keepsAwake) = (false, false)
        #expect(!model.screen.staysAwake && !model.screen.isDimmed)
        try await stop()
    }
}
