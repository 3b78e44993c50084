import Foundation
import MeSPSentences
import Testing

@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPControl
@testable import MeSPCore

@Suite(.serialized) @MainActor final class TrainingFormTests: AppSuite {
    private var form: TrainingForm { model.form }

    @Test(arguments: [true, false]) func keepsWhatTheModelKnows(_ isAsked: Bool) async throws {
        try await importTied()
        (form.settings.valBatches, form.settings.steps, form.keepsKnowledge) = (2, 2, isAsked)
        try await train()
        let log = try LogSummary(folder: #require(model.library.runs.first).url)
        #expect((log.strength != nil) == isAsked)
        #expect(log.start?.settings.maxForgetting == (isAsked ? 3 : nil))
        if let sentence = log.strength?.sentence.english { #expect(sentence.hasPrefix("The model ")) }
    }

    @Test func whatIsTypedCountsAtOnce() async throws {
        try await importTied()
        for text in ["", "2"] { form[text: .steps] = text }
        for text in ["0", "0.", "0.0", "0.01"] {
            form[text: .learningRate] = text
            #expect(form[text: .learningRate] == text, "it stays as it is typed")
        }
        try await train()
        let settings = try #require(model.library.runs.first?.log?.start?.settings)
        #expect(settings.steps == 2 && settings.learningRate == 0.01)
    }

    @Test func epochsSetTheSteps() async throws {
        try await importTied()
        form.countsEpochs = true
        form[text: .epochs] = "0"
        #expect(throws: MeSPError("Epochs must be above 0.")) { _ = try form.fit.get() }
        form[text: .epochs] = "0.1"
        try await train()
        let start = try #require(model.library.runs.first?.log?.start)
        let bundle = try ModelBundle(url: URL(fileURLWithPath: start.settings.bundle))
        let stream = try #require(try bundle.tokens("train"))
        let lengths = bundle.manifest.lengths(start.settings)
        let count = stream.sequences(lengths: lengths, packed: stream.packsExamples).count
        #expect(start.settings.steps == (count + 9) / 10 && start.settings.epochs == nil)
        form[text: .epochs] = "x"
        form.countsEpochs = false
        #expect(model.canStart)
    }

    @Test func whatIsNoNumberIsSaidAndCannotBeStarted() async throws {
        try await importTied()
        let steps = form.settings.steps
        for text in ["", "1o", "1.5", "1e400"] {
            form[text: .steps] = text
            #expect(form[text: .steps] == text && form.settings.steps == steps && !model.canStart)
            let shown = text.isEmpty ? "nothing" : text
            #expect(throws: MeSPError("Steps: \(shown) is not a valid number.")) { _ = try form.fit.get() }
        }
        form[text: .steps] = "12"
        #expect(model.canStart && form.settings.steps == 12)
        form[text: .steps] = "0"
        #expect(throws: MeSPError.self) { _ = try form.fit.get() }
    }

    @Test func theTextFollowsASettingThatChangesOtherwise() async throws {
        try await importTied()
        form.optimizer = .sgd
        #expect(form[text: .learningRate] == "0.1")
        form[text: .learningRate] = "0.100"
        #expect(form[text: .learningRate] == "0.100")
        form.optimizer = .adamw
        let width = try #require(form.bundle?.manifest).architecture.hiddenSize
        #expect(form[text: .learningRate] == String(format: "%.4g", 0.007 / Double(width).squareRoot()))
    }

    @Test(
        arguments: [
            ("1,5", "de_DE", 1.5), ("1.5", "de_DE", 1.5), ("1.5", "en_US", 1.5), (" 2e-4 ", "en_US", 2e-4),
            ("1,5", "en_US", nil),
            ("nan", "en_US", nil), ("abc", "de_DE", nil),
        ] as [(String, String, Double?)]) func numbersAsPeopleWriteThem(
            _ text: String, _ locale: String, _ value: Double?
        )
    {
        let locale = Locale(identifier: locale)
        #expect(TypedNumber.value(text, isWhole: false, locale: locale) == value)
        if let value {
            let shown = TypedNumber.text(value, isWhole: false, locale: locale)
            #expect(TypedNumber.value(shown, isWhole: false, locale: locale) == value)
        }
    }

    @Test func moreSettings() async throws {
        try await importTied()
        #expect(form.projections.contains("q") && form[trains: "q"])
        for name in form.projections where name != "v" { form[trains: name] = false }
        #expect(form.settings.projections == ["v"])
        form[trains: "v"] = false
        #expect(form.settings.projections == ["v"], "one at least")
        form[trains: "q"] = true
        #expect(form.settings.projections == ["q", "v"])
        for name in form.projections { form[trains: name] = true }
        #expect(form.settings.projections == nil)

        form.clips = true
        form[text: .clipping] = "0.5"
        #expect(form.settings.maxGradNorm == 0.5)
        form[text: .accumulation] = "2"
        (form[text: .warmup], form[text: .steps], form.settings.schedule) = ("1", "3", .cosine)
        #expect(form.startingRuns.isEmpty)
        try await train()
        let first = try #require(form.startingRuns.first)
        let settings = try #require(first.log?.start?.settings)
        #expect(settings.maxGradNorm == 0.5 && settings.gradAccumulationSteps == 2 && settings.schedule == .cosine)

        form.startingRun = first.id
        form.settings.rank += 1
        #expect(form.settingsToStart.adapters == nil, "the rank is another")
        form.settings.rank -= 1
        try await train()
        #expect(model.problem == nil && model.controller.state == .finished(.finished))
        #expect(model.controller.settings?.adapters == first.adapters?.path)
    }
}
