import Foundation

/// A failure that a person can act on: one plain sentence that names the thing and the remedy.
public struct MeSPError: LocalizedError, Sendable, Equatable {
    public let message: String

    public init(_ message: String) {
        self.message = message
    }

    public var errorDescription: String? { message }
}

/// A number in a training step that is NaN or infinite.
struct NotFinite: Error {
    /// What it is part of, as the beginning of a sentence: a block and a tensor.
    let what: String
}
