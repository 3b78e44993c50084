import Foundation

/// An error in words of its own.
package protocol SentenceError: Error {
    var sentence: Sentence { get }
}

/// A failure that a person can act on: one plain sentence that names the thing and the remedy.
public struct MeSPError: LocalizedError, SentenceError, Sendable, Equatable {
    package let sentence: Sentence

    public init(_ sentence: Sentence) { self.sentence = sentence }

    public var errorDescription: String? { sentence.localized }
}

extension Error {
    /// The error in words: its own, or the system's.
    package var plainSentence: Sentence {
        if let error = self as? any SentenceError { return error.sentence }
        if let decoding = self as? DecodingError {
            switch decoding {
            case .keyNotFound(let key, _): return "\(key.stringValue) is missing"
            case .typeMismatch(_, let context), .valueNotFound(_, let context), .dataCorrupted(let context):
                let path = context.codingPath.map(\.stringValue).joined(separator: ".")
                // Foundation says no more of a number that its type has no room for, and does not say which.
                guard !path.isEmpty else { return "it is not JSON, or has a number that is too large or too small" }
                return "\(path) has the wrong type"
            @unknown default: break
            }
        }
        return "\(localizedDescription)"
    }
}
