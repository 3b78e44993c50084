import Foundation
import MeSPFiles
import Testing

@testable import MeSP
@testable import MeSPBundle
@testable import MeSPCore

private struct WholeTemplate: WrappedTokenizer {
    var goesOn = false
    /// Whether the template writes no tokens after messages, and reads no variables.
    var isEndless = false
    let wrapped: any TextTokenizer = TemplateTokenizer()
    let hasChatTemplate = true

    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
        options: [String: any Sendable]
    ) throws -> [Int] {
        let given = try messages.map { try JSONValue(template: $0).fields ?? [:] }
        var text = try tools.map { "[tools \(try $0.map { try JSONValue(template: $0).json }.joined())]" } ?? ""
        if !isEndless, let mode = try options["mode"].map({ try JSONValue(template: $0).json }) {
            text += "[mode \(mode)]"
        }
        func header(_ index: Int) -> String {
            let role = given.indices.contains(index) ? given[index]["role"]?.string ?? "" : "assistant"
            if isEndless { return role == "user" ? "<|user|>" : "" }
            let isInTurn = goesOn && index > 0 && role != "user" && given[index - 1]["role"]?.string != "user"
            return isInTurn ? "" : "<|im_start|>\(role)\n"
        }
        for (index, message) in given.enumerated() {
            text += header(index) + (message["content"]?.string ?? "")
            if let calls = message["tool_calls"] { text += "[calls \(calls.json)]" }
            let next = given.indices.contains(index + 1) ? given[index + 1]["role"]?.string : nil
            let isOpen = goesOn && (message["tool_calls"] != nil || message["role"] == .string("tool"))
            if isEndless {
                text += message["role"] == .string("assistant") ? "" : "<|im_start|>"
            } else if !(isOpen && next != "user") {
                text += "<|im_end|>\n"
            }
        }
        return encode(text + (addsGenerationPrompt && !isEndless ? header(given.count) : ""), addsSpecialTokens: false)
    }
}

@Suite struct RecordsTests {
    private let folder = newFolder()

    private struct Found {
        var text: String
        var trained: [String]
        var notices: [String]
    }

    private func read(
        _ records: String..., tokenizer: any TextTokenizer = TemplateTokenizer(template: TemplateTokenizer.chatML)
    ) throws -> Found {
        let file = folder.appendingPathComponent("a.jsonl")
        try file.write(records.joined(separator: "\n"))
        let (example, notices) = try TextData(tokenizer: tokenizer, length: 1024).first(of: .file(file))
        let ids = example.tokens.map { Int($0) }
        let counted = Set(example.counted.map { $0 + 1 })
        var spans = [[Int]]()
        for index in ids.indices where counted.contains(index) {
            if counted.contains(index - 1) {
                spans[spans.count - 1].append(ids[index])
            } else {
                spans.append([ids[index]])
            }
        }
        return Found(
            text: tokenizer.decode(ids), trained: spans.map(tokenizer.decode), notices: notices.sentences.map(\.english)
        )
    }

    private func refusal(_ records: String..., tokenizer: any TextTokenizer = WholeTemplate()) -> String {
        message { _ = try read(records.joined(separator: "\n"), tokenizer: tokenizer) }
    }

    private func messages(_ said: String, _ others: String = "") -> String { "{\"messages\": [\(said)]\(others)}" }

    private let asked = #"{"role": "user", "content": "Time?"}"#
    private let called =
        #"{"role": "assistant", "tool_calls": [{"name": "clock", "arguments": {"zone": null, "l": [1, null], "o": {"a": null}}}]}"#
    private let told = #"{"role": "tool", "content": "noon"}"#
    private let answer = #"{"role": "assistant", "content": "Noon."}"#

    @Test(arguments: [
        (#"{"instruction": "Translate.", "input": "cat", "output": "Katze."}"#, "Translate.\n\ncat", "Katze."),
        (#"{"instruction": "Sing.", "input": " ", "output": "La."}"#, "Sing.", "La."),
        (#"{"instruction": "Sing.", "input": null, "output": "La."}"#, "Sing.", "La."),
        (#"{"instruction": "Who?", "context": "Tom.", "response": "Tom", "category": "qa"}"#, "Who?\n\nTom.", "Tom"),
        (#"{"instruction": "Who?", "response": "Tom"}"#, "Who?", "Tom"),
        (#"{"instruction": "Who?", "output": "Tom", "text": "Do: Who?\nAnswer: Tom"}"#, "Who?", "Tom"),
    ]) func instructionsAreRead(_ record: String, _ prompt: String, _ answer: String) throws {
        let found = try read(record)
        #expect(found.text == "<|im_start|>user\n\(prompt)<|im_end|>\n<|im_start|>assistant\n\(answer)<|im_end|>\n")
        #expect(found.trained == ["\(answer)<|im_end|>\n"])
        let joined = try read(record, tokenizer: TemplateTokenizer())
        #expect(joined.text == "\(prompt)\(answer)<|endoftext|>" && joined.trained == ["\(answer)<|endoftext|>"])
    }

    @Test func columnsThatNothingReadsAreRefusedTogether() {
        let record = #"{"prompt": "a", "completion": "b", "context": "c"}"#
        #expect(
            refusal(record)
                == "Line 1 of a.jsonl: it has \"context\", which nothing reads: write its text into what is read, or remove it."
        )
        #expect(
            refusal(#"{"prompt": "a", "completion": "b", "input": "c", "hint": [1], "id": 1}"#, record)
                == "Line 1 of a.jsonl and records after it have \"context\", \"hint\", \"input\", which nothing reads: write their text into what is read, or remove them."
        )
        let keys = messages(#"{"role": "user", "content": "a", "mood": "b", "rank": 1}, \#(answer)"#, ", \"hint\": 0")
        #expect(refusal(keys).contains("it has \"hint\", \"mood\", which nothing reads: write their text"))
        let parts = #"{"role": "user", "content": [{"type": "text", "text": "a", "caption": "b", "annotations": []}]}"#
        #expect(refusal(messages("\(parts), \(answer)")).contains("it has \"caption\", which nothing reads"))
        #expect(refusal(#"{"text": "a", "label": 1}"#).contains("it has \"label\", which nothing reads"))
    }

    @Test func columnsThatAreNeverContentAreSaid() throws {
        let found = try read(
            #"{"prompt": "a", "completion": "b", "ID": 7, "source": "web", "created-at": "now", "notes": "", "x": null}"#
        )
        #expect(found.notices == ["Columns that were not read: ID, created-at, source."])
    }

    @Test func aNullWhereTextIsNeededIsSaid() {
        #expect(
            refusal(#"{"prompt": "a", "completion": null}"#)
                == "Line 1 of a.jsonl: it has a null \"completion\": write it, or leave the record out.")
        #expect(
            refusal("[\(asked), \(answer)]") == "Line 1 of a.jsonl: it is not a JSON object; write the record as one.")
    }

    @Test func nullsAreKept() throws {
        let tools =
            #"[{"type": "function", "function": {"name": "clock", "parameters": {"zone": {"default": null, "enum": ["UTC", null]}}}}]"#
        let record = messages("\(asked), \(called), \(told), \(answer)", ", \"tools\": \(tools)")
        let found = try read(record, tokenizer: WholeTemplate())
        #expect(found.text.contains(#""arguments": {"l": [1, null], "o": {"a": null}, "zone": null}"#))
        #expect(found.text.contains(#"{"default": null, "enum": ["UTC", null]}"#))
        let typed = try JSONDecoder().decode(Conversation.self, from: Data(record.utf8))
        let reread = try TextData(tokenizer: WholeTemplate(), length: 1024).first(of: .conversations([typed])).example
        #expect(WholeTemplate().decode(reread.tokens.map { Int($0) }) == found.text)
    }

    @Test func whatATemplateLeavesOutIsRefused() {
        let system = #"{"role": "system", "content": "Be terse."}"#
        let passes = TemplateTokenizer(template: TemplateTokenizer.passesOver)
        #expect(
            refusal(messages("\(system), \(asked), \(answer)"), tokenizer: passes)
                == "Line 1 of a.jsonl: the chat template leaves out the content of message 1, of the role system (\"Be terse.\"): write it at the beginning of the user's message."
        )
        #expect(
            refusal(messages(#"{"role": "user", "name": "Tom", "content": "a"}, \#(answer)"#)).contains(
                "it has \"name\", which nothing reads"))
        let chatML = TemplateTokenizer(template: TemplateTokenizer.chatML)
        #expect(
            refusal(messages("\(asked), \(called), \(told), \(answer)"), tokenizer: chatML).contains(
                "leaves out the tool call of message 2, of the role assistant (\"clock\")"))
    }

    private func asTrained(_ encoding: String) throws -> any TextTokenizer {
        let bundle = newFolder()
        try bundle.appendingPathComponent("manifest.json").write("{\"encoding\": \(encoding)}")
        return WholeTemplate().asTrained(bundle)
    }

    @Test func aBundleIsAskedAsItWasTrained() throws {
        let tokenizer = try asTrained(#"{"chat_template_kwargs": {"mode": "fast"}}"#)
        let prompt = try tokenizer.encode(prompt: Conversation([.user("a")]))
        #expect(tokenizer.decode(prompt).hasPrefix("[mode \"fast\"]"))
        let record = { (options: String) in #"{"prompt": "a", "completion": "b", "chat_template_kwargs": \#(options)}"#
        }
        #expect(try read(record(#"{"mode": "fast"}"#), tokenizer: tokenizer).text.hasPrefix("[mode \"fast\"]"))
        #expect(try read(record("null"), tokenizer: tokenizer).text.hasPrefix("[mode \"fast\"]"))
        #expect(
            refusal(record(#"{"mode": null}"#), tokenizer: tokenizer).hasSuffix(
                "it has \"chat_template_kwargs\" {\"mode\": null}, and the model is asked with {\"mode\": \"fast\"}: remove them, or export the bundle with them."
            ))
        #expect(refusal(record("[]"), tokenizer: tokenizer).contains("that are not an object"))
    }

    @Test func textsAreJoinedAsInTheBundlesData() throws {
        let tokenizer = try asTrained(#"{"chat": false}"#)
        #expect(try read(#"{"prompt": "a", "completion": "b"}"#, tokenizer: tokenizer).text.hasPrefix("ab"))
        #expect(tokenizer.decode(try tokenizer.encode(prompt: Conversation([.user("a")]))) == "a")
        let chat = try read(messages("\(asked), \(answer)"), tokenizer: tokenizer).text
        #expect(try chat == read(messages("\(asked), \(answer)"), tokenizer: WholeTemplate()).text)
        let asked = Conversation([.system("s"), .user("a")])
        #expect(try tokenizer.encode(prompt: asked) == WholeTemplate().encode(prompt: asked))
    }

    @Test func anEndIsPutOnlyWhereATurnEnds() throws {
        let record = messages("\(asked), \(called), \(told), \(answer)")
        let inTurn = try read(record, tokenizer: WholeTemplate(goesOn: true))
        #expect(!inTurn.text.contains("<|endoftext|>") && inTurn.trained.last == "Noon.<|im_end|>\n")
        #expect(inTurn.trained.count == 2 && inTurn.trained[0].hasPrefix("[calls "))
        let unanswered = try read(messages("\(asked), \(called), \(told)"), tokenizer: WholeTemplate(goesOn: true))
        #expect(!unanswered.text.contains("<|endoftext|>"))
        let endless = try read(record, tokenizer: WholeTemplate(isEndless: true))
        #expect(endless.trained.allSatisfy { $0.hasSuffix("<|endoftext|>") } && endless.trained.count == 2)
    }

    @Test func whatIsInvisibleIsShown() throws {
        let record = #"{"prompt": "a", "completion": "one\r\ntwo\u200bthree\u00a0\t\u2028"}"#
        let found = try read(record)
        #expect(found.text.contains("one\r\ntwo\u{200B}three\u{A0}\t\u{2028}"), "JSON's text is trained as it stands")
        let chatML = TemplateTokenizer(template: TemplateTokenizer.chatML)
        let ids = chatML.encode(found.text, addsSpecialTokens: false).map { Int32($0) }
        let preview = TrainingPreview(Example(tokens: ids, counted: [ids.count - 2]), tokenizer: chatML)
        #expect(preview.spans.map(\.text).joined().contains("one␍⏎\ntwo\\u{200B}three\\u{A0}⇥\\u{2028}"))
    }
}
