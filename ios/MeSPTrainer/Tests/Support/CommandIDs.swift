import Foundation
import Testing

@testable import MeSPFiles

/// Token ids that the Python commands make of texts, from `text_ids` in `tests/fixtures/make_cases.py`. The tokenizers have one token per byte.
struct CommandIDs: Decodable, Sendable {
    let words: String
    let file: String
    let paragraph: String
    let pieces: [Int]
    let tokenizers: [OfTokenizer]

    struct OfTokenizer: Decodable, Sendable {
        private let beginOfText: Int?
        private let addsBegin: Bool
        let text: [Int]
        let prompt: [Int]
        let record: [Int]
        let file: [Int]
        let begin: Int?
        let answer: [Int]
        let answerCounted: [Bool]
        let questions: [Question]

        var tokenizer: ByteTokenizer {
            ByteTokenizer(beginOfText: beginOfText, addsBegin: addsBegin, hasChatTemplate: false)
        }
    }

    struct Question: Decodable, Sendable {
        let prompt: String
        let choices: [String]
        let ids: [[[Int]]]
    }

    init() throws {
        let file = try #require(Fixture.tied).appendingPathComponent("text_ids.json")
        self = try JSONDecoder.snakeCase.decode(CommandIDs.self, from: Data(contentsOf: file))
    }
}
