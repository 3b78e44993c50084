import Foundation

/// A failure that a person can act on: one plain sentence that names the thing and the remedy.
public struct MeSPError: LocalizedError, Sendable, Equatable {
    public let message: String

    public init(_ message: String) {
        self.message = message
    }

    public var errorDescription: String? { message }
}

extension Error {
    /// The error in words, without a final full stop.
    package var plainSentence: String {
        if let decoding = self as? DecodingError {
            switch decoding {
            case .keyNotFound(let key, _): return "\(key.stringValue) is missing"
            case .typeMismatch(_, let context), .valueNotFound(_, let context), .dataCorrupted(let context):
                let path = context.codingPath.map(\.stringValue).joined(separator: ".")
                return path.isEmpty ? "it is not JSON" : "\(path) is not what it should be"
            @unknown default: break
            }
        }
        let text = localizedDescription
        return text.hasSuffix(".") ? String(text.dropLast()) : text
    }
}
