import Foundation
import MeSPSentences
import Testing

@testable import MeSP
@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) @MainActor final class LearnedExamplesTests {
    private let documents = temporaryFolder()
    private let monitor = TestMonitor()
    private var settlings = 0
    private lazy var model = makeModel()
    deinit { try? FileManager.default.removeItem(at: documents) }

    init() throws { try FileManager.default.createDirectory(at: documents, withIntermediateDirectories: true) }

    private func makeModel(
        loadTokenizer: @escaping @Sendable (URL) async throws -> any TextTokenizer = { _ in ByteTokenizer() }
    ) -> AppModel {
        let model = AppModel(
            monitor: monitor, folder: DocumentsFolder(documents: documents), loadTokenizer: loadTokenizer)
        model.examples.settle = {}
        return model
    }

    private func train(steps: Int = 3) async throws -> StoredRun {
        let fixture = try #require(Fixture.tied).appendingPathComponent("bundle.mesp").resolvingSymlinksInPath()
        if model.library.bundles.isEmpty { await model.importBundle(at: fixture) }
        (model.form.settings.steps, model.form.settings.learningRate) = (steps, 0.5)
        model.form.settings.valBatches = 0
        await model.startTraining()
        while !model.isFree { try await Task.sleep(for: .milliseconds(2)) }
        await model.refresh()
        return try #require(model.shownRun)
    }

    private func written(_ run: StoredRun) async throws {
        while model.examples.writing != nil || model.examples.of(run).isEmpty {
            try #require(model.examples.problem(of: run) == nil)
            try await Task.sleep(for: .milliseconds(2))
        }
    }

    @Test func aRunShowsWhatItLearnedAndKeepsIt() async throws {
        let run = try await train()
        try await written(run)
        let samples = model.examples.of(run)
        #expect(samples.count == 2)
        #expect(Set(samples.map(\.prompt)).count == 2 && samples.allSatisfy { !$0.prompt.isEmpty && !$0.isMessage })
        #expect(samples.contains { $0.before != $0.after }, "training changed nothing")

        let bundle = try ModelBundle(url: try #require(model.form.bundle).url)
        let stream = try #require(try bundle.tokens("valid"))
        let text = ByteTokenizer().decode((0..<stream.tokenCount).map { stream.token($0) })
        #expect(samples.allSatisfy { text.contains($0.prompt) })

        model = makeModel()
        await model.refresh()
        await model.examples.load(run)
        #expect(model.examples.of(run) == samples && model.examples.writing == nil)
        let export = documents.appendingPathComponent("export")
        try run.export(to: export)
        #expect(!FileManager.default.fileExists(atPath: export.appendingPathComponent("samples.json").path))
    }

    @Test func ofRecordsTheQuestionsAreAsked() async throws {
        let file = documents.appendingPathComponent("records.jsonl")
        let records = (0..<30).map { #"{"prompt": "Q\#($0)?", "completion": "A\#($0)."}"# }
        try Data(records.joined(separator: "\n").utf8).write(to: file)
        let fixture = try #require(Fixture.tied).appendingPathComponent("bundle.mesp").resolvingSymlinksInPath()
        await model.importBundle(at: fixture)
        await model.chooseText(at: file)
        let run = try await train()
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
        let first = try await train()
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
        while !model.isFree { try await Task.sleep(for: .milliseconds(2)) }
        await model.refresh()
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
        let run = try await train()
        while settlings < 1 { try await Task.sleep(for: .milliseconds(2)) }
        monitor.scene = .inactive
        end.yield()
        while settlings < 2 { try await Task.sleep(for: .milliseconds(2)) }
        #expect(model.examples.writing == run.id && model.examples.of(run).isEmpty)
        monitor.scene = .active
        monitor.scene = .background
        end.yield()
        while settlings < 3 { try await Task.sleep(for: .milliseconds(2)) }
        #expect(model.examples.of(run).isEmpty)
        monitor.scene = .active
        end.yield()
        try await written(run)

        model.examples.settle = { try await Task.sleep(for: .seconds(3600)) }
        let second = try await train(steps: 2)
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
        let first = try await train()
        await Task.detached { Self.wait(entered) }.value
        model.examples.stop()
        #expect(model.examples.writing == nil && model.examples.of(first).isEmpty)
        await model.startTraining()
        try await Task.sleep(for: .milliseconds(300))
        #expect(model.controller.isRunning && model.controller.log.start == nil)
        for _ in 0..<100 { release.signal() }
        while !model.isFree { try await Task.sleep(for: .milliseconds(2)) }
        #expect(model.controller.state == .finished(.finished))
    }

    nonisolated private static func wait(_ semaphore: DispatchSemaphore) { semaphore.wait() }

    private struct SlowTokenizer: TextTokenizer {
        var atText: @Sendable () -> Void = { Thread.sleep(forTimeInterval: 0.1) }
        private let bytes = ByteTokenizer()
        var beginOfText: Int? { bytes.beginOfText }
        var endOfText: Int? { bytes.endOfText }
        var hasChatTemplate: Bool { bytes.hasChatTemplate }
        func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
            bytes.encode(text, addsSpecialTokens: addsSpecialTokens)
        }
        func applyChatTemplate(
            messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
            options: [String: any Sendable]
        ) -> [Int] {
            bytes.applyChatTemplate(
                messages: messages, tools: tools, addsGenerationPrompt: addsGenerationPrompt, options: options)
        }
        func isSpecial(_ token: Int) -> Bool { bytes.isSpecial(token) }
        func decode(_ tokens: [Int]) -> String {
            if tokens.count > 1 { atText() }
            return bytes.decode(tokens)
        }
    }

    @Test func thoseThatAreStoppedHalfwayAreWrittenAgain() async throws {
        model = makeModel { _ in SlowTokenizer() }
        let run = try await train()
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
        let run = try await train()
        while model.examples.problem(of: run) == nil { try await Task.sleep(for: .milliseconds(2)) }
        #expect(model.examples.problem(of: run) == "The tokenizer is not there." && model.examples.writing == nil)
        #expect(model.problem == nil, "nobody has asked for it")
        #expect(model.canShowExamples(of: run))
    }

    @Test func withoutHeldOutDataThatIsSaid() async throws {
        let bundle = documents.appendingPathComponent("bundle.mesp")
        let fixture = try #require(Fixture.tied).appendingPathComponent("bundle.mesp").resolvingSymlinksInPath()
        try FileManager.default.copyItem(at: fixture, to: bundle)
        let url = bundle.appendingPathComponent("manifest.json")
        var manifest = try #require(try JSONSerialization.jsonObject(with: Data(contentsOf: url)) as? [String: Any])
        var data = try #require(manifest["data"] as? [String: Any])
        data["valid"] = nil
        manifest["data"] = data
        try JSONSerialization.data(withJSONObject: manifest).write(to: url)
        await model.refresh()
        let run = try await train()
        while model.examples.problem(of: run) == nil { try await Task.sleep(for: .milliseconds(2)) }
        #expect(model.examples.problem(of: run)?.english.hasPrefix("This run held out no text") == true)
    }
}
