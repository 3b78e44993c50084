import Foundation
import MeSPSentences

/// An error that the app or its user can act on.
///
/// `localizedDescription` describes the error in one sentence. It is in the app's language if the app's main bundle has the string table `Sentences`,
/// and otherwise in English.
public struct FineTuningError: LocalizedError, SentenceError, CustomStringConvertible, Sendable, Equatable {
    /// What an error is about, for an app to branch on.
    public typealias Kind = ErrorKind

    package let sentence: Sentence

    /// Creates an error, for example for a test.
    public init(_ kind: Kind, _ sentence: String) { self.init(Sentence(english: sentence), kind) }

    package init(_ sentence: Sentence, _ kind: Kind? = nil) { self.sentence = sentence.about(kind) }

    init(_ error: any Error, else other: Kind? = nil) {
        let sentence = error.plainSentence
        self.init(sentence, sentence.kind ?? other)
    }

    /// What the error is about.
    public var kind: Kind { sentence.kind ?? .other }
    /// The sentence in the app's language.
    public var errorDescription: String? { sentence.localized }
    /// The sentence in English.
    public var description: String { sentence.english }

    /// Calls `body`. Converts its errors, except `CancellationError`, to this type.
    static func describing<R>(else other: Kind? = nil, _ body: () throws -> R) throws -> R {
        do { return try body() } catch let error as CancellationError { throw error } catch {
            throw FineTuningError(error, else: other)
        }
    }
}
