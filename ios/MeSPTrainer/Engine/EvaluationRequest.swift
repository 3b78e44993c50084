import Foundation
import MeSPBundle
import MeSPCore
import MeSPFiles
import MeSPSentences

/// A request to `mesp-engine evaluate`: one line of JSON, with its kind in `type`.
enum EvaluationRequest: Decodable, Sendable {
    case choices(Choices)
    case text(Text)
    case divergence(Text)
    case generate(Texts)

    struct Choices: Decodable, Sendable {
        let prompt: [Int]
        let choices: [[Int]]
    }

    struct Texts: Decodable, Sendable {
        let atOnce: Int
        let requests: [Generator.Request]
    }

    struct Text: Decodable, Sendable {
        let tokens: [Int]
        let window: Int
    }

    init(line: String, number: Int) throws {
        self = try explaining {
            try JSONDecoder.snakeCase.decode(EvaluationRequest.self, from: Data(line.utf8))
        } as: {
            "Request \(number) is not valid: \($0)."
        }
    }

    init(from decoder: any Decoder) throws {
        enum Key: String, CodingKey { case type }
        enum Kind: String, Decodable { case choices, text, divergence, generate }
        switch try decoder.container(keyedBy: Key.self).decode(Kind.self, forKey: .type) {
        case .choices: self = .choices(try Choices(from: decoder))
        case .text: self = .text(try Text(from: decoder))
        case .divergence: self = .divergence(try Text(from: decoder))
        case .generate: self = .generate(try Texts(from: decoder))
        }
    }
}
