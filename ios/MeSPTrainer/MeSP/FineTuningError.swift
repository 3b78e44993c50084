import Foundation
import MeSPSentences

/// An error that the app or its user can act on.
///
/// `localizedDescription` describes the error in one sentence. It is in the app's language if the app's main bundle has the string table `Sentences`,
/// and otherwise in English.
public struct FineTuningError: LocalizedError, SentenceError, CustomStringConvertible, Sendable, Equatable {
    package let sentence: Sentence

    package init(_ sentence: Sentence) { self.sentence = sentence }

    init(_ error: any Error) { sentence = error.plainSentence }

    /// The sentence in the app's language.
    public var errorDescription: String? { sentence.localized }
    /// The sentence in English.
    public var description: String { sentence.english }

    /// Calls `body`. Converts its errors, except `CancellationError`, to this type.
    static func describing<R>(_ body: () throws -> R) throws -> R {
        do { return try body() } catch let error as CancellationError { throw error } catch {
            throw FineTuningError(error)
        }
    }
}
