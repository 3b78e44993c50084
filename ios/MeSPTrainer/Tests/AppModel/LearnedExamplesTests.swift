import Foundation
import MeSPSentences
import Testing

@testable import MeSP
@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) @MainActor final class LearnedExamplesTests: AppSuite {
    private var settlings = 0

    override func makeModel(_ loadTokenizer: @escaping LoadTokenizer) -> AppModel {
        let model = super.makeModel(loadTokenizer)
        model.examples.settle = {}
        return model
    }

    private func trained(steps: Int = 3) async throws -> StoredRun {
        if model.library.bundles.isEmpty { try await importTied() }
        (model.form.settings.steps, model.form.settings.learningRate) = (steps, 0.5)
        model.form.settings.valBatches = 0
        try await train()
        return try #require(model.shownRun)
    }

    private func written(_ run: StoredRun) async throws {
        while model.examples.writing != nil || model.examples.of(run).isEmpty {
            try #require(model.examples.problem(of: run) == nil)
            try await Task.sleep(for: .milliseconds(2))
        }
    }

    @Test func aRunShowsWhatItLearnedAndKeepsIt() async throws {
        let run = try await trained()
        try await written(run)
        let samples = model.examples.of(run)
        #expect(samples.count == 2)
        #expect(Set(samples.map(\.prompt)).count == 2 && samples.allSatisfy { !$0.prompt.isEmpty && !$0.isMessage })
        #expect(samples.contains { $0.before != $0.after }, "training changed nothing")

        let bundle = try ModelBundle(url: try #require(model.form.bundle).url)
        let stream = try #require(try bundle.tokens("valid"))
        let text = ByteTokenizer().decode((0..<stream.tokenCount).map { stream.token($0) })
        #expect(samples.allSatisfy { text.contains($0.prompt) })

        model = makeModel { _ in ByteTokenizer() }
        await model.refresh()
        await model.examples.load(run)
        #expect(model.examples.of(run) == samples && model.examples.writing == nil)
        let export = documents.appendingPathComponent("export")
        try run.export(to: export)
        #expect(!export.appendingPathComponent("samples.json").exists)
    }

    @Test func ofRecordsTheQuestionsAreAsked() async throws {
        let records = (0..<30).map { #"{"prompt": "Q\#($0)?", "completion": "A\#($0)."}"# }
        try await importTied()
        await model.chooseText(at: try file("records.jsonl", records.joined(separator: "\n")))
        let run = try await trained()
        try await written(run)
        #expect(model.examples.of(run).map(\.prompt) == ["Q27?", "Q28?"])
        #expect(model.examples.of(run).map(\.isMessage) == [true, true])

        model.openChat(with: run)
        #expect(model.tab == .tryIt && model.writingRun?.id == run.id && model.writingBundle?.name == "bundle")
        #expect(model.chat.draft.prompt == "Q27?" && model.chat.draft.isChat)
        model.chat.draft.prompt = "Mine"
        model.openChat(with: run)
        #expect(model.chat.draft.prompt == "Mine", "what the person has typed stays")
    }

    @Test func theyLeaveTheDeviceToWhatThePersonWants() async throws {
        let (reads, reading) = AsyncStream.makeStream(of: Void.self)
        model = makeModel { _ in
            reading.yield()
            try await Task.sleep(for: .seconds(3600))
            return ByteTokenizer()
        }
        let first = try await trained()
        for await _ in reads { break }
        #expect(model.examples.writing == first.id && model.isFree && model.canStart)
        model.examples.stop()
        #expect(model.examples.writing == nil && model.examples.of(first).isEmpty)
        model.showExamples(of: first)
        #expect(model.examples.writing == first.id)
        await model.startTraining()
        #expect(model.examples.writing == nil && model.controller.isRunning)
        #expect(model.examples.problem(of: first) == nil, "it was only stopped")
        model.showExamples(of: first)
        #expect(model.examples.writing == nil, "the run has the device")
        try await ended()
        for await _ in reads { break }
        let second = try #require(model.shownRun)
        #expect(second.id != first.id && model.examples.writing == second.id)
        model.askToDelete(.run(second))
        await model.confirmDeletion()
        #expect(model.examples.writing == nil && model.library.runs.map(\.id) == [first.id])
    }

    @Test func theyWaitUntilTheAppHasStayedInFrontUnlessSomebodyAsks() async throws {
        let (ends, end) = AsyncStream.makeStream(of: Void.self)
        model.examples.settle = { [unowned self] in
            settlings += 1
            for await _ in ends { break }
        }
        let run = try await trained()
        try await wait { settlings >= 1 }
        monitor.scene = .inactive
        end.yield()
        try await wait { settlings >= 2 }
        #expect(model.examples.writing == run.id && model.examples.of(run).isEmpty)
        monitor.scene = .active
        monitor.scene = .background
        end.yield()
        try await wait { settlings >= 3 }
        #expect(model.examples.of(run).isEmpty)
        monitor.scene = .active
        end.yield()
        try await written(run)

        model.examples.settle = { try await Task.sleep(for: .seconds(3600)) }
        let second = try await trained(steps: 2)
        #expect(model.examples.writing == second.id)
        model.showExamples(of: second)
        try await written(second)
    }

    @Test func stoppedOnesHoldNobodyUpAndNeverRunBesideOthers() async throws {
        let (entered, release) = (DispatchSemaphore(value: 0), DispatchSemaphore(value: 0))
        model = makeModel { _ in
            SlowTokenizer {
                entered.signal()
                release.wait()
            }
        }
        let first = try await trained()
        await Task.detached { Self.wait(entered) }.value
        model.examples.stop()
        #expect(model.examples.writing == nil && model.examples.of(first).isEmpty)
        await model.startTraining()
        try await Task.sleep(for: .milliseconds(300))
        #expect(model.controller.isRunning && model.controller.log.start == nil)
        for _ in 0..<100 { release.signal() }
        try await ended()
        #expect(model.controller.state == .finished(.finished))
    }

    nonisolated private static func wait(_ semaphore: DispatchSemaphore) { semaphore.wait() }

    private struct SlowTokenizer: WrappedTokenizer {
        var atText: @Sendable () -> Void = { Thread.sleep(forTimeInterval: 0.1) }
        let wrapped: any TextTokenizer = ByteTokenizer()

        func decode(_ tokens: [Int]) -> String {
            if tokens.count > 1 { atText() }
            return wrapped.decode(tokens)
        }
    }

    @Test func thoseThatAreStoppedHalfwayAreWrittenAgain() async throws {
        model = makeModel { _ in SlowTokenizer() }
        let run = try await trained()
        while model.examples.of(run).isEmpty {
            try #require(model.examples.problem(of: run) == nil)
            try await Task.sleep(for: .milliseconds(2))
        }
        #expect(model.examples.of(run).count == 1 && model.examples.writing == run.id)
        model.examples.stop()
        #expect(model.examples.of(run).isEmpty && model.examples.writing == nil)
        model.showExamples(of: run)
        try await written(run)
        #expect(model.examples.of(run).count == 2)
    }

    @Test func aTokenizerThatCannotBeReadIsSaid() async throws {
        model = makeModel { _ in throw MeSPError("The tokenizer is not there.") }
        let run = try await trained()
        try await wait { model.examples.problem(of: run) != nil }
        #expect(model.examples.problem(of: run) == "The tokenizer is not there." && model.examples.writing == nil)
        #expect(model.problem == nil, "nobody has asked for it")
        #expect(model.canShowExamples(of: run))
    }

    @Test func withoutHeldOutDataThatIsSaid() async throws {
        let bundle = documents.appendingPathComponent("bundle.mesp")
        try tiedBundle().copy(to: bundle)
        try bundle.appendingPathComponent("manifest.json").changeJSON {
            var data = try #require($0["data"] as? [String: Any])
            data["valid"] = nil
            $0["data"] = data
        }
        await model.refresh()
        let run = try await trained()
        try await wait { model.examples.problem(of: run) != nil }
        #expect(model.examples.problem(of: run)?.english.hasPrefix("This run held out no text") == true)
    }
}
