import Foundation
import MeSPSentences
import Testing

@testable import MeSPAppModel
@testable import MeSPControl
@testable import MeSPCore

@MainActor private final class Scheduler: BackgroundScheduler {
    var onGrant: ((any BackgroundTime) -> Void)?
    var givesGPU = false
    var asked = [BackgroundGrant]()
    var withdrawn = [BackgroundGrant]()

    func ask(for grant: BackgroundGrant, title: Sentence) {
        #expect(title.english.hasPrefix("Training "))
        asked.append(grant)
    }
    func withdraw(_ grant: BackgroundGrant) { withdrawn.append(grant) }

    func give(_ grant: BackgroundGrant) -> Time {
        let time = Time(grant)
        onGrant?(time)
        return time
    }
}

@MainActor private final class Time: BackgroundTime {
    let grant: BackgroundGrant
    var onExpiration: (() -> Void)?
    var shown = [RunProgress]()
    var ended: Bool?

    init(_ grant: BackgroundGrant) { self.grant = grant }
    func show(_ progress: RunProgress) { shown.append(progress) }
    func end(success: Bool) { ended = success }
}

@MainActor private final class Board: NotificationDisplay {
    var shown: RunNotification?
    var permissions = 0
    var asksOver: TestMonitor?
    private(set) var answer: (() -> Void)?
    func askPermission() async {
        permissions += 1
        guard let asksOver else { return }
        asksOver.scene = .inactive
        await withCheckedContinuation { continuation in answer = { continuation.resume() } }
        asksOver.scene = .active
    }
    func show(_ notice: RunNotification) { shown = notice }
    func clear() { shown = nil }
}

@MainActor private final class Lock: LiveActivityDisplay {
    var title: Sentence?
    var shown: LiveActivityContent?
    var updates = 0
    func begin(title: Sentence, _ content: LiveActivityContent) { (self.title, shown) = (title, content) }
    func update(_ content: LiveActivityContent) { (shown, updates) = (content, updates + 1) }
    func end(_ last: LiveActivityContent?) { (title, shown) = (nil, last) }
}

@Suite(.serialized) @MainActor final class BackgroundTrainingTests: AppSuite {
    private let scheduler = Scheduler()
    private let board = Board()
    private let lock = Lock()

    override func makeModel(_ loadTokenizer: @escaping LoadTokenizer) -> AppModel {
        AppModel(
            monitor: monitor, folder: DocumentsFolder(documents: documents), scheduler: scheduler,
            notificationDisplay: board, activityDisplay: lock, loadTokenizer: loadTokenizer)
    }

    private func launch() { model = makeModel { _ in ByteTokenizer() } }

    private func prepare(steps: Int) async throws {
        try await importTied(steps: steps)
        model.form.settings.saveEvery = 1
    }

    private func begin(steps: Int = 1_000_000) async throws {
        try await prepare(steps: steps)
        await model.startTraining()
        try await reach(.training)
    }

    private func reach(_ state: RunController.State) async throws { try await wait { model.controller.state == state } }

    private func end() async throws {
        monitor.scene = .active
        try await stop()
        #expect(model.controller.state == .finished(.stopped))
    }

    @Test func whatThePersonStartedGoesOnInTheTimeThatIsGiven() async throws {
        try await begin()
        #expect(scheduler.asked == [.overnight, .continued])
        #expect(board.permissions == 1)
        let time = scheduler.give(.continued)
        monitor.scene = .background
        let steps = model.controller.log.steps.count
        try await wait { model.controller.log.steps.count > steps + 1 }
        #expect(model.controller.state == .training)
        #expect(time.shown.last?.step == model.controller.log.lastStep && time.shown.last?.loss != nil)
        time.onExpiration?()
        try await reach(.paused(.away))
        #expect(time.ended == false)
        monitor.scene = .active
        try await reach(.training)
        #expect(scheduler.asked == [.overnight, .continued], "once a run")
        try await end()
        #expect(scheduler.withdrawn == BackgroundGrant.allCases)
    }

    @Test func thePersonIsAskedBeforeTheRunBegins() async throws {
        try await prepare(steps: 1_000_000)
        board.asksOver = monitor
        let start = Task { await model.startTraining() }
        try await wait { board.answer != nil }
        #expect(monitor.scene == .inactive && model.controller.state == .idle && !model.canStart)
        #expect(model.isPreparing && model.startProblem == nil, "it is about to begin")
        board.answer?()
        await start.value
        try await reach(.training)
        #expect(!model.controller.log.events.contains { $0.name == "pause" })
        try await end()
    }

    @Test func aFormThatLacksSomethingAsksForNoPermission() async throws {
        try await prepare(steps: 1)
        model.form.textKind = .file
        await model.startTraining()
        #expect(model.problem == "Choose a text file first." && board.permissions == 0 && !model.isPreparing)
    }

    @Test func progressIsToldWithinAStep() async throws {
        try await prepare(steps: 10)
        model.form.settings.gradAccumulationSteps = 60_000
        await model.startTraining()
        try await reach(.training)
        let time = scheduler.give(.continued)
        try await wait { Set(time.shown.map(\.unitsDone)).count > 2 }
        let done = time.shown.map(\.unitsDone)
        #expect(done == done.sorted())
        #expect(time.shown.allSatisfy { $0.step == 0 && $0.unitsDone < $0.units / 10 })
        try await end()
    }

    private func playOnGPU() async throws {
        let recorded = appSources.appendingPathComponent("Recorded/metrics.jsonl")
        let copy = model.library.folder.runsFolder.appendingPathComponent("on the GPU")
        try copy.makeFolder()
        let log = try recorded.readText().replacing(#/"device": ?"cpu"/#, with: "\"device\":\"gpu\"")
        try copy.appendingPathComponent("metrics.jsonl").write(log)
        model.controller.replay(copy, interval: .milliseconds(20))
        try await wait { model.controller.log.steps.count > 1 }
        #expect(model.controller.usesGPU)
    }

    @Test func aRunForTheGPUAsksForTheGPUWhereTheSystemGivesIt() async throws {
        scheduler.givesGPU = true
        try await playOnGPU()
        #expect(scheduler.asked == [.continuedOnGPU], "the night has no GPU")
        let time = scheduler.give(.continuedOnGPU)
        #expect(model.controller.grant == .continuedOnGPU)
        try await wait { time.shown.last?.step ?? 0 > 1 }
        try await stop()
        #expect(time.ended == false && model.controller.grant == nil)
        #expect(scheduler.withdrawn == BackgroundGrant.allCases)
    }

    @Test func withoutTheGPUARunForItAsksForNothing() async throws {
        try await playOnGPU()
        #expect(scheduler.asked.isEmpty)
    }

    @Test func aTimeThatIsTakenBackLeavesTheOther() async throws {
        try await begin()
        let (first, second) = (scheduler.give(.continued), scheduler.give(.continued))
        first.onExpiration?()
        monitor.scene = .background
        let steps = model.controller.log.steps.count
        try await wait { model.controller.log.steps.count > steps + 1 }
        #expect(first.ended == false && second.ended == nil)
        second.onExpiration?()
        try await reach(.paused(.away))
        try await end()
    }

    @Test func theNightsTimeIsForTheCharger() async throws {
        try await begin()
        monitor.scene = .background
        try await reach(.paused(.away))
        let time = scheduler.give(.overnight)
        try await reach(.paused(.charger))
        monitor.battery?.isCharging = true
        try await reach(.training)
        time.onExpiration?()
        try await reach(.paused(.away))
        #expect(scheduler.asked.last == .overnight, "there is another night")
        let next = scheduler.give(.overnight)
        try await reach(.training)
        try await end()
        #expect(next.ended == false)
    }

    @Test func aRunThatEndsInTheBackgroundEndsItsTime() async throws {
        try await begin(steps: 12)
        let time = scheduler.give(.continued)
        monitor.scene = .background
        try await reach(.finished(.finished))
        #expect(time.ended == true && model.controller.grant == nil)
        let loss = try #require(model.controller.log.steps.last?.loss)
        #expect(board.shown?.title == "Training Is Done")
        #expect(board.shown?.text == "Step 12 of 12, loss \(String(format: "%.2f", loss)).")
        monitor.scene = .active
        #expect(board.shown == nil)
    }

    private func cutOff(from uninterrupted: RunSettings) throws {
        let original = documents.appendingPathComponent("original")
        let killed = model.library.folder.runsFolder.appendingPathComponent("killed")
        try model.library.folder.runsFolder.makeFolder()
        var settings = uninterrupted
        settings.output = original.path
        try Run.run(settings) { record, _ in
            if case .step(let step) = record, step.step == 5 { try original.copy(to: killed) }
        }
        try FileManager.default.removeItem(at: original)
        let log = killed.appendingPathComponent("metrics.jsonl")
        try Data(contentsOf: log).dropLast(700).write(to: log)
    }

    private func settings() throws -> RunSettings {
        var settings = model.form.settings
        settings.bundle = try #require(model.form.bundle).url.path
        settings.output = documents.appendingPathComponent("uninterrupted").path
        (settings.steps, settings.saveEvery) = (9, 2)
        return settings
    }

    @Test func theAppOffersToGoOnWithARunThatWasCutOff() async throws {
        try await prepare(steps: 9)
        #expect(model.interrupted == nil)
        let uninterrupted = try settings()
        try Run.run(uninterrupted)
        try cutOff(from: uninterrupted)

        launch()
        await model.refresh()
        let run = try #require(model.interrupted)
        #expect(run.name == "killed")
        model.decline(run)
        #expect(model.interrupted == nil)
        launch()
        await model.refresh()
        await model.resume(try #require(model.interrupted))
        #expect(model.problem == nil)
        try await reach(.finished(.finished))
        #expect(model.controller.log.events.contains { $0.name == "log_cut_off" })
        let expected = try LogSummary(folder: URL(fileURLWithPath: uninterrupted.output)).steps.map(\.loss)
        let losses = try LogSummary(folder: run.url).steps
        #expect(losses.last?.step == 9 && losses.allSatisfy { $0.loss == expected[$0.step - 1] })
    }

    @Test func theNightGoesOnWithARunThatWasCutOff() async throws {
        try await prepare(steps: 9)
        try cutOff(from: try settings())
        launch()
        monitor.scene = .background
        monitor.battery?.isCharging = true
        let time = scheduler.give(.overnight)
        try await reach(.finished(.finished))
        #expect(time.ended == true)
        #expect(!scheduler.asked.contains(.continued), "nobody has pressed anything")
        #expect(scheduler.give(.overnight).ended == nil)
        let idle = scheduler.give(.overnight)
        try await wait { idle.ended != nil }
        #expect(model.controller.state == .finished(.finished), "there is nothing to go on with")
    }

    @Test func timeWithTheGPUContinuesARunThatWasCutOff() async throws {
        try await prepare(steps: 9)
        try cutOff(from: try settings())
        launch()
        monitor.scene = .background
        let time = scheduler.give(.continuedOnGPU)
        try await reach(.finished(.finished))
        #expect(time.ended == true)
    }

    @Test func thePersonIsToldWhyARunWaits() async throws {
        try await begin()
        monitor.thermalState = .serious
        try await reach(.paused(.heat))
        #expect(board.shown == nil, "it is on the screen")
        monitor.scene = .background
        try await reach(.paused(.away))
        #expect(
            board.shown
                == RunNotification(
                    title: "Training Waits",
                    text: "The app is not in front, and iOS gives it no time to train. Open the app to continue.",
                    delay: RunNotifications.patience))
        _ = scheduler.give(.continued)
        try await reach(.paused(.heat))
        #expect(board.shown?.text == "The device is too warm. Training continues when it has cooled down.")
        monitor.thermalState = .nominal
        try await reach(.training)
        #expect(board.shown == nil, "it waits no more")
        try await end()
        #expect(board.shown == nil)
    }

    @Test func aFailureIsToldInItsSentence() async throws {
        try await begin()
        let time = scheduler.give(.continued)
        monitor.scene = .background
        let bundle = try #require(model.form.bundle).url
        try FileManager.default.removeItem(at: bundle.appendingPathComponent("blocks/01.bin"))
        try await wait { !model.controller.isRunning }
        #expect(board.shown?.title == "Training Has Failed")
        #expect(board.shown?.text.english.contains("01.bin") == true)
        #expect(time.ended == false)
    }

    @Test(arguments: [BackgroundGrant.continued, .continuedOnGPU])
    func theLockScreenShowsTheRun(_ grant: BackgroundGrant) async throws {
        try await begin()
        #expect(lock.title == "Training \(try #require(model.controller.log.start).model.name)")
        #expect(lock.shown?.progress.steps == 1_000_000 && lock.shown?.note == nil)
        try await wait { model.controller.log.lastStep > 1 }
        #expect(lock.updates == 0, "nobody sees it while the app is in front")
        monitor.scene = .inactive
        try await wait { lock.updates == 1 }
        let step = model.controller.log.lastStep
        try await wait { model.controller.log.lastStep > step + 20 }
        #expect(lock.updates < 5, "the system allows few changes, and steps can be short")
        #expect(lock.shown?.lifetime == 120, "if the app is ended, it is not true for long")
        let progress = try #require(lock.shown).progress
        #expect(progress.step > 1 && progress.loss != nil && progress.part > 0)
        monitor.scene = .background
        try await reach(.paused(.away))
        #expect(
            lock.shown?.note == "The app is not in front, and iOS gives it no time to train. Open the app to continue.")
        #expect(lock.shown?.lifetime == nil, "that stays true")
        _ = scheduler.give(grant)
        try await reach(.training)
        #expect(lock.title == nil && lock.shown == nil)
        try await end()
        #expect(lock.shown == nil)
    }

    @Test func theLockScreenKeepsHowARunEnded() async throws {
        try await begin()
        monitor.scene = .inactive
        try await stop()
        #expect(lock.title == nil && lock.shown?.note == "Training was stopped.")
    }

    @Test func inFrontTheLockScreenKeepsNothing() async throws {
        try await begin()
        try await end()
        #expect(lock.title == nil && lock.shown == nil)
    }

    @Test func progressInWords() {
        func sentence(_ step: Int, _ seconds: Double) -> String {
            var log = LogSummary()
            if step > 0 { log.append(.step(.ofATest(step, loss: 2.314, seconds: seconds))) }
            return RunProgress(log, steps: 100).sentence.english
        }
        #expect(sentence(0, 0) == "Step 0 of 100")
        #expect(sentence(10, 10) == "Step 10 of 100, loss 2.31, 15 min left")
        #expect(sentence(10, 60) == "Step 10 of 100, loss 2.31, 1 h 30 min left")
        #expect(sentence(100, 60) == "Step 100 of 100, loss 2.31")
    }
}
