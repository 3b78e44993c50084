import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPCore

@Suite(.serialized) @MainActor final class FirstRunTests: AppSuite {
    @Test func nothingIsWrongBeforeTheAppHasLooked() async throws {
        #expect(!model.library.hasLooked && model.startProblem == nil && !model.canStart)
        await model.refresh()
        #expect(model.library.hasLooked)
        #expect(
            model.startProblem
                == "Add a model first, under Models: from the Hugging Face Hub, the Files app or by AirDrop.")
    }

    @Test func whyItCannotStartIsSaid() async throws {
        try await importTied()
        #expect(model.startProblem == nil && model.canStart)
        model.form[text: .steps] = "many"
        #expect(model.startProblem == "Steps: many is not a valid number.")
        model.form[text: .steps] = "1000000"

        monitor.availableMemory = 1
        #expect(model.startProblem?.english.contains("the phone would give 0 MB") == true && !model.canStart)
        monitor.availableMemory = nil
        await model.startTraining()
        #expect(model.startProblem == "The model is in use; wait until that has ended, or stop it.")
        while model.controller.log.steps.isEmpty { try await Task.sleep(for: .milliseconds(2)) }
        #expect(model.progress?.timeWords != nil, "the time left is that of the log's steps")
        try await stop()
    }

    @Test func theLessonIsOfTheText() async throws {
        #expect(model.form.lesson == nil)
        try await importTied()
        let form = model.form
        #expect(form.lesson == "bundle learns the text in its bundle.")
        form.textKind = .file
        #expect(form.lesson == "Choose a text file that bundle is to learn, under More.")
        form.file = URL(fileURLWithPath: "/notes.txt")
        #expect(form.lesson == "bundle learns to write like notes.txt.")
        form.file = URL(fileURLWithPath: "/mails.jsonl")
        #expect(form.lesson == "bundle learns the records of mails.jsonl.")
        form.textKind = .pasted
        #expect(form.lesson?.english.contains("that you paste") == true)
        form.textKind = .choices
        #expect(form.lesson?.english.contains("which answers you like") == true)
    }

    @Test func goingOnWithARunShowsIt() async throws {
        try await importTied(steps: 1_000_000)
        model.form.settings.saveEvery = 1
        await model.startTraining()
        while model.controller.log.steps.count < 2 { try await Task.sleep(for: .milliseconds(2)) }
        try await stop()
        #expect(model.shownRun?.status == .stopped)
        (model.tab, model.showsSetup) = (.runs, true)
        await model.resume(try #require(model.library.runs.first))
        #expect(model.tab == .train && !model.showsSetup && model.controller.isRunning && model.shownRun == nil)
        try await stop()
    }

    @Test func aConversationIsDeletedOnlyWhenThePersonConfirmsIt() async throws {
        try await importTied()
        try await write(.init("Hello", maxTokens: 2, isChat: true))
        let turn = try #require(model.chat.turns.first)
        #expect(model.chat.bundleName == "bundle" && model.chat.tunedName(of: turn) == nil)
        model.askToDelete(.conversation)
        #expect(model.deletionQuestion.english == "Begin a new conversation? This one is deleted.")
        model.asksToDelete = false
        #expect(model.chat.turns.count == 1)
        model.askToDelete(.conversation)
        await model.confirmDeletion()
        #expect(model.chat.turns.isEmpty)
    }
}
