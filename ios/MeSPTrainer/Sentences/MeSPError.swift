import Foundation

/// An error that describes itself in a sentence.
package protocol SentenceError: Error {
    var sentence: Sentence { get }
}

/// An error that a person can act on, with one plain sentence that names the fault and the remedy.
public struct MeSPError: LocalizedError, SentenceError, Sendable, Equatable {
    package let sentence: Sentence

    public init(_ sentence: Sentence) { self.sentence = sentence }

    public var errorDescription: String? { sentence.localized }
}

extension Error {
    /// The error as a sentence: the error's own sentence, or else the system's description.
    package var plainSentence: Sentence {
        if let error = self as? any SentenceError { return error.sentence }
        if let decoding = self as? DecodingError {
            switch decoding {
            case .keyNotFound(let key, _): return "\(key.stringValue) is missing"
            case .typeMismatch(_, let context), .valueNotFound(_, let context), .dataCorrupted(let context):
                let path = context.codingPath.map(\.stringValue).joined(separator: ".")
                // If a number is out of range for its type, Foundation does not give the path of the number in the JSON.
                guard !path.isEmpty else { return "it is not JSON, or has a number that is too large or too small" }
                return "\(path) has the wrong type"
            @unknown default: break
            }
        }
        return "\(localizedDescription)"
    }
}
