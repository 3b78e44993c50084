import Foundation

package protocol SentenceError: Error {
    var sentence: Sentence { get }
}

/// An error that a person can act on, with a sentence that describes it.
public struct MeSPError: LocalizedError, SentenceError, Sendable, Equatable {
    package let sentence: Sentence

    public init(_ sentence: Sentence, _ kind: ErrorKind? = nil) { self.sentence = sentence.about(kind) }

    public var errorDescription: String? { sentence.localized }
}

extension Error {
    /// The error's own sentence; for a `DecodingError`, a sentence about the key or the value; otherwise the system's description.
    package var plainSentence: Sentence {
        if let error = self as? any SentenceError { return error.sentence }
        if let decoding = self as? DecodingError {
            switch decoding {
            case .keyNotFound(let key, _): return "\(key.stringValue) is missing"
            case .typeMismatch(_, let context), .valueNotFound(_, let context), .dataCorrupted(let context):
                let path = context.codingPath.map(\.stringValue).joined(separator: ".")
                // Foundation gives no path for a number that is out of range.
                guard !path.isEmpty else { return "it is not JSON, or has a number that is too large or too small" }
                return "\(path) has the wrong type"
            @unknown default: break
            }
        }
        if let system = (self as NSError).underlyingSystemError { return systemError(system) }
        return "\(localizedDescription)"
    }
}

/// Returns the system's description of an `errno`.
package func systemError(_ number: Int32) -> Sentence {
    let isOfDisk = [ENOSPC, EDQUOT, EFBIG].contains(number)
    return Sentence("\(String(cString: strerror(number)))").about(isOfDisk ? .insufficientDisk(required: nil) : nil)
}

extension NSError {
    /// The number of the system's error that caused this one, if any. Foundation's own sentences for such errors may have no more than a number.
    fileprivate var underlyingSystemError: Int32? {
        if domain == NSPOSIXErrorDomain { return Int32(exactly: code) }
        // On Linux the inner error is a POSIXError, which `as? NSError` does not convert.
        return (userInfo[NSUnderlyingErrorKey] as? any Error).flatMap { ($0 as NSError).underlyingSystemError }
    }
}
