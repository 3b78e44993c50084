import Foundation
import Testing

@testable import MeSP
@testable import MeSPBundle
@testable import MeSPCore

@Suite struct ConversationTests {
    private let folder = newFolder()
    private var target: URL { folder.appendingPathComponent("tokens") }
    private var file: URL { folder.appendingPathComponent("a.jsonl") }

    private struct Trained {
        var text: String
        var spans: [String]
        var specials = [Int]()
    }

    private func trained(
        _ name: String = "a.jsonl", record: String, _ tokenizer: TemplateTokenizer, answersOnly: Bool = true,
        length: Int = 512
    ) throws -> Trained {
        let file = folder.appendingPathComponent(name)
        try file.write("\(record)\n\(record)\n")
        try TextData(tokenizer: tokenizer, length: length, answersOnly: answersOnly).write(.file(file), to: target)
        return try read(tokenizer)
    }

    private func read(_ tokenizer: TemplateTokenizer) throws -> Trained {
        let data = try Data(contentsOf: target.appendingPathComponent("train.bin"))
        let mask = try? Data(contentsOf: target.appendingPathComponent("train.mask.bin"))
        let ids = data.withUnsafeBytes { bytes in
            (0..<data.count / 4).map { Int(bytes.loadUnaligned(fromByteOffset: $0 * 4, as: UInt32.self)) }
        }
        var (spans, span) = ([String](), [Int]())
        for (index, id) in ids.enumerated() {
            if mask?[index] ?? 1 == 1 {
                span.append(id)
            } else if !span.isEmpty {
                spans.append(tokenizer.decode(span))
                span = []
            }
        }
        return Trained(
            text: tokenizer.decode(ids), spans: spans + (span.isEmpty ? [] : [tokenizer.decode(span)]),
            specials: ids.filter { tokenizer.isSpecial($0) })
    }

    private func notices(_ tokenizer: TemplateTokenizer) throws -> [String] {
        try TextData(tokenizer: tokenizer, length: 64).first(of: .file(file)).notices.sentences.map(\.english)
    }

    private func messages(_ turns: (String, String)...) throws -> String { try messages(turns) }

    private func messages(_ turns: [(String, String)]) throws -> String {
        let list = turns.map { ["role": $0.0, "content": $0.1] }
        return String(decoding: try JSONSerialization.data(withJSONObject: ["messages": list]), as: UTF8.self)
    }

    private func refusal(
        _ record: String, _ tokenizer: TemplateTokenizer = TemplateTokenizer(template: TemplateTokenizer.chatML)
    ) -> String {
        return message { _ = try trained(record: record, tokenizer) }
    }

    private let chatML = Self.chatML
    private static let chatML = TemplateTokenizer(template: TemplateTokenizer.chatML)
    private static let asksForThoughts = TemplateTokenizer(template: TemplateTokenizer.asksForThoughts)
    private let asked = #"{"role": "user", "content": "Why?"}"#

    typealias Turns = [(role: String, content: String)]

    @Test(
        arguments: [
            (
                chatML, [("system", "s"), ("user", "a"), ("assistant", "b\n"), ("user", "c"), ("assistant", "é 🙂")],
                ["b\n<|im_end|>\n", "é 🙂<|im_end|>\n"]
            ),
            (
                chatML, [("assistant", "Hi"), ("user", "a"), ("assistant", "b")],
                ["Hi<|im_end|>\n", "b<|im_end|>\n"]
            ),
            (
                TemplateTokenizer(template: TemplateTokenizer.phi),
                [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
                ["b</s>\n", "d</s>\n<|endoftext|>"]
            ),
            (
                TemplateTokenizer(template: TemplateTokenizer.systemIsLast),
                [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
                [" b</s>", " d</s>"]
            ),
            (
                TemplateTokenizer(words: ["\nSo"], template: TemplateTokenizer.chatML),
                [("user", "a"), ("assistant", "So.")], ["\nSo.<|im_end|>\n"]
            ),
            (
                TemplateTokenizer(words: ["\nMk"], template: TemplateTokenizer.chatML),
                [("user", "a"), ("assistant", "So.")], ["So.<|im_end|>\n"]
            ),
            (asksForThoughts, [("user", "a"), ("assistant", "<b>!")], ["<b>!<|im_end|>\n"]),
            (
                asksForThoughts, [("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb")],
                ["hm\n</think>\n\nb<|im_end|>\n"]
            ),
        ] as [(TemplateTokenizer, Turns, [String])])
    func anAnswerIsItsTextAndWhatEndsIt(_ tokenizer: TemplateTokenizer, _ turns: Turns, _ spans: [String]) throws {
        #expect(try trained(record: messages(turns), tokenizer).spans == spans)
    }

    @Test func whereTheTemplateEndsNoAnswerTheTokenThatEndsATextDoes() throws {
        let record = try messages(("user", "a"), ("assistant", " b "), ("user", "c"), ("assistant", "d"))
        var tokenizer = TemplateTokenizer(template: TemplateTokenizer.endless)
        let found = try trained(record: record, tokenizer)
        #expect(found.spans == ["b<|endoftext|>", "d<|endoftext|>"])
        #expect(found.text == "<User>a<AI>b<|endoftext|><User>c<AI>d<|endoftext|>")
        #expect(try notices(tokenizer).contains { $0.contains("writes no token after an answer") })
        tokenizer.endOfText = nil
        #expect(
            refusal(record, tokenizer).hasPrefix("Line 1 of a.jsonl: the chat template writes no token after an answer")
        )
    }

    @Test func thoughtsThatTheTemplateLeavesOutAreSaid() throws {
        let tokenizer = Self.asksForThoughts
        let two = try messages(
            ("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("user", "c"), ("assistant", "d"))
        #expect(try trained(record: two, tokenizer).spans == ["b<|im_end|>\n", "d<|im_end|>\n"])
        #expect(try notices(tokenizer).contains { $0.contains("leaves out thoughts") })
        let none = two.replacing("hm", with: "")
        #expect(try trained(record: none, tokenizer).spans == ["b<|im_end|>\n", "d<|im_end|>\n"])
        #expect(try notices(tokenizer).isEmpty)
    }

    @Test func aTokenOfAnAnswerAndTheNextTextIsRefused() throws {
        let tokenizer = TemplateTokenizer(words: ["b<Us"], template: TemplateTokenizer.endless)
        let record = try messages(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
        #expect(
            refusal(record, tokenizer).contains("one token holds the end of an answer and the start of the next text"))
    }

    @Test func thoughtsOfTheLastAnswerAreNotLost() throws {
        let tokenizer = TemplateTokenizer { said, opens in
            TemplateTokenizer.chatML(
                said.map { Said(role: $0.role, content: $0.content.components(separatedBy: "</think>").last ?? "") },
                opens)
        }
        let record = try messages(("user", "a"), ("assistant", "<think>hm</think>b"))
        #expect(
            refusal(record, tokenizer).contains("leaves out the reasoning of message 2, of the role assistant (\"hm\")")
        )
    }

    @Test func anAnswerIsAskedForAsItIsTrained() throws {
        let tokenizer = TemplateTokenizer { said, opens in
            TemplateTokenizer.chatML(
                said.enumerated().map { index, each in
                    let isLast = index + 1 == said.count && each.role == "assistant"
                    return Said(role: each.role, content: (isLast ? "!" : "") + each.content)
                }, opens)
        }
        let (b, c) = (#"{"role": "assistant", "content": "b"}"#, #"{"role": "assistant", "content": "c"}"#)
        #expect(
            refusal(#"{"prompt": [\#(asked), \#(b)], "completion": [\#(c)]}"#, tokenizer).contains(
                "the prompt for the answer in message 3 is not the beginning of the conversation in the chat template"))
    }

    @Test func noOtherMessageIsInAnAnswer() throws {
        let tokenizer = TemplateTokenizer { said, opens in
            said.enumerated().map { index, each in
                let question = index > 0 && each.role == "assistant" ? " to \(said[index - 1].content)" : ""
                return "<|im_start|>\(each.role)\n\(each.content)\(question)<|im_end|>\n"
            }.joined() + (opens ? "<|im_start|>assistant\n" : "")
        }
        #expect(
            refusal(try messages(("user", "a"), ("assistant", "b")), tokenizer).contains(
                "does not tell where the answer in message 2 begins and ends"))
    }

    @Test func nothingVanishes() throws {
        let record = try messages(("developer", "Be brief."), ("user", "a"), ("assistant", "b"))
        let passes = TemplateTokenizer(template: TemplateTokenizer.passesOver)
        #expect(
            refusal(record, passes)
                == "Line 1 of a.jsonl: the chat template leaves out the content of message 1, of the role developer (\"Be brief.\"): write it as a system message or at the beginning of the user's. In all, 2 records are refused."
        )
        let all = message { _ = try trained(record: record, passes, answersOnly: false) }
        #expect(all.contains("leaves out the content of message 1, of the role developer"))
        let capitals = TemplateTokenizer(template: TemplateTokenizer.inCapitals)
        #expect(refusal(record, capitals).contains("Line 1 of a.jsonl: the chat template"))
    }

    @Test func specialTokensInTextsAreText() throws {
        let (asked, answer) = ("a<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>", "b<|im_end|> c<s>")
        let record = try messages(("system", "<|im_start|>"), ("user", asked), ("assistant", answer))
        let found = try trained(record: record, chatML)
        #expect(found.spans == ["\(answer)<|im_end|>\n"])
        #expect(
            found.text == "<|im_start|>system\n<|im_start|><|im_end|>\n<|im_start|>user\n\(asked)<|im_end|>\n"
                + "<|im_start|>assistant\n\(answer)<|im_end|>\n")
        let plain = try trained(record: try messages(("system", "a"), ("user", "b"), ("assistant", "c")), chatML)
        #expect(found.specials == plain.specials && found.specials.count == 6)
        #expect(try TextData(tokenizer: chatML, length: 512).write(.file(file), to: target).sentences.isEmpty)
        let pair = #"{"prompt": "a<|im_end|>", "completion": "b<|endoftext|>"}"#
        let joined = try trained(record: pair, TemplateTokenizer())
        #expect(joined.text == "a<|im_end|>b<|endoftext|><|endoftext|>" && joined.specials.count == 1)
        #expect(joined.spans == ["b<|endoftext|><|endoftext|>"])
        let text = "{\"text\": \"0123456789<|im_end|>0123456789<|endoftext|>\"}"
        #expect(try trained(record: text, TemplateTokenizer(), length: 16).specials == joined.specials)
        try file.write("\(text)\n\(text)\n")
        let told = try TextData(tokenizer: chatML, length: 16).write(.file(file), to: target)
        #expect(told.sentences == ["Special tokens in your texts are trained as ordinary text."])
    }

    @Test func choicesAreAnswersToo() throws {
        let prompt = [Conversation.Message.user("a")]
        let choices = try (0..<2).map { _ in try Choice(prompt: prompt, chosen: "<b", rejected: "c") }
        let tokenizer = TemplateTokenizer(template: TemplateTokenizer.asksForThoughts)
        let data = TextData(tokenizer: tokenizer, length: 64)
        try data.write(.choices(choices), to: target)
        #expect(try read(tokenizer).spans == ["<b<|im_end|>\n", "c<|im_end|>\n"])
        let system = [Conversation.Message.system("s")] + prompt
        let lost = try (0..<2).map { _ in try Choice(prompt: system, chosen: "b", rejected: "c") }
        let passes = TextData(tokenizer: TemplateTokenizer(template: TemplateTokenizer.passesOver), length: 64)
        #expect(
            message { try passes.write(.choices(lost), to: target) }.hasPrefix(
                "Choice 1: the chat template leaves out the content of message 1, of the role system"))
    }

    @Test func whatATemplateLeavesOutOfToolsIsRefused() throws {
        let call = #"{"role": "assistant", "tool_calls": [{"name": "clock", "arguments": {"zone": "UTC"}}]}"#
        #expect(
            refusal(#"{"messages": [\#(asked), \#(call)]}"#).hasPrefix(
                "Line 1 of a.jsonl: the chat template leaves out the tool call of message 2, of the role assistant (\"clock\")"
            ))
        let tools = #"[{"type": "function", "function": {"name": "clock"}}]"#
        let answer = #"{"role": "assistant", "content": "Noon."}"#
        #expect(
            refusal(#"{"messages": [\#(asked), \#(answer)], "tools": \#(tools)}"#).hasPrefix(
                "Line 1 of a.jsonl: the chat template leaves out the tools, such as \"clock\""))
        let typed = Conversation([.user("a"), .assistant("", toolCalls: [Conversation.ToolCall(name: "clock")])])
        let data = TextData(tokenizer: chatML, length: 64)
        #expect(
            message { _ = try data.first(of: .conversations([typed])) }.hasPrefix(
                "Conversation 1: the chat template leaves out the tool call of message 2, of the role assistant (\"clock\")"
            ))
        let broken = Conversation([.user("a"), .assistant("b")], tools: ["{"])
        #expect(
            message { _ = try data.first(of: .conversations([broken])) }
                == "Conversation 1: a tool is not a JSON object; write each with a \"name\"."
        )
    }

    @Test func typedConversationsAreRecords() throws {
        var untrained = Conversation.Message.assistant("b")
        untrained.isTrained = false
        let conversation = Conversation([.system("s"), .user("a"), untrained, .user("c"), .assistant("d")])
        let data = TextData(tokenizer: chatML, length: 64)
        try data.write(.conversations([conversation, conversation]), to: target)
        #expect(try read(chatML).spans == ["d<|im_end|>\n"])
        try JSONEncoder().encode(conversation).write(to: file)
        #expect(try Conversation.read(contentsOf: file) == [conversation])
        var named = Conversation.Message.tool("noon")
        (named.name, named.toolCallID) = ("clock", "1")
        let call = Conversation.ToolCall(name: "clock", arguments: #"{"a": 1.0, "b": [1, null, "é"]}"#, id: "1")
        let tools = Conversation(
            [.user("a"), .assistant("", toolCalls: [call]), named], tools: [#"{"name": "clock"}"#])
        let json = try JSONEncoder().encode(tools)
        #expect(try JSONDecoder().decode(Conversation.self, from: json) == tools)
        try file.write(#"{"text": "a"}"#)
        #expect(
            message { _ = try Conversation.read(contentsOf: file) }.hasPrefix("a.jsonl has texts, and no conversations")
        )
        #expect(
            message { try data.write(.conversations([]), to: target) }.hasPrefix("The data has 0 usable records of 0"))
    }

    @Test func aPromptsTokensAreThoseOfItAlone() throws {
        let record = #"{"prompt": "The end", "completion": "ing."}"#
        let split = TemplateTokenizer(words: ["ending", "end"])
        #expect(try trained(record: record, split).spans == ["ing.<|endoftext|>"])
        // If the tokenizer adds a space before a text, the prompt and the completion are tokenized together. The token across their border is in the
        // loss.
        let joined = TemplateTokenizer(words: ["ending", "end"], addsSpace: true)
        let found = try trained(record: record, joined)
        #expect(found.text == "The ending.<|endoftext|>" && found.spans == ["ending.<|endoftext|>"])
    }

    @Test func aTextIsBegunAndEndedOnce() throws {
        let tokenizer = TemplateTokenizer(beginOfText: TemplateTokenizer.id("<s>"), addsBegin: true)
        let line = "0123456789 0123456789 0123456789"
        let whole = try trained(record: "{\"text\": \"\(line)\"}", tokenizer, length: 16)
        #expect(whole.text.hasPrefix("<s>0123") && !whole.text.contains("<|endoftext|><|endoftext|>"))
        let file = folder.appendingPathComponent("a.txt")
        try file.write("\(line) \(line)")
        try TextData(tokenizer: tokenizer, length: 16).write(.file(file), to: target)
        #expect(try read(tokenizer).text.hasPrefix("<s>0123"))
        let answer = try trained(record: #"{"prompt": "a", "completion": "b"}"#, tokenizer)
        #expect(answer.text == "<s>ab<|endoftext|>")
        let endless = TemplateTokenizer(endOfText: nil)
        #expect(refusal(#"{"prompt": "a", "completion": "b"}"#, endless).contains("no token that ends a text"))
    }

    @Test func partsOfTextAreOneText() throws {
        let parts = #"[{"type": "text", "text": "b"}, "c", {"type": "output_text", "text": "d"}]"#
        let record = #"{"messages": [\#(asked), {"role": "assistant", "content": \#(parts)}]}"#
        #expect(try trained(record: record, chatML).spans == ["bcd<|im_end|>\n"])
        let sound = parts.replacing("output_text", with: "input_audio")
        #expect(refusal(record.replacing(parts, with: sound)).contains("a part of the type input_audio"))
    }

    @Test(arguments: ["\"weight\": 0", "\"train\": false", "\"training\": false", "\"loss\": 0", "\"masked\": true"])
    func anAnswerMayAskNotToBeTrained(_ key: String) throws {
        let first = #"{"role": "assistant", "content": "b", \#(key)}"#
        let record =
            #"{"messages": [\#(asked), \#(first), \#(asked), {"role": "assistant", "content": "d", "weight": 1}]}"#
        #expect(try trained(record: record, chatML).spans == ["d<|im_end|>\n"])
        let all = try trained(record: record, chatML, answersOnly: false)
        #expect(all.spans.joined() == all.text.replacing("b<|im_end|>\n", with: ""))
        let answer = #"{"prompt": "a", "completion": "b"}"#
        let file = folder.appendingPathComponent("b.jsonl")
        let left = #"{"prompt": "x", "completion": "y", \#(key)}"#
        try file.write("\(left)\n\(answer)\n\(answer)")
        let notices = try TextData(tokenizer: chatML, length: 64).write(.file(file), to: target)
        #expect(try read(chatML).spans == ["b<|im_end|>\n"])
        #expect(notices.sentences.map(\.english) == ["Records that ask not to be trained are left out: 1."])
        #expect(refusal(record.replacing(key, with: "\"weight\": 0.5")).contains("\"weight\" is neither 1 nor 0"))
    }

    @Test(arguments: [
        (#"[{"role": "user", "text": "a"}]"#, "a message has no \"content\" but \"role\", \"text\"; write its text"),
        (#"[{"from": "human", "value": "a"}]"#, "a message has no \"role\" but \"from\", \"value\""),
        (#"[{"role": "model", "content": "a"}]"#, "the role model is not known; write assistant"),
        (#"[{"role": "human", "content": "a"}]"#, "the role human is not known; write user"),
        (#"[{"role": "User", "content": "a"}]"#, "the role User is not known; write user"),
        (#"[{"role": "narrator", "content": "a"}]"#, "the role narrator is not known; write system, user"),
        (#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]"#, "an answer is empty"),
        (#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]"#, "an answer is empty"),
        (#"[{"role": "user", "content": null}]"#, "a message has no \"content\" but \"role\""),
        (#"[{"role": "user", "content": "a", "reasoning": "b"}]"#, "it has \"reasoning\", which nothing reads"),
        (#"[{"role": "assistant", "content": "", "tool_calls": [{}]}]"#, "a tool call has no \"name\""),
        (#"[{"role": "assistant", "tool_calls": 1}]"#, "\"tool_calls\" is not a list"),
        (
            #"[{"role": "assistant", "tool_calls": [{"name": "x", "arguments": "[]"}]}]"#,
            "the arguments of a tool call are not a JSON object"
        ),
        (
            #"[{"role": "assistant", "tool_calls": [{"name": "x", "arguments": {"a": 1e30}}]}]"#,
            "a tool, or the arguments of a call, have a number that is too large"
        ),
        (
            #"[{"role": "assistant", "tool_calls": [{"function": {"name": "x"}, "name": "y"}]}]"#,
            "it has \"name\", which nothing reads"
        ),
        (
            #"[{"role": "assistant", "content": "a", "function_call": {"name": "x"}}]"#,
            "a message has \"function_call\""
        ),
        (#"[{"role": "tool", "content": "a", "tool_call_id": 7}]"#, "\"tool_call_id\" is not a text"),
        (#"[{"role": "user", "content": "a", "train": true}]"#, "\"train\" asks to train a message of user"),
        (#"[{"role": "user", "content": "a"}]"#, "it has no assistant message"),
        (#""a""#, "\"messages\" is not a list of messages"),
    ]) func whatWouldBeLostIsRefused(_ messages: String, _ reason: String) {
        let found = refusal("{\"messages\": \(messages)}")
        #expect(found.hasPrefix("Line 1 of a.jsonl: \(reason)"), "\(found)")
    }

    @Test(arguments: [
        (#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#, "it has \"chosen\", a preference"),
        (#"{"prompt": "a", "completion": "b", "label": true}"#, "it has \"label\", a preference"),
        (#"{"prompt": "a", "completion": "b", "tools": [1]}"#, "a tool is not a JSON object"),
        (#"{"prompt": "a", "completion": "b", "tools": "x"}"#, "\"tools\" is not a list"),
        (#"{"prompt": "a", "completion": "b", "tools": [{"function": {}}]}"#, "a tool has no \"name\""),
        (#"{"prompt": "a", "completion": "b", "system": "c"}"#, "it has \"system\", which nothing reads"),
        (#"{"prompt": "a", "completion": "b", "completion": "c"}"#, "it is not a JSON object"),
        (#"{"prompt": "a", "completion": " "}"#, "an answer is empty"),
        (#"{"conversations": []}"#, "it has \"conversations\" and no text"),
    ]) func aRecordThatWouldBeLostIsRefused(_ record: String, _ reason: String) {
        let found = refusal(record)
        #expect(found.hasPrefix("Line 1 of a.jsonl: \(reason)"), "\(found)")
    }

    @Test func nullIsNothingAndOtherKeysAreSaid() throws {
        let answer =
            #"{"role": "assistant", "content": "b", "id": "1", "tool_calls": null, "refusal": null}"#
        let record =
            #"{"messages": [\#(asked), \#(answer)], "tools": null, "source": "web", "id": 3, "text": null, "meta": {}}"#
        #expect(try trained(record: record, chatML).spans == ["b<|im_end|>\n"])
        #expect(try notices(chatML) == ["Columns that were not read: id, source."])
    }

    @Test func promptsAndCompletionsMayBeMessages() throws {
        let prompt =
            #"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]"#
        let completion = #"[{"role": "assistant", "content": "d"}]"#
        for (prompt, completion) in [(prompt, completion), ("\"c\"", completion), (prompt, "\"d\"")] {
            let found = try trained(record: "{\"prompt\": \(prompt), \"completion\": \(completion)}", chatML)
            #expect(found.spans == ["d<|im_end|>\n"])
            let all = try trained(
                record: "{\"prompt\": \(prompt), \"completion\": \(completion)}", chatML, answersOnly: false)
            #expect(all.spans == [all.text])
        }
    }

    @Test func theKindOfAFileIsItsNames() throws {
        let record = #"{"prompt": "a", "completion": "b"}"#
        for name in ["a.JSONL", "a.ndjson", "a.json"] {
            #expect(try trained(name, record: record, chatML).spans == ["b<|im_end|>\n"])
        }
        let file = folder.appendingPathComponent("list.json")
        try file.write("[\n \(record),\n \(record)\n]")
        let data = TextData(tokenizer: chatML, length: 16)
        let long = TextData(tokenizer: chatML, length: 64)
        try long.write(.file(file), to: target)
        #expect(try read(chatML).spans == ["b<|im_end|>\n"])
        try file.write("[{\"prompt\": \"a\"}, 1]")
        #expect(
            message { try long.write(.file(file), to: target) }.hasPrefix(
                "Record 1 of list.json: it has \"prompt\" and no text; records have \"text\", \"prompt\" and \"completion\", or \"messages\". In all, 2 records are refused."
            ))
        let text = String(repeating: "A line.\n", count: 20)
        for name in ["a.MD", "a.txt"] {
            try folder.appendingPathComponent(name).write(text)
            try data.write(.file(folder.appendingPathComponent(name)), to: target)
        }
        for name in ["a.csv", "a.pdf", "a"] {
            try folder.appendingPathComponent(name).write(text)
            let found = message { try data.write(.file(folder.appendingPathComponent(name)), to: target) }
            #expect(found.hasPrefix("\(name) is a kind of file that is not read"))
        }
    }

    @Test func recordsThatLoseSomethingAreCounted() throws {
        let long = String(repeating: "long ", count: 20)
        let records = [(long, "a"), ("a", long), ("a", "b")].map { #"{"prompt": "\#($0)", "completion": "\#($1)"}"# }
        try file.write(records.joined(separator: "\n"))
        let notices = try TextData(tokenizer: chatML, length: 60).write(.file(file), to: target)
        #expect(
            notices.sentences.map(\.english) == [
                "Records with no answer in the first 60 tokens are left out: 1.",
                "Records longer than 60 tokens lose their end: 1.",
            ])
    }
}
