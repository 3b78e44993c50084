import Foundation
import MeSPSentences

/// A failure that the caller, or the person who uses the app, can act on.
///
/// `localizedDescription` is one sentence that names the thing and the remedy, in the language of the app where its main bundle has the string
/// table `Sentences`, and in English elsewhere.
public struct FineTuningError: LocalizedError, SentenceError, CustomStringConvertible, Sendable, Equatable {
    package let sentence: Sentence

    package init(_ sentence: Sentence) { self.sentence = sentence }

    init(_ error: any Error) { sentence = error.plainSentence }

    /// The sentence in the language of the app.
    public var errorDescription: String? { sentence.localized }
    /// The sentence in English.
    public var description: String { sentence.english }

    /// Calls `body`, whose errors become errors of this type. `CancellationError` is thrown as it is.
    static func describing<R>(_ body: () throws -> R) throws -> R {
        do { return try body() } catch let error as CancellationError { throw error } catch {
            throw FineTuningError(error)
        }
    }
}
