import Foundation
import Testing

@testable import MeSP
@testable import MeSPAppModel

@Suite(.serialized) @MainActor final class ChoiceStoreTests {
    private let folder = newFolder()
    private var store: ChoiceStore { ChoiceStore(url: folder.appendingPathComponent("choices.jsonl")) }

    private func choice(_ chosen: String, _ rejected: String) throws -> Choice {
        try Choice(prompt: [Conversation.Message.user("Hi")], chosen: chosen, rejected: rejected)
    }

    @Test func choicesAreKeptAndRemoved() throws {
        #expect(try store.all() == [])
        let (first, second) = (try choice("Hello.", "Hi\nyou"), try choice("Moin", "Hello"))
        try store.append(first)
        try store.append(second)
        #expect(try store.all().map(\.id) == [first.id, second.id])
        #expect(try store.all().map(\.rejected) == ["Hi\nyou", "Hello"])
        try store.remove([first.id])
        #expect(try store.all().map(\.chosen) == ["Moin"])
        try store.remove([second.id])
        #expect(!store.url.exists)
    }

    @Test func theFileIsOfPreferences() throws {
        try store.append(choice("Hello.", "Hm"))
        let record = try store.url.readJSON()
        #expect(record["prompt"] as? [[String: String]] == [["role": "user", "content": "Hi"]])
        #expect(record["chosen"] as? [[String: String]] == [["role": "assistant", "content": "Hello."]])
        #expect(record["rejected"] as? [[String: String]] == [["role": "assistant", "content": "Hm"]])
    }

    @Test func aLineThatWasCutShortIsPassedOver() throws {
        try store.append(choice("Hello.", "Hm"))
        var bytes = try Data(contentsOf: store.url)
        try (bytes + bytes.prefix(30)).write(to: store.url)
        #expect(try store.all().count == 1)
        bytes.insert(contentsOf: Data("x\n".utf8), at: 0)
        try bytes.write(to: store.url)
        #expect(message { _ = try store.all() }.contains("Line 1 of choices.jsonl is not a choice"))
    }

    @Test func aChoiceOfNothingIsRefused() throws {
        #expect(message { _ = try choice("Hello", "Hello") }.contains("are equal"))
        #expect(message { _ = try choice("Hello", " \n") }.contains("is empty"))
        #expect(message { _ = try Choice(prompt: [], chosen: "a", rejected: "b") }.contains("needs the message"))
    }

    @Test func whatDoesNotFitIsLeftOut() throws {
        let long = [Conversation.Message.user(String(repeating: "long ", count: 20))]
        let choices = try [choice("a", "b"), Choice(prompt: long, chosen: "a", rejected: "b")]
        let data = TextData(tokenizer: ByteTokenizer(), length: 32)
        let said = message { try data.write(.choices(choices), to: folder.appendingPathComponent("tokens")) }
        #expect(said.hasPrefix("The data has 1 usable records of 2, too few"))
    }
}
