import Foundation
import MeSPBundle
import MeSPControl
import MeSPCore
import Testing

// Not @testable: the example is what an app of your own can write.
@testable import MeSP

/// Notes that a person took `taken` where the app had suggested `suggested`, and trains on all such choices once there are enough.
@MainActor func learn(
    from taken: String, over suggested: String, after message: String, with store: ChoiceStore, _ bundle: URL,
    tokenizer: any TextTokenizer, in folder: URL, monitor: any DeviceMonitor
) async throws -> URL? {
    let prompt = [Conversation.Message.user(message)]
    try store.append(Choice(prompt: prompt, chosen: taken, rejected: suggested))
    let choices = try store.all()
    guard choices.count >= 4 else { return nil }

    var settings = RunSettings(bundle: bundle.path, output: folder.appendingPathComponent("run").path)
    settings.objective = .dpo
    (settings.seqLen, settings.steps) = (32, 20)

    let tokens = folder.appendingPathComponent("tokens")
    try TextData(tokenizer: tokenizer, length: settings.seqLen).write(.choices(choices), to: tokens)
    settings.data = tokens.path
    try await RunController(monitor: monitor).run(settings)
    return folder.appendingPathComponent("run/adapters")
}

@Suite(.serialized) @MainActor final class ChoiceStoreTests {
    private let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
    private var store: ChoiceStore { ChoiceStore(url: folder.appendingPathComponent("choices.jsonl")) }

    init() throws { try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true) }

    deinit { try? FileManager.default.removeItem(at: folder) }

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
        #expect(!FileManager.default.fileExists(atPath: store.url.path))
    }

    /// As mesp data and TRL read pairs: lists of messages.
    @Test func theFileIsOfPreferences() throws {
        try store.append(choice("Hello.", "Hm"))
        let json = try JSONSerialization.jsonObject(with: Data(contentsOf: store.url)) as? [String: Any]
        let record = try #require(json)
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

    @Test func theExampleLearnsWhatPeopleTake() async throws {
        let bundle = try #require(Fixture.tied).appendingPathComponent("bundle.mesp")
        var adapters: URL?
        for word in ["one", "two", "three", "four"] {
            #expect(adapters == nil, "too few choices")
            adapters = try await learn(
                from: "\(word) is", over: "not \(word)", after: word, with: store, bundle, tokenizer: ByteTokenizer(),
                in: folder, monitor: TestMonitor())
        }
        let log = try Data(contentsOf: folder.appendingPathComponent("run/metrics.jsonl"))
        let evaluations = try log.split(separator: UInt8(ascii: "\n")).compactMap {
            let record = try JSONSerialization.jsonObject(with: $0) as? [String: Any]
            return record?["type"] as? String == "step" ? record?["accuracy"] as? Double : nil
        }
        #expect(evaluations.last == 1, "the chosen answer is the likelier one")
        let written = try #require(adapters).appendingPathComponent("adapters.safetensors")
        #expect(FileManager.default.fileExists(atPath: written.path))
    }

    @Test func whatDoesNotFitIsLeftOut() throws {
        let long = [Conversation.Message.user(String(repeating: "long ", count: 20))]
        let choices = try [choice("a", "b"), Choice(prompt: long, chosen: "a", rejected: "b")]
        let data = TextData(tokenizer: ByteTokenizer(), length: 32)
        let said = message { try data.write(.choices(choices), to: folder.appendingPathComponent("tokens")) }
        #expect(said.hasPrefix("Of 2 choices 1 fit sequences of 32 tokens, too few"))
    }
}
