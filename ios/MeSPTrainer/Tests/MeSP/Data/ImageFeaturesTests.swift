import Foundation
import MLX
import Testing

@testable import MeSP
@testable import MeSPBundle
@testable import MeSPCore

@Suite final class ImageFeaturesTests: TunerSuite, @unchecked Sendable {
    private var target: URL { folder.appendingPathComponent("tokens") }

    /// An image whose rows are `value` and more.
    private static func image(_ text: String, _ value: Float, hidden: Int = 2) throws -> ImageFeatures {
        let count = text.count { $0 == "#" }
        let rows = MLXArray((0..<count * hidden).map { value + Float($0) }, [count, hidden])
        return try ImageFeatures(text: text, rows: rows, token: "#")
    }

    private static func asked(_ text: String, _ images: ImageFeatures...) -> Conversation {
        Conversation([.user(text, images: images), .assistant("yes")])
    }

    private func write(_ conversations: [Conversation], length: Int = 64, answersOnly: Bool = true) throws {
        try TextData(tokenizer: ByteTokenizer(), length: length, answersOnly: answersOnly)
            .write(.conversations(conversations), to: target)
    }

    private func words(_ name: String) throws -> [Int] {
        try Data(contentsOf: target.appendingPathComponent(name)).words
    }

    @Test func rowsTakeThePlacesOfImageTokens() throws {
        let (a, b) = (try Self.image("[##]", 1), try Self.image("##", 10))
        try write([Self.asked("one", a, b), Self.asked("two"), Self.asked("three", b, b), Self.asked("held", a)])
        let texts = ["<user>[##]##one", "<user>two", "<user>####three"].map { "\($0)\n<assistant>yes\n\0" }
        #expect(try words("train.bin") == texts.joined().utf8.map { Int($0) })
        var places = [Int](repeating: 0, count: texts.joined().count)
        places.replaceSubrange(7..<11, with: [1, 2, 0, 3])
        places[11] = 4
        let third = texts[0].count + texts[1].count + 6
        places.replaceSubrange(third..<third + 4, with: [3, 4, 3, 4])
        #expect(try words("train.places.bin") == places)
        let mask = try Data(contentsOf: target.appendingPathComponent("train.mask.bin"))
        #expect(mask.filter { $0 == 1 }.count == 3 * "yes\n\0".count)
        #expect(try Data(contentsOf: target.appendingPathComponent("train.images.bin")) == a.rows + b.rows)
        #expect(try Data(contentsOf: target.appendingPathComponent("valid.images.bin")) == a.rows)
        let entry = try #require(try TokenFolder.entries(in: target)["train"]?.images)
        #expect(entry.count == 4 && entry.dtype == .float32 && a.rows.count == 16)
    }

    @Test func imagesAreNeverInTheLossAndAreCutWithTheirTokens() throws {
        let image = try Self.image("[####]", 1)
        let conversations = (0..<2).map { _ in Self.asked("a", image) }
        try write(conversations, length: 9, answersOnly: false)
        #expect(try words("train.places.bin") == [0, 0, 0, 0, 0, 0, 0, 1, 2, 3])
        let mask = try Data(contentsOf: target.appendingPathComponent("train.mask.bin"))
        #expect(mask.map { Int($0) } == [1, 1, 1, 1, 1, 1, 0, 0, 0, 0])
        try write((0..<2).map { Self.asked("\($0)") })
        #expect(try TokenFolder.entries(in: target)["train"]?.images == nil)
    }

    @Test(arguments: [
        (asked("a # b", try image("##", 1)), "it has 1 images, and 2 times # in the chat template"),
        (asked("a", try image("##", 1), try image("##", 1, hidden: 3)), "its images and those before have unlike rows"),
        (
            Conversation([.user("a"), try answer(with: image("#", 1))]),
            "an answer has an image, which no model here writes"
        ),
        (
            asked("a", try ImageFeatures(text: "#", rows: MLXArray.zeros([2, 2]), token: "#")),
            "it has an image with 2 rows and 1 times # in its text"
        ),
        (
            asked("a", try ImageFeatures(text: "<image>", rows: MLXArray.zeros([1, 2]))),
            "it has 1 images, and 0 times <image> in the chat template"
        ),
    ])
    func whatCannotBeAnImageIsRefused(_ conversation: Conversation, _ said: String) {
        let found = message { try write([conversation, conversation]) }
        #expect(found.hasPrefix("Conversation 1: \(said)"), "\(found)")
    }

    private static func answer(with image: ImageFeatures) -> Conversation.Message {
        var answer = Conversation.Message.assistant("b")
        answer.images = [image]
        return answer
    }

    @Test func whatTakesNoImagesSaysSo() async throws {
        let image = try Self.image("#", 1)
        for rows in [MLXArray.zeros([2]), MLXArray.zeros([1, 2], dtype: .int32), MLXArray.zeros([0, 2])] {
            let found = message { _ = try ImageFeatures(text: "#", rows: rows, token: "#") }
            #expect(found.hasPrefix("The rows of an image are a matrix of"))
        }
        let asked = Conversation([.user("a", images: [image])])
        for found in [
            message { _ = try Choice(prompt: asked.messages, chosen: "b", rejected: "c") },
            message { _ = try JSONEncoder().encode(asked) }, message { _ = try JSONEncoder().encode(asked.messages) },
            message { _ = try ByteTokenizer().encode(prompt: asked) },
        ] {
            #expect(found.hasPrefix("Only training on conversations takes images"), "\(found)")
        }
        let file = folder.appendingPathComponent("a.jsonl")
        try file.write(#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}"#)
        let data = TextData(tokenizer: ByteTokenizer(), length: 8)
        #expect(message { _ = try data.first(of: .file(file)) }.contains("pass ImageFeatures"))
        let conversations = (0..<2).map { _ in Self.asked("a", image) }
        let error = await #expect(throws: FineTuningError.self) {
            try await self.tuner().train(on: conversations, self.options(steps: 1)).end()
        }
        #expect(error?.description.contains("are not of 128 numbers each") == true, "\(error?.description ?? "")")
    }

    @Test func rowsOfATokensEmbeddingTrainAsTheToken() async throws {
        let bundle = try ModelBundle(url: tiedBundle())
        let rows = try bundle.embed([Int32](repeating: Int32(UInt8(ascii: "x")), count: 3))
        let image = try ImageFeatures(text: "(###)", rows: rows, token: "#")
        #expect(image.count == 3)
        func losses(_ message: Conversation.Message) async throws -> [Double] {
            let conversations = (0..<2).map { _ in Conversation([message, .assistant("yes")]) }
            var losses = [Double]()
            for try await update in try await tuner().train(on: conversations, options(steps: 3)) {
                losses += [update.loss, update.heldOutLoss].compactMap { $0.map { Double($0) } }
            }
            return losses
        }
        let ofImage = try await losses(.user("so", images: [image]))
        #expect(try await ofImage == losses(.user("(xxx)so")) && !ofImage.isEmpty)
        let otherRows = try ImageFeatures(text: "(###)", rows: 2 * rows, token: "#")
        #expect(try await ofImage != losses(.user("so", images: [otherRows])))
    }

    @Test func aPreviewShowsAnImageAsOneToken() async throws {
        let image = try Self.image("[##]", 1)
        let preview = try await tuner().preview(
            of: [Self.asked("?", image, image)],
            options(steps: 1) {
                $0.sequenceLength = 32
            })
        #expect(preview.spans.map(\.text).joined() == "<user>[#][#]?⏎\n<assistant>yes⏎\n␀")
        #expect(preview.spans.filter(\.isTrained).map(\.text) == ["yes⏎\n", "␀"])
    }

    @Test func aTemplateThatTakesPartsAloneGetsParts() throws {
        struct PartsAlone: WrappedTokenizer {
            let wrapped: any TextTokenizer = ByteTokenizer()
            let hasChatTemplate = true
            func applyChatTemplate(
                messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
                options: [String: any Sendable]
            ) throws -> [Int] {
                try wrapped.applyChatTemplate(
                    messages: messages.map { $0.filter { !($0.value is String) || $0.key == "role" } }, tools: tools,
                    addsGenerationPrompt: addsGenerationPrompt, options: options)
            }
        }
        let conversation = Self.asked("a")
        let (parts, text) = (PartsAlone(), ByteTokenizer())
        let found = try [parts, text].map { (tokenizer: any TextTokenizer) in
            try TextData(tokenizer: tokenizer, length: 64).first(of: .conversations([conversation])).example
        }
        #expect(found[0] == found[1])
        let asked = Conversation([.user("a")])
        #expect(try parts.asTrained(folder).encode(prompt: asked) == text.encode(prompt: asked))
    }
}

extension Data {
    fileprivate var words: [Int] {
        withUnsafeBytes { bytes in
            (0..<count / 4).map { Int(bytes.loadUnaligned(fromByteOffset: $0 * 4, as: UInt32.self)) }
        }
    }
}
