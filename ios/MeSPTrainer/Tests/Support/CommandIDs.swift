import Foundation
import Testing

@testable import MeSPFiles

/// The token ids that the commands make of texts with a tokenizer of a token a byte: `text_ids` in `tests/fixtures/make_cases.py`.
struct CommandIDs: Decodable, Sendable {
    let words: String
    /// A text file, with line ends of all kinds.
    let file: String
    /// A thousand of them are a long text, which `mesp-export` cuts into pieces of so many characters.
    let paragraph: String
    let pieces: [Int]
    /// With a token that begins each text, with one that no text begins with, and without.
    let tokenizers: [OfTokenizer]

    struct OfTokenizer: Decodable, Sendable {
        private let beginOfText: Int?
        private let addsBegin: Bool
        /// Of the words, as `mesp evaluate` puts a text to the model, as `mesp generate` writes on from them without a template, and as
        /// `mesp-export` makes a record's training data of them; then of the file.
        let text: [Int]
        let prompt: [Int]
        let record: [Int]
        let file: [Int]
        /// The first token of each window of a packed text; nil where the stream's own token stays.
        let begin: Int?
        /// Of " again" as the completion to the words, joined without a template, and which of them count.
        let answer: [Int]
        let answerCounted: [Bool]
        /// As `mesp evaluate` puts choices to the model.
        let questions: [Question]

        /// The same here.
        var tokenizer: ByteTokenizer {
            ByteTokenizer(beginOfText: beginOfText, addsBegin: addsBegin, hasChatTemplate: false)
        }
    }

    struct Question: Decodable, Sendable {
        let prompt: String
        let choices: [String]
        /// Of the prompt and of what follows it, a choice each.
        let ids: [[[Int]]]
    }

    init() throws {
        let file = try #require(Fixture.tied).appendingPathComponent("text_ids.json")
        self = try JSONDecoder.snakeCase.decode(CommandIDs.self, from: Data(contentsOf: file))
    }
}
