import Foundation

/// A failure that a person can act on: one plain sentence that names the thing and the remedy.
public struct MeSPError: LocalizedError, Sendable, Equatable {
    public let sentence: Sentence

    public init(_ sentence: Sentence) { self.sentence = sentence }

    public var errorDescription: String? { sentence.localized }
}
