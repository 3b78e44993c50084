import Foundation
import MeSPCore
import MeSPFiles
import MeSPSentences

/// A request to `mesp-engine evaluate`: one line of JSON, with its kind in `type`.
enum EvaluationRequest: Decodable, Sendable {
    /// A request for the log-likelihoods of several continuations of a prompt.
    case choices(Choices)
    case text(Text)
    case generate(Texts)

    struct Choices: Decodable, Sendable {
        let prompt: [Int]
        let choices: [[Int]]
    }

    struct Texts: Decodable, Sendable {
        /// The maximum number of texts that are generated at the same time.
        let atOnce: Int
        let requests: [Generator.Request]
    }

    struct Text: Decodable, Sendable {
        let tokens: [Int]
        let window: Int
    }

    /// Decodes a request.
    ///
    /// - Parameters:
    ///   - line: the request as JSON, with keys in snake case.
    ///   - number: the line's number, for error messages.
    init(line: String, number: Int) throws {
        let decoder = JSONDecoder.snakeCase
        do {
            self = try decoder.decode(EvaluationRequest.self, from: Data(line.utf8))
        } catch {
            throw MeSPError("Request \(number) is not valid: \(error.plainSentence).")
        }
    }

    init(from decoder: any Decoder) throws {
        enum Key: String, CodingKey { case type }
        enum Kind: String, Decodable { case choices, text, generate }
        switch try decoder.container(keyedBy: Key.self).decode(Kind.self, forKey: .type) {
        case .choices: self = .choices(try Choices(from: decoder))
        case .text: self = .text(try Text(from: decoder))
        case .generate: self = .generate(try Texts(from: decoder))
        }
    }
}
