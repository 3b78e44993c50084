import Foundation
import MeSPFiles

/// The first line that `mesp-engine evaluate` reads: a bundle's folder, and an adapter folder or null.
public struct EvaluationSettings: Decodable, Sendable {
    public let bundle: String
    public let adapters: String?

    /// Reads a settings file (snake-case JSON).
    public init(contentsOf url: URL) throws { self = try readSettings(url) }
}

/// A request to `mesp-engine evaluate`, a line of JSON. `type` says which.
public enum EvaluationRequest: Decodable, Sendable {
    /// The log-likelihoods of several continuations of a prompt.
    case choices(Choices)
    /// The log-likelihood of a text.
    case text(Text)
    /// The texts after some prompts.
    case generate(Texts)

    public struct Choices: Decodable, Sendable {
        public let prompt: [Int]
        public let choices: [[Int]]
    }

    public struct Texts: Decodable, Sendable {
        /// The number of texts that are written together.
        public let atOnce: Int
        public let requests: [Generator.Request]
    }

    public struct Text: Decodable, Sendable {
        public let tokens: [Int]
        public let window: Int
    }

    /// - Parameters:
    ///   - line: snake-case JSON.
    ///   - number: of the line, for what is said of one that is not valid.
    public init(line: String, number: Int) throws {
        let decoder = JSONDecoder.snakeCase
        do {
            self = try decoder.decode(EvaluationRequest.self, from: Data(line.utf8))
        } catch {
            throw MeSPError("Request \(number) is not valid: \(error.plainSentence).")
        }
    }

    public init(from decoder: any Decoder) throws {
        enum Key: String, CodingKey { case type }
        enum Kind: String, Decodable { case choices, text, generate }
        switch try decoder.container(keyedBy: Key.self).decode(Kind.self, forKey: .type) {
        case .choices: self = .choices(try Choices(from: decoder))
        case .text: self = .text(try Text(from: decoder))
        case .generate: self = .generate(try Texts(from: decoder))
        }
    }
}
