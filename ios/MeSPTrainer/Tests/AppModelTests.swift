import Foundation
import Testing

@testable import MeSPCore

@Suite(.serialized) @MainActor final class AppModelTests {
    private let documents = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
    private let phone = TestPhone()
    private lazy var model = AppModel(phone: phone, store: RunStore(documents: documents)) { _ in ByteTokenizer() }

    init() throws { try FileManager.default.createDirectory(at: documents, withIntermediateDirectories: true) }
    deinit { try? FileManager.default.removeItem(at: documents) }

    private func fixture() throws -> URL {
        try #require(TrainerTests.tied).appendingPathComponent("bundle.mesp").resolvingSymlinksInPath()
    }

    private func prepare(steps: Int) async throws {
        await model.importBundle(at: try fixture())
        #expect(model.problem == nil)
        (model.settings.steps, model.settings.valBatches) = (steps, 0)
    }

    private func ended() async throws {
        while !model.isFree { try await Task.sleep(for: .milliseconds(5)) }
    }

    @Test func withoutABundleItSaysWhatToDo() async {
        #expect(model.bundle == nil)
        #expect(throws: MeSPError("Bring in a bundle first, by AirDrop, the Files app or tools/push.py.")) {
            _ = try model.fit.get()
        }
        await model.start()
        #expect(model.controller.state == .idle)
    }

    @Test func aBundleIsBroughtInAndChosenWithSettingsThatItHas() async throws {
        try await prepare(steps: 1)
        #expect(model.bundle?.url.lastPathComponent == "bundle.mesp")
        #expect(model.settings.seqLen == 32 && model.settings.rank == 8)
        model.bundleID = nil
        #expect(model.bundle == nil && !model.canStart)
        model.bundleID = "bundle.mesp"
        #expect(model.canStart)
        (model.hasLimit, model.limit) = (true, 1)
        #expect(throws: MeSPError.self) { _ = try model.fit.get() }
        model.hasLimit = false
        phone.availableMemory = 1
        #expect(try !model.fit.get().fits)
        await model.importBundle(at: try fixture())
        #expect(model.problem == "There is a bundle bundle.mesp already; delete it first.")
    }

    @Test func theBundleThatComesWithTheAppTrains() async throws {
        let home = URL(fileURLWithPath: #filePath).deletingLastPathComponent().deletingLastPathComponent()
        let store = RunStore(documents: documents, included: home)
        let model = AppModel(phone: phone, store: store) { _ in ByteTokenizer() }
        #expect(model.bundle?.isIncluded == true && model.bundle?.name == "demo")
        (model.settings.seqLen, model.settings.steps, model.settings.valBatches) = (128, 1, 0)
        await model.start()
        while !model.isFree { try await Task.sleep(for: .milliseconds(5)) }
        #expect(model.controller.state == .finished(.finished))
    }

    @Test func aBundleFromAirDropMovesOutOfTheInbox() async throws {
        let inbox = documents.appendingPathComponent("Inbox")
        try FileManager.default.createDirectory(at: inbox, withIntermediateDirectories: true)
        let dropped = inbox.appendingPathComponent("new.mesp")
        try FileManager.default.copyItem(at: try fixture(), to: dropped)
        await model.importBundle(at: dropped)
        #expect(model.bundle?.id == "new.mesp")
        #expect(!FileManager.default.fileExists(atPath: dropped.path))
        await model.importBundle(at: documents.appendingPathComponent("new.mesp"))
        #expect(model.problem == nil, "it is there already, and only chosen")
    }

    @Test func trainsOnTheBundlesText() async throws {
        try await prepare(steps: 1_000_000)
        await model.start()
        while model.controller.state == .preparing { try await Task.sleep(for: .milliseconds(1)) }
        model.refresh()
        #expect(model.runs.map(\.status) == [.running])
        model.controller.stop()
        try await ended()
        model.refresh()
        #expect(model.runs.map(\.status) == [.stopped])
        await model.delete(try #require(model.runs.first))
        #expect(model.runs.isEmpty)
    }

    @Test func trainsOnPastedTextAndGoesOnWithItAfterAKill() async throws {
        try await prepare(steps: 1_000_000)
        model.settings.saveEvery = 1
        (model.textKind, model.pasted) = (.pasted, String(repeating: "A line of text.\n", count: 20))
        await model.start()
        while model.controller.log.steps.count < 3 { try await Task.sleep(for: .milliseconds(5)) }
        model.controller.stop()
        try await ended()
        model.refresh()
        let run = try #require(model.runs.first)
        #expect(run.canResume)
        #expect(FileManager.default.fileExists(atPath: run.url.appendingPathComponent("data/train.bin").path))

        let steps = run.log?.steps.count ?? 0
        await model.resume(run)
        while model.controller.isRunning, model.controller.log.steps.count <= steps {
            try await Task.sleep(for: .milliseconds(5))
        }
        #expect(model.problem == nil)
        #expect(model.controller.log.events.contains { $0.name == "resumed" })
        model.controller.stop()
        try await ended()
    }

    @Test func textThatCannotBeUsedLeavesNoRun() async throws {
        try await prepare(steps: 1)
        (model.textKind, model.pasted) = (.pasted, "Too short.")
        await model.start()
        #expect(model.problem?.hasPrefix("The text has 11 tokens, too few") == true)
        model.hasProblem = false
        #expect(model.problem == nil)
        model.textKind = .file
        await model.start()
        #expect(model.problem == "Choose a text file first.")
        #expect(model.controller.state == .idle && model.runs.isEmpty && model.isFree)
    }

    @Test func comparesTheMethodsAndWrites() async throws {
        try await prepare(steps: 1)
        await model.compareMethods(steps: 1)
        #expect(model.benchmark.rows.count == 3)
        #expect(model.runs.count == 3)
        let run = try #require(model.runs.first)
        #expect(model.bundle(of: run)?.id == model.bundle?.id)
        var request = Comparison.Request()
        (request.prompt, request.maxTokens) = ("The", 1)
        await model.write(request, with: run)
        try await ended()
        #expect(model.comparison.base.summary != nil && model.comparison.tuned.summary != nil)
    }

    @Test func theScreenStaysAwakeOnlyForARun() async throws {
        model.isOvernight = true
        #expect(!model.staysAwake && !model.isDimmed)
        #expect(model.overnightAdvice.hasPrefix("Connect the charger"))
        phone.battery?.isCharging = true
        #expect(model.overnightAdvice.hasPrefix("Leave the app in front"))
        try await prepare(steps: 1_000_000)
        await model.start()
        #expect(model.staysAwake && model.isDimmed)
        (model.isOvernight, model.keepsAwake) = (false, false)
        #expect(!model.staysAwake && !model.isDimmed)
        model.controller.stop()
        try await ended()
    }
}
