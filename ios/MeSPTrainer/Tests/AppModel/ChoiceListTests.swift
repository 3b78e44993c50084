import Foundation
import Testing

@testable import MeSP
@testable import MeSPAppModel
@testable import MeSPCore

@Suite(.serialized) @MainActor final class ChoiceListTests: AppSuite {
    private func talk(_ turns: Int) async throws {
        try await importTied(steps: 3)
        let form = model.form
        form.settings.seqLen = 32
        (form.settings.optimizer, form.settings.learningRate) = (.sgd, 1)
        try await train()
        for turn in 0..<turns {
            try await write(.init("Q\(turn)", maxTokens: 6, isChat: true, system: "Brief."))
        }
        #expect(model.problem == nil && model.chat.problem == nil)
    }

    /// A folder in place of the file simulates a file that cannot be read while the phone is locked.
    @Test func choicesThatCannotBeReadYetRaiseNoAlert() async throws {
        try model.choices.url.makeFolder()
        monitor.scene = .background
        await model.refresh()
        #expect(model.problem == nil, "nobody has done anything, and it is read again in front")
        monitor.scene = .active
        await model.refresh()
        #expect(model.problem?.english.contains("choices.jsonl cannot be read") == true)
    }

    @Test func theBetterAnswerIsKept() async throws {
        try await talk(2)
        let turn = try #require(model.chat.turns.last)
        await model.choose(.tuned, of: turn.id)
        let choice = try #require(model.choices.list.first)
        #expect(choice.chosen == turn.tuned.text && choice.rejected == turn.base.text)
        #expect(choice.prompt.map(\.role) == ["system", "user", "assistant", "user"])
        #expect(choice.prompt[2].content == model.chat.turns[0].tuned.text, "the conversation as that side has it")
        #expect(model.choices.contains(turn.tuned.text, to: "Q1") && !model.choices.contains(turn.base.text, to: "Q1"))

        await model.choose(.tuned, of: turn.id)
        #expect(model.choices.list.count == 1, "a second tap is no second choice")
        await model.choose(.tuned, of: turn.id, corrected: "As it should be.")
        #expect(
            model.choices.list.first?.chosen == "As it should be."
                && model.choices.list.first?.rejected == turn.tuned.text)
        await model.choose(.tuned, of: turn.id, corrected: turn.tuned.text)
        #expect(model.problem?.english.contains("are equal") == true)

        while let choice = model.choices.list.first {
            let count = model.choices.list.count
            model.askToDelete(.choice(choice))
            #expect(model.asksToDelete && model.choices.list.count == count, "it cannot be had back")
            await model.confirmDeletion()
            try #require(model.choices.list.count == count - 1)
        }
        #expect(!model.asksToDelete)
    }

    @Test func aRunLearnsTheChoices() async throws {
        try await talk(1)
        let form = model.form
        form.textKind = .choices
        await model.startTraining()
        #expect(model.problem?.english.contains("0 usable records of 0") == true)
        model.problem = nil
        for number in 0..<4 {
            try model.choices.add(Choice(prompt: [.user("Q\(number)")], chosen: "yes \(number)", rejected: "no"))
        }
        let architecture = try #require(form.bundle?.manifest).architecture
        let rate = form.settings.effectiveLearningRate(for: architecture)
        #expect(form.settings.objective == .dpo)
        try await train()
        let run = try #require(model.library.runs.first { $0.log?.start?.settings.objective == .dpo })
        #expect(run.status == .finished && run.log?.start?.settings.learningRate == rate)
        form.textKind = .bundle
        #expect(form.settings.objective == nil)
    }
}
