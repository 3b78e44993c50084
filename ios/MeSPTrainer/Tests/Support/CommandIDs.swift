import Foundation
import Testing

@testable import MeSPFiles

/// Token ids that the Python commands make of texts, from `text_ids` in `tests/fixtures/make_cases.py`. The tokenizers have one token per byte.
struct CommandIDs: Decodable, Sendable {
    let words: String
    let file: String
    /// A paragraph that a test repeats a thousand times. `mesp-export` cuts the result into pieces. `pieces` has their lengths in Unicode code
    /// points.
    let paragraph: String
    let pieces: [Int]
    /// The results of three tokenizers: one adds a begin token to each text, one has a begin token but does not add it, and one has none.
    let tokenizers: [OfTokenizer]

    struct OfTokenizer: Decodable, Sendable {
        private let beginOfText: Int?
        private let addsBegin: Bool
        /// The ids of `words` as a text in `mesp evaluate`, as a prompt in `mesp generate` without a template, and as a record in `mesp-export`.
        /// `file` has the ids of the text file.
        let text: [Int]
        let prompt: [Int]
        let record: [Int]
        let file: [Int]
        let begin: Int?
        /// The ids of `words` followed by the completion " again". `answerCounted` marks the ids in the loss.
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
