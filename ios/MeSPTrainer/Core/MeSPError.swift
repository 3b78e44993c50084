import Foundation

/// A failure that a person can act on: one plain sentence that names the thing and the remedy.
public struct MeSPError: LocalizedError, Sendable, Equatable {
    public let message: String

    public init(_ message: String) {
        self.message = message
    }

    public var errorDescription: String? { message }
}
