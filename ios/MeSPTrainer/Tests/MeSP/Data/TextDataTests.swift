import Foundation
import Testing

@testable import MeSP
@testable import MeSPBundle
@testable import MeSPCore

@Suite struct TextDataTests {
    private let folder = newFolder()
    private var target: URL { folder.appendingPathComponent("tokens") }

    private func write(
        _ name: String, _ text: String, answersOnly: Bool = true, tokenizer: ByteTokenizer = ByteTokenizer(),
        length: Int = 16
    ) throws {
        let file = folder.appendingPathComponent(name)
        try file.write(text)
        try TextData(tokenizer: tokenizer, length: length, answersOnly: answersOnly).write(.file(file), to: target)
    }

    private func words(_ name: String) throws -> [Int] {
        let data = try Data(contentsOf: target.appendingPathComponent(name))
        return data.withUnsafeBytes { bytes in
            (0..<data.count / 4).map { Int(bytes.loadUnaligned(fromByteOffset: $0 * 4, as: UInt32.self)) }
        }
    }

    @Test func aTextIsOneStreamWithItsLastTenthHeldOut() throws {
        let text = (0..<4000).map { "Line \($0).\n" }.joined()
        try write("text.txt", text)
        let (train, valid) = (try words("train.bin"), try words("valid.bin"))
        #expect(train + valid == text.utf8.map { Int($0) } + [0])
        #expect(valid.count == (text.utf8.count + 1) / 10)
    }

    @Test func aRecordOfTextIsASequenceAndALongOneSeveral() throws {
        let records = ["0123456789", "abcdefghijklmnopqrstuvwxyz0123456789", "a", "x"].map { #"{"text": "\#($0)"}"# }
        try write("text.jsonl", records.joined(separator: "\n\n"))
        #expect(try words("train.examples.bin") == [0, 11, 11, 17, 28, 17, 45, 5, 50, 2])
        #expect(try words("valid.examples.bin") == [0, 2])
        let tokens = "0123456789\0abcdefghijklmnopqqrstuvwxyz01234566789\0a\0"
        #expect(try words("train.bin") == tokens.utf8.map { Int($0) })
        let entries = try TokenFolder.entries(in: target).values
        #expect(entries.allSatisfy { $0.mask == nil && $0.labels == nil })
    }

    @Test func theIDsAreThoseOfTheCommand() throws {
        let expected = try CommandIDs()
        for ids in expected.tokenizers {
            try write("text.txt", expected.file, tokenizer: ids.tokenizer)
            #expect(try words("train.bin") + words("valid.bin") == ids.file)
            let entries = try TokenFolder.entries(in: target)
            #expect(entries.count == 2 && entries.values.allSatisfy { $0.begin == ids.begin })
            let record = "{\"text\": \"\(expected.words)\"}\n"
            try write("text.jsonl", record + record, tokenizer: ids.tokenizer, length: 128)
            #expect(try words("train.bin") + words("valid.bin") == ids.record + ids.record)
            let answer = "{\"prompt\": \"\(expected.words)\", \"completion\": \" again\"}\n"
            try write("answers.jsonl", answer + answer, tokenizer: ids.tokenizer, length: 128)
            #expect(try words("train.bin") == ids.answer)
            let mask = try Data(contentsOf: target.appendingPathComponent("train.mask.bin"))
            #expect(mask.map { $0 == 1 } == ids.answerCounted)
        }
    }

    @Test func aLongTextIsCutAsByTheCommand() throws {
        let expected = try CommandIDs()
        let pieces = TextRecord.pieces(String(repeating: expected.paragraph, count: 1000))
        #expect(pieces.count > 2 && pieces.map(\.unicodeScalars.count) == expected.pieces)
    }

    @Test func conversationsAreOneExampleASequence() throws {
        let records = (0..<3).map { #"{"prompt": "\#($0)", "completion": "yes, it is"}"# }
        try write("chat.jsonl", records.joined(separator: "\n"), answersOnly: false)
        #expect(try words("train.examples.bin") == [0, 17, 17, 17])
        #expect(try words("valid.examples.bin") == [0, 17])
        let found = message { try write("chat.jsonl", records.joined(separator: "\n")) }
        #expect(found.hasPrefix("chat.jsonl has 0 usable records"), "nothing of an answer is left after the cut")
    }

    @Test(arguments: [
        (
            ByteTokenizer(), #"[{"role":"user","content":"Why?"},{"role":"assistant","content":"So."}]"#,
            ["So.\n\0"]
        ),
        (
            ByteTokenizer(),
            #"[{"role":"assistant","content":"Hi"},{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]"#,
            ["Hi\n\0", "b\n\0"]
        ),
        (
            ByteTokenizer(thinks: true),
            #"[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"assistant","content":"c"},{"role":"user","content":"d"},{"role":"assistant","content":"e"}]"#,
            ["b\n\0", "c\n\0", "(hm)e\n\0"]
        ),
    ]) func everyAnswerCounts(_ tokenizer: ByteTokenizer, _ messages: String, _ expected: [String]) throws {
        let record = "{\"messages\": \(messages)}"
        try write("chat.jsonl", "\(record)\n\(record)", tokenizer: tokenizer, length: 128)
        let tokens = try words("train.bin")
        let mask = try Data(contentsOf: target.appendingPathComponent("train.mask.bin"))
        #expect(tokens.count == mask.count)
        let counted = String(decoding: zip(tokens, mask).filter { $1 == 1 }.map { UInt8($0.0) }, as: UTF8.self)
        #expect(counted == expected.joined())
        #expect(try TokenFolder.entries(in: target)["train"]?.mask == "train.mask.bin")
    }

    @Test(arguments: [
        ("a.txt", "   \n", "a.txt has no text in it."),
        ("a.txt", "short", "a.txt has 6 tokens, too few to train on"),
        ("a.jsonl", "{\"text\": \"\"}\n{\"text\": \"a\"}", "Line 1 of a.jsonl: it has an empty text; leave it out."),
        ("a.jsonl", "{\"text\": \"a\"}", "a.jsonl has 1 usable records of 1, too few to train on and hold out one"),
        ("a.jsonl", "{\"text\": 1}", "Line 1 of a.jsonl: \"text\" is not a text"),
        ("a.jsonl", "{\"content\": \"x\"}", "Line 1 of a.jsonl: it has \"content\" and no text; records have"),
        (
            "a.jsonl", "{\"text\": \"x\"}\n{\"prompt\": \"x\", \"completion\": \"y\"}",
            "Line 2 of a.jsonl: it is another kind of record"
        ),
        ("a.jsonl", "{", "Line 1 of a.jsonl: it is not a JSON object"),
        ("a.jsonl", "{\"prompt\": \"x\", \"completion\": \"y\"}", "a.jsonl has 0 usable records"),
    ]) func saysWhatIsWrong(_ name: String, _ text: String, _ expected: String) throws {
        let found = message { try write(name, text) }
        #expect(found.hasPrefix(expected), "\(found)")
        #expect(!target.exists)
    }

    @Test func aModelWithoutAChatTemplateTakesNoConversations() throws {
        let record = #"{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}"#
        let found = message { try write("a.jsonl", record, tokenizer: ByteTokenizer(hasChatTemplate: false)) }
        #expect(
            found.hasPrefix("Line 1 of a.jsonl: the model's tokenizer has no chat template, which its messages need"))
    }

    @Test func endsWhenProgressThrows() throws {
        let text = String(repeating: "A line.\n", count: 100)
        #expect(throws: CancellationError.self) {
            try TextData(tokenizer: ByteTokenizer(), length: 16).write(.text(text), to: target) { _ in
                throw CancellationError()
            }
        }
        #expect(!target.exists)
    }
}
