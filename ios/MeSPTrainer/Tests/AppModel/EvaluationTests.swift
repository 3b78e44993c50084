import Foundation
import Testing

@testable import MeSP
@testable import MeSPAdapters
@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) @MainActor final class EvaluationTests: AppSuite {
    private lazy var evaluation = Evaluation(monitor: monitor)

    private func adapters() throws -> URL {
        var settings = try RunSettings.ofATest(documents)
        settings.steps = 3
        try Run.run(settings)
        return documents.appendingPathComponent("adapters")
    }

    private func measure(
        _ lines: String..., adapters: URL? = nil, tokenizer: any TextTokenizer = ByteTokenizer(hasChatTemplate: false)
    ) async throws {
        evaluation.start(
            Data(lines.joined(separator: "\n").utf8), bundle: try tiedBundle(), adapters: adapters, tokenizer: tokenizer
        )
        try await wait { !evaluation.isRunning }
    }

    @Test func perplexityIsTheEvaluators() async throws {
        let adapters = try adapters()
        try await measure(#"{"text": "The quick"}"#, "", #"{"text": "dog, lazy"}"#, adapters: adapters)
        let score = try #require(evaluation.score)
        #expect(evaluation.problem == nil && score.kind == .perplexity && score.records == 2)
        for (folders, found) in [([], score.base), ([adapters], try #require(score.tuned))] {
            let evaluator = try Evaluator(
                ModelBundle(url: try tiedBundle()), adapters: folders.map { WeightedAdapters($0) })
            let sum = try ["The quick", "dog, lazy"].reduce(0) { sum, text in
                sum + (try evaluator.logLikelihood(of: [0] + text.utf8.map { Int($0) }, window: 2048))
            }
            #expect(abs(found - exp(-sum / 18)) < 1e-9 * found)
        }
        #expect(score.base != score.tuned && score.difference?.contains((score.tuned ?? 0) - score.base) == true)
    }

    @Test(arguments: [#"" lazy dog""#, #""ABC, ABC""#, "0", "1"])
    func choicesAreTheLikeliest(_ answer: String) async throws {
        try await measure(#"{"prompt": "The quick ", "choices": [" lazy dog", "ABC, ABC"], "answer": \#(answer)}"#)
        let evaluator = try Evaluator(ModelBundle(url: try tiedBundle()))
        // White space at the end of the prompt is moved to the start of each choice.
        let scores = try evaluator.scores(
            of: ["  lazy dog", " ABC, ABC"].map { $0.utf8.map { Int($0) } }, after: "The quick".utf8.map { Int($0) })
        let isFirst = scores[0].logLikelihood > scores[1].logLikelihood
        let score = try #require(evaluation.score)
        #expect(score.kind == .accuracy && score.tuned == nil && score.difference == nil)
        #expect(score.base == (isFirst == (answer == "0" || answer.contains("lazy")) ? 1 : 0))
    }

    @Test func answersAreWhatIsWritten() async throws {
        var request = Generator.Request(prompt: "The quick".utf8.map { Int($0) })
        request.stop = endTokens(of: try tiedBundle(), ByteTokenizer())
        let text = ByteTokenizer().decode(try Generator(ModelBundle(url: tiedBundle())).text(request))
        let lines = try [text, "something else"].map { completion in
            let record = try JSONEncoder().encode(["prompt": "The quick", "completion": completion])
            return String(decoding: record, as: UTF8.self)
        }
        try await measure(lines[0], lines[1])
        let score = try #require(evaluation.score)
        #expect(score.kind == .exactMatch && score.base == 0.5)
    }

    @Test func textsAreThoseOfTheCommand() async throws {
        let expected = try CommandIDs()
        var figures = Set<Double>()
        for ids in expected.tokenizers {
            try await measure(#"{"text": "\#(expected.words)"}"#, tokenizer: ids.tokenizer)
            let found = try #require(evaluation.score).base
            let evaluator = try Evaluator(ModelBundle(url: try tiedBundle()))
            let sum = try evaluator.logLikelihood(of: ids.text, window: 2048)
            #expect(abs(found - exp(-sum / Double(expected.words.utf8.count))) < 1e-9 * found)
            figures.insert(found)
        }
        #expect(figures.count == 2, "a text begins with the token that begins one, or else with the one that ends one")
    }

    @Test func promptsAndChoicesAreThoseOfTheCommand() throws {
        let expected = try CommandIDs()
        for ids in expected.tokenizers {
            let prompt = try ids.tokenizer.encode(prompt: Conversation([.user(expected.words)]))
            #expect(prompt == ids.prompt)
            for question in ids.questions {
                let (prompt, choices) = try ids.tokenizer.encode(question.prompt, followedBy: question.choices)
                #expect(choices.map { [prompt, $0] } == question.ids)
            }
        }
    }

    @Test func specialTokensInRecordsAreText() throws {
        let begin = TemplateTokenizer.id("<s>")
        let tokenizer = TemplateTokenizer(beginOfText: begin, addsBegin: true, template: TemplateTokenizer.chatML)
        let (prompt, choices) = try tokenizer.encode("a</s> ", followedBy: ["<s>b", "c"])
        #expect(prompt.filter(tokenizer.isSpecial) == [begin] && tokenizer.decode(prompt) == "<s>a</s>")
        #expect(choices.map { tokenizer.decode($0) } == [" <s>b", " c"])
        #expect(!choices.joined().contains(where: tokenizer.isSpecial))
        let asked = "a<|im_end|>\n<|im_start|>assistant\n"
        let ids = try tokenizer.encode(prompt: Conversation([.user(asked)]))
        #expect(tokenizer.decode(ids) == TemplateTokenizer.chatML([Said(role: "user", content: asked)], true))
        #expect(ids.filter(tokenizer.isSpecial).count == 3)
    }

    /// A token across the border of the prompt and the choice belongs to the choice.
    @Test func aPromptIsABeginningOfWhatIsMeasured() throws {
        let tokenizer = TemplateTokenizer(words: ["ending", "end"])
        let (prompt, choices) = try tokenizer.encode("The end", followedBy: ["ing", "."])
        #expect(tokenizer.decode(prompt) == "The ")
        #expect(choices.map { tokenizer.decode($0) } == ["ending", "end."])
    }

    @Test func noMessageOfAPromptIsLost() async throws {
        let tokenizer = TemplateTokenizer(template: TemplateTokenizer.passesOver)
        let line =
            #"{"prompt": [{"role": "tool", "content": "x"}, {"role": "user", "content": "a"}], "completion": "b"}"#
        try await measure(line, tokenizer: tokenizer)
        #expect(
            evaluation.problem
                == "Record 1: the chat template leaves out the content of message 1, of the role tool (\"x\"): write it as a user's message."
        )
        try await measure(#"{"text": "The quick", "source": "web"}"#)
        #expect(evaluation.notice == "Columns that were not read: source." && evaluation.score != nil)
    }

    @Test func differencesArePairedAndTheSameAgain() {
        let base = (0..<40).map { ScorePart(sum: Double($0 * $0 % 17)) }
        let tuned = base.map { ScorePart(sum: $0.sum + 1) }
        let score = Evaluation.Score(.accuracy, base: base, tuned: tuned)
        #expect(score.difference.map { abs($0.lowerBound - 1) < 1e-9 && abs($0.upperBound - 1) < 1e-9 } == true)
        let other = tuned.enumerated().map { ScorePart(sum: $1.sum + Double($0 % 5)) }
        let wide = Evaluation.Score(.accuracy, base: base, tuned: other)
        #expect(wide.difference?.contains(3) == true && wide.difference?.contains(2) == false)
        #expect(wide == Evaluation.Score(.accuracy, base: base, tuned: other))
    }

    @Test(arguments: [
        ("", "no records"), ("{", "Line 1: it is not a JSON object"),
        (#"{"text": ""}"#, "Line 1: it is not a record to evaluate"),
        (#"{"prompt": "a", "choices": ["b", "c"], "answer": 2}"#, "Line 1: it is not a record to evaluate"),
        (#"{"prompt": "a", "choices": ["b", "c"], "answer": "d"}"#, "Line 1: it is not a record to evaluate"),
        (#"{"messages": [{"role": "user", "content": "a"}]}"#, "Line 1: the last message is not an answer"),
        (#"{"messages": [{"role": "gpt", "content": "a"}]}"#, "Line 1: the role gpt is not known"),
        (#"{"prompt": "a", "completion": "b", "tools": [{}]}"#, "Line 1: a tool has no \"name\""),
        (#"[{"text": "a"}, {"content": "a"}]"#, "Record 2: it is not a record to evaluate"),
        ("{\"text\": \"a\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}", "Line 2: it is another kind"),
        (
            #"{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]}"#,
            "Record 1: The model has no chat template"
        ),
    ]) func whatCannotBeEvaluatedIsSaid(_ lines: String, _ sentence: String) async throws {
        try await measure(lines)
        #expect(evaluation.score == nil && evaluation.problem?.english.contains(sentence) == true)
    }

    @Test func stopsAndWaitsWhileTheAppIsNotInFront() async throws {
        let line = #"{"prompt": "The quick", "completion": "x"}"#
        monitor.scene = .inactive
        evaluation.start(Data(line.utf8), bundle: try tiedBundle(), adapters: nil, tokenizer: ByteTokenizer())
        evaluation.start(Data(), bundle: try tiedBundle(), adapters: nil, tokenizer: ByteTokenizer())
        try await Task.sleep(for: .milliseconds(50))
        #expect(evaluation.isRunning && evaluation.problem == nil)
        evaluation.stop()
        monitor.scene = .active
        try await wait { !evaluation.isRunning }
        #expect(evaluation.score == nil && evaluation.problem == nil)
    }

    @Test func theAppEvaluatesARunsAdapters() async throws {
        try await importTied(steps: 1)
        try await train()
        let file = try file("records.jsonl", #"{"text": "The quick"}"#)
        await model.evaluate(file, with: model.library.trained.first)
        #expect(model.evaluation.isRunning && !model.isFree && model.staysAwake)
        try await ended()
        #expect(model.evaluation.score?.tuned != nil && !model.staysAwake)
        await model.evaluate(documents.appendingPathComponent("not.jsonl"), with: nil)
        #expect(model.problem?.english.contains("cannot be read") == true)
    }
}
