import Foundation
import Testing

@testable import MeSPFiles

/// The token ids that the commands make of texts with a tokenizer of one token per byte, from `text_ids` in `tests/fixtures/make_cases.py`.
struct CommandIDs: Decodable, Sendable {
    let words: String
    /// A text file, with line ends of all kinds.
    let file: String
    /// A paragraph. A thousand of it are a long text, which `mesp-export` cuts into pieces of `pieces` characters.
    let paragraph: String
    let pieces: [Int]
    /// The results of three tokenizers: one puts a token before each text, one has a token for the beginning of a text but does not add it, and one
    /// has no such token.
    let tokenizers: [OfTokenizer]

    struct OfTokenizer: Decodable, Sendable {
        private let beginOfText: Int?
        private let addsBegin: Bool
        /// The ids of `words` as a text in `mesp evaluate`. `prompt` has the ids of `words` as a prompt in `mesp generate` without a template, and
        /// `record` as a record in `mesp-export`. `file` has the ids of the text file.
        let text: [Int]
        let prompt: [Int]
        let record: [Int]
        let file: [Int]
        /// The first token of each window of a packed text; nil if it is not replaced.
        let begin: Int?
        /// The ids of the words with the completion " again", joined without a template. `answerCounted` says which are in the loss.
        let answer: [Int]
        let answerCounted: [Bool]
        /// The ids of questions with choices in `mesp evaluate`.
        let questions: [Question]

        /// The same tokenizer in Swift.
        var tokenizer: ByteTokenizer {
            ByteTokenizer(beginOfText: beginOfText, addsBegin: addsBegin, hasChatTemplate: false)
        }
    }

    struct Question: Decodable, Sendable {
        let prompt: String
        let choices: [String]
        /// The ids of the prompt and of the continuation, for each choice.
        let ids: [[[Int]]]
    }

    init() throws {
        let file = try #require(Fixture.tied).appendingPathComponent("text_ids.json")
        self = try JSONDecoder.snakeCase.decode(CommandIDs.self, from: Data(contentsOf: file))
    }
}
