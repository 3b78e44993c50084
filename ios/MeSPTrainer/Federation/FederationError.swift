import Foundation

/// What went wrong between this machine and a SuperLink, as a sentence for people.
public struct FederationError: LocalizedError, Sendable, Equatable {
    public let sentence: String

    public init(_ sentence: String) { self.sentence = sentence }

    public var errorDescription: String? { sentence }
}
