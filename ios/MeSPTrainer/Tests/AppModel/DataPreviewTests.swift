import Foundation
import MeSPSentences
import Testing

@testable import MeSP
@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) @MainActor final class DataPreviewTests: AppSuite {
    private func use(_ tokenizer: any TextTokenizer) async throws {
        model = makeModel { _ in tokenizer }
        try await importTied()
    }

    private func choose(_ name: String, _ text: String) async throws {
        await model.chooseText(at: try file(name, text))
    }

    @Test func theFirstRecordIsSeenAsItIsTrained() async throws {
        try await use(TemplateTokenizer(template: TemplateTokenizer.chatML))
        model.form.settings.seqLen = 32
        let record = #"{"prompt": "a", "completion": "b\tc\nd", "source": "web"}"#
        let left = #"{"prompt": "x", "completion": "y", "train": false}"#
        try await choose("a.jsonl", "\(left)\n\(record)\n\(record)\n")
        await model.updatePreview()
        let preview = try #require(model.preview.current)
        #expect(model.preview.problem == nil)
        #expect(
            preview.spans.map(\.text).joined()
                == "<|im_start|>user⏎\na<|im_end|>⏎\n<|im_start|>assistant⏎\nb⇥c⏎\nd<|im_end|>⏎\n")
        #expect(preview.spans.filter(\.isTrained).map(\.text) == ["b⇥c⏎\nd", "<|im_end|>", "⏎\n"])
        #expect(preview.spans.filter(\.isSpecial).count == 4)
        #expect(preview.spoken.map(\.english).filter { $0.hasPrefix("In the loss: ") }.count == 3)
        #expect(preview.spoken.first == "Not in the loss: <|im_start|>")
        #expect(
            preview.notices == [
                "Records that ask not to be trained are left out: 1.", "Columns that were not read: source.",
            ])

        model.form.answersOnly = false
        #expect(model.preview.current == nil)
        await model.updatePreview()
        #expect(model.preview.current?.spans.dropFirst().allSatisfy { $0.isTrained } == true)
    }

    @Test func aRecordThatCannotBeTrainedIsSaidBeforeTheStart() async throws {
        try await use(TemplateTokenizer(template: TemplateTokenizer.chatML))
        try await choose("a.jsonl", #"{"messages": [{"role": "gpt", "content": "a"}]}"#)
        await model.updatePreview()
        #expect(model.preview.current == nil)
        #expect(model.preview.problem == "Line 1 of a.jsonl: the role gpt is not known; write assistant.")
        try await choose("b.jsonl", #"{"prompt": "a", "completion": "b"}"#)
        await model.updatePreview()
        #expect(model.preview.current != nil && model.preview.problem == nil)
        try await choose("c.csv", "a,b")
        #expect(model.problem?.english.hasPrefix("c.csv is a kind of file that is not read") == true)
        #expect(model.form.file?.lastPathComponent == "b.jsonl", "the last stays")
    }

    @Test func theBundlesOwnDataAndPastedTextAreSeenToo() async throws {
        try await importTied()
        await model.updatePreview()
        let bundle = try ModelBundle(url: try #require(model.form.bundle).url)
        let first = try #require(try bundle.tokens("train")?.sequences(lengths: [model.form.settings.seqLen])[0])
        let text = ByteTokenizer().decode(first.tokens.map { Int($0) })
        let spans = try #require(model.preview.current).spans
        let seen = spans.map(\.text).joined().replacing("⏎", with: "").replacing("⇥", with: "\t").unicodeScalars.map {
            (0x2400..<0x2420).contains($0.value) ? $0.value - 0x2400 : $0.value
        }
        #expect(seen == text.unicodeScalars.map(\.value))
        #expect(spans.dropFirst().allSatisfy { $0.isTrained }, "all but the first token, which nothing predicts")

        (model.form.textKind, model.form.pasted) = (.pasted, "")
        await model.preview.read(pause: .zero)
        #expect(model.preview.current == nil && model.preview.problem == nil, "there is nothing yet")
        model.form.pasted = "Too short."
        await model.preview.read(pause: .zero)
        #expect(model.preview.problem?.english.hasPrefix("The text has 11 tokens, too few") == true)
        model.form.pasted = String(repeating: "A line of text.\n", count: 200)
        await model.preview.read(pause: .zero)
        #expect(model.preview.current?.spans.first?.text == "A" && model.preview.problem == nil)
    }

    @Test func aTokenizerThatCannotBeReadKeepsNoBundleFromBeingTrained() async throws {
        model = makeModel { _ in throw MeSPError("The tokenizer is not there.") }
        try await importTied()
        await model.updatePreview()
        #expect(model.preview.current == nil && model.preview.problem == nil)
        (model.form.textKind, model.form.pasted) = (.pasted, "A text.")
        await model.updatePreview()
        #expect(model.preview.problem == "The tokenizer is not there.")
    }

    @Test func anEarlierLookShowsNothing() async throws {
        try await use(TemplateTokenizer(template: TemplateTokenizer.chatML))
        (model.form.textKind, model.form.pasted) = (.pasted, String(repeating: "First line.\n", count: 200))
        let look = Task { await model.preview.read(pause: .milliseconds(200)) }
        await Task.yield()
        model.form.pasted = String(repeating: "Second line.\n", count: 200)
        look.cancel()
        await model.preview.read(pause: .zero)
        await look.value
        #expect(model.preview.current?.spans.map(\.text).joined().hasPrefix("Second") == true)
    }

    @Test func aRunSaysWhatItsTextLost() async throws {
        try await importTied()
        let record = #"{"prompt": "a", "completion": "b", "source": "web"}"#
        try await choose("a.jsonl", "\(record)\n\(record)\n")
        model.form.settings.steps = 1
        try await train()
        #expect(
            model.textNotices.map(\.english) == [
                "The chat template writes no token after an answer, so the token that ends a text is added there.",
                "Columns that were not read: source.",
            ])
    }
}
