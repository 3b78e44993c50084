import Foundation
import MeSPSentences
import Testing

@testable import MeSP
@testable import MeSPAdapters
@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) @MainActor final class SideBySideChatTests {
    private let monitor = TestMonitor()
    private let folder = newFolder()
    private lazy var chat = SideBySideChat(monitor: monitor)

    private func request(_ tokens: Int) -> SideBySideChat.Request { .init("The quick", maxTokens: tokens) }

    private struct Numbers: WrappedTokenizer {
        var wrapped: any TextTokenizer = ByteTokenizer()
        let endOfText: Int? = nil
        let hasChatTemplate = false

        func decode(_ tokens: [Int]) -> String { tokens.map(String.init).joined(separator: " ") }
        func isSpecial(_ token: Int) -> Bool { false }
    }

    private func written() async throws {
        while chat.writing != nil { try await Task.sleep(for: .milliseconds(2)) }
    }

    private func write(
        _ request: SideBySideChat.Request, bundle: URL? = nil, adapters: [WeightedAdapters] = [],
        _ tokenizer: any TextTokenizer = Numbers()
    ) async throws {
        chat.start(request, bundle: try bundle ?? tiedBundle(), adapters: adapters, tokenizer: tokenizer)
        try await written()
    }

    private func train(in output: URL, seed: UInt64 = 0) throws -> URL {
        var settings = RunSettings(bundle: try tiedBundle().path, output: output.path)
        (settings.optimizer, settings.learningRate, settings.seed) = (.sgd, 1, seed)
        (settings.seqLen, settings.steps, settings.valBatches) = (32, 3, 0)
        try Run.run(settings)
        return output.appendingPathComponent("adapters")
    }

    @Test func bothModelsWrite() async throws {
        let adapters = WeightedAdapters(try train(in: folder))
        chat.start(request(6), bundle: try tiedBundle(), adapters: [adapters], tokenizer: Numbers())
        #expect(chat.writing == .base)
        try await written()
        #expect(chat.problem == nil)
        #expect(chat.base.summary?.tokens == 6 && chat.tuned.summary?.tokens == 6)
        #expect(chat.base.text.split(separator: " ").count == 6)
        #expect(chat.base.text != chat.tuned.text, "training changed nothing")
    }

    private final class Asked: WrappedTokenizer, @unchecked Sendable {
        let wrapped: any TextTokenizer = Numbers()
        let hasChatTemplate = true
        private let lock = NSLock()
        private var all = [[Said]]()
        var conversations: [[Said]] {
            lock.withLock { all.filter { !($0.first?.content.hasPrefix("Mk0") ?? false) } }
        }
        func applyChatTemplate(
            messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
            options: [String: any Sendable]
        ) throws -> [Int] {
            let messages = Said.read(messages)
            lock.withLock { all.append(messages) }
            if messages.last?.content == "refused" { throw MeSPError("The template takes no such message.") }
            return encode(messages.map(\.content).joined(), addsSpecialTokens: false)
        }
    }

    private func message(_ text: String) -> SideBySideChat.Request {
        .init(text, maxTokens: 4, isChat: true, system: "Be brief.")
    }

    @Test func aConversationKeepsItsTurnsOnEachSide() async throws {
        let documents = DocumentsFolder(documents: folder)
        chat = SideBySideChat(monitor: monitor, folder: documents)
        let adapters = [WeightedAdapters(try train(in: folder.appendingPathComponent("runs/run")))]
        let asked = Asked()
        func say(_ text: String) async throws {
            try await write(message(text), adapters: adapters, asked)
        }
        try await say("One")
        try await say("Two")
        let first = try #require(chat.turns.first)
        func conversation(_ answer: String) -> [Said] {
            said(("system", "Be brief."), ("user", "One"), ("assistant", answer), ("user", "Two"))
        }
        #expect(chat.turns.map(\.prompt) == ["One", "Two"])
        #expect(asked.conversations.count == 4 && asked.conversations[0].count == 2)
        #expect(asked.conversations[2] == conversation(first.base.text))
        #expect(asked.conversations[3] == conversation(first.tuned.text))
        #expect(first.base.text != first.tuned.text)

        try await say("refused")
        #expect(chat.problem == "The template takes no such message." && chat.turns.count == 2)

        chat = SideBySideChat(monitor: monitor, folder: documents)
        #expect(chat.turns.map(\.base.text).first == first.base.text)
        #expect(chat.bundleName == "bundle" && chat.turns.map(chat.tunedName) == ["run", "run"], "who answers is said")
        try await say("Three")
        #expect(chat.turns.count == 3 && asked.conversations.last?.count == 6)

        try await write(message("Four"), asked)
        #expect(chat.turns.map(\.prompt) == ["Four"])
        chat.clear()
        #expect(try chat.turns.isEmpty && documents.readChat() == nil)
    }

    /// Each answer equals the answer of a new chat with the whole conversation. The first chat cannot open the bundle again after its first turn,
    /// because the manifest is moved away.
    @Test func aConversationGoesOnWithOtherStrengths() async throws {
        let documents = DocumentsFolder(documents: folder)
        chat = SideBySideChat(monitor: monitor, folder: documents)
        let (copy, away) = (folder.appendingPathComponent("copy.mesp"), folder.appendingPathComponent("away"))
        try tiedBundle().copy(to: copy)
        let folders = try ["a", "b"].map { name in
            try train(in: folder.appendingPathComponent("runs/\(name)"), seed: name == "a" ? 1 : 2)
        }
        func say(_ text: String, _ strengths: [Float]) async throws -> SideBySideChat.Turn {
            let adapters = zip(folders, strengths).map { WeightedAdapters($0, weight: $1) }
            var asked = message(text)
            asked.maxTokens = 16
            try await write(asked, bundle: copy, adapters: adapters, Asked())
            #expect(chat.problem == nil)
            return try #require(chat.turns.last)
        }
        let first = try await say("One", [0, 0])
        #expect(!first.base.text.isEmpty && first.tuned.text == first.base.text, "it is the base model")

        try FileManager.default.moveItem(at: copy.appendingPathComponent("manifest.json"), to: away)
        let strengths: [[Float]] = [[1, 0.5], [0.25, 0.5], [0, 1]]
        var answers = [String]()
        for strengths in strengths { try await answers.append(say("Again", strengths).tuned.text) }
        try #require(chat.turns.count == 4)
        #expect(Set(answers).count > 1 && answers[0] != chat.turns[1].base.text, "\(answers)")
        let half = Float(0.5).formatted(.number.precision(.fractionLength(2)))
        #expect(chat.tunedName(of: chat.turns[1]) == "a + b × \(half)")

        try FileManager.default.moveItem(at: away, to: copy.appendingPathComponent("manifest.json"))
        let kept = try #require(try documents.readChat())
        for (index, strengths) in strengths.enumerated() {
            documents.save(StoredChat(partners: kept.partners, turns: Array(kept.turns.prefix(1 + index))))
            chat = SideBySideChat(monitor: monitor, folder: documents)
            #expect(try await say("Again", strengths).tuned.text == answers[index])
        }
        #expect(chat.tunedName(of: chat.turns[1]) == "a + b × \(half)", "it is kept who answered")
    }

    @Test func aConversationThatCannotBeReadIsNotReplaced() async throws {
        let locked = Locked(false)
        let documents = DocumentsFolder(
            documents: folder,
            read: { url in
                if locked.value { throw CocoaError(.fileReadNoPermission) }
                return try Data(contentsOf: url)
            })
        chat = SideBySideChat(monitor: monitor, folder: documents)
        func say(_ text: String) async throws {
            try await write(message(text), ByteTokenizer())
        }
        try await say("One")
        let kept = try #require(try documents.readChat())

        locked.change { $0 = true }
        chat = SideBySideChat(monitor: monitor, folder: documents)
        #expect(chat.turns.isEmpty)
        try await say("Two")
        #expect(chat.problem?.english.contains("unlock it") == true && chat.turns.isEmpty)
        locked.change { $0 = false }
        #expect(try documents.readChat() == kept)

        monitor.tell(.change)
        #expect(chat.turns.map(\.prompt) == ["One"])
        try await say("Two")
        #expect(chat.turns.map(\.prompt) == ["One", "Two"] && chat.problem == nil)
    }

    @Test func aConversationThatIsDamagedIsNotSaidToBeLocked() throws {
        let error = CocoaError(.fileReadCorruptFile)
        chat = SideBySideChat(monitor: monitor, folder: DocumentsFolder(documents: folder, read: { _ in throw error }))
        chat.start(message("One"), bundle: try tiedBundle(), adapters: [], tokenizer: ByteTokenizer())
        #expect(chat.problem?.english == error.localizedDescription && chat.turns.isEmpty)
    }

    @Test func aConversationIsReadOnce() async throws {
        let documents = DocumentsFolder(documents: folder)
        chat = SideBySideChat(monitor: monitor, folder: documents)
        func say(_ text: String) async throws -> String {
            try await write(message(text), ByteTokenizer())
            return chat.base.text
        }
        #expect(chat.bytesRead == 0)
        _ = try await say("One")
        let once = chat.bytesRead
        #expect(once > 0)
        let answer = try await say("Two")
        #expect(chat.bytesRead > once)
        let kept = try #require(try documents.readChat())
        documents.save(StoredChat(partners: kept.partners, turns: Array(kept.turns.prefix(1))))
        chat = SideBySideChat(monitor: monitor, folder: documents)
        #expect(chat.bytesRead == 0)
        #expect(try await say("Two") == answer)

        monitor.tell(.memoryWarning)
        #expect(chat.bytesRead == 0)
        _ = try await say("Three")
        #expect(chat.bytesRead > 0)
        chat.clear()
        #expect(chat.bytesRead == 0)
        try await write(request(2))
        #expect(chat.bytesRead == 0, "what is written on from is no conversation")
    }

    @Test func everyEndTokenThatTheModelNamesEndsTheText() async throws {
        try await write(request(8))
        let tokens = chat.base.text.split(separator: " ").compactMap { Int($0) }
        let copy = folder.appendingPathComponent("copy.mesp")

        try tiedBundle().copy(to: copy)
        func config(_ name: String, _ json: String) throws {
            try copy.appendingPathComponent(name).write(json)
        }
        try config("generation_config.json", "{\"eos_token_id\": [100000, \(tokens[3])]}")
        #expect(endTokens(of: copy, Numbers()) == [100000, tokens[3], 0], "the last is the manifest's")
        try await write(request(8), bundle: copy)
        #expect(chat.base.summary?.reason == .stop)
        #expect(chat.base.summary?.tokens == tokens.firstIndex(of: tokens[3]))

        try config("generation_config.json", "{\"do_sample\": true}")
        try config("config.json", "{\"eos_token_id\": 7}")
        #expect(endTokens(of: copy, ByteTokenizer()) == [7, 0])
        try config("config.json", "no JSON")
        #expect(endTokens(of: copy, ByteTokenizer()) == [0], "the tokenizer's, where the model names none")
    }

    /// The config.json of a base model may name an end token other than the chat template's.
    @Test func whatTrainingEndsWithEndsTheText() throws {
        let copy = folder.appendingPathComponent("copy.mesp")

        try tiedBundle().copy(to: copy)
        try? FileManager.default.removeItem(at: copy.appendingPathComponent("generation_config.json"))
        try copy.appendingPathComponent("config.json").write("{\"eos_token_id\": 3}")
        let (text, message) = (TemplateTokenizer.id("<|endoftext|>"), TemplateTokenizer.id("<|im_end|>"))
        let tokenizer = TemplateTokenizer(template: TemplateTokenizer.chatML)
        #expect(endTokens(of: copy, tokenizer) == [3, 0, message, text], "0 is the manifest's")
        #expect(endTokens(of: copy, TemplateTokenizer(template: TemplateTokenizer.endless)) == [3, 0, text])

        try copy.appendingPathComponent("manifest.json").changeJSON { $0["end_tokens"] = [5, 3] }
        #expect(endTokens(of: copy, tokenizer) == [3, 5, message, text])
    }

    @Test func aPromptIsWrittenOnFromAsByTheCommand() async throws {
        let expected = try CommandIDs()
        var texts = Set<String>()
        for ids in expected.tokenizers {
            let tokenizer = Numbers(wrapped: ids.tokenizer)
            try await write(.init(expected.words, maxTokens: 24), tokenizer)
            let tokens = try Generator(ModelBundle(url: tiedBundle())).text(ids.prompt, maxTokens: 24)
            #expect(chat.base.text == tokenizer.decode(tokens))
            texts.insert(chat.base.text)
        }
        #expect(texts.count == 2, "it makes a difference whether a text is begun")
    }

    @Test func withoutAdaptersOnlyTheBaseModelWrites() async throws {
        try await write(request(3))
        #expect(chat.base.summary?.reason == .length && chat.tuned.summary == nil)
    }

    @Test func waitsWhileTheAppIsNotInFrontAndStops() async throws {
        chat.start(request(1_000_000), bundle: try tiedBundle(), adapters: [], tokenizer: Numbers())
        while chat.base.text.isEmpty { try await Task.sleep(for: .milliseconds(2)) }
        monitor.scene = .background
        var text = ""
        while chat.base.text != text {  // pending tokens arrive
            text = chat.base.text
            try await Task.sleep(for: .milliseconds(300))
        }
        monitor.scene = .active
        while chat.base.text == text { try await Task.sleep(for: .milliseconds(2)) }
        chat.stop()
        try await written()
        #expect(chat.base.summary?.reason == .stopped)
    }

    @Test func aBundleThatIsGoneGivesASentence() async throws {
        try await write(request(1), bundle: URL(fileURLWithPath: "/nowhere"))
        #expect(chat.problem?.english.hasPrefix("/nowhere is not a bundle") == true)
    }
}
