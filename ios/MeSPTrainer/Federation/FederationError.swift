import Foundation
import MeSPSentences

/// What went wrong between this machine and a SuperLink, as a sentence for people.
public struct FederationError: LocalizedError, Sendable, Equatable {
    public let sentence: Sentence

    public init(_ sentence: Sentence) { self.sentence = sentence }

    public var errorDescription: String? { sentence.localized }
}
