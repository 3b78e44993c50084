import MeSPBundle
import MeSPSentences

/// The place of a record, as messages name it.
package struct RecordPlace: Sendable {
    package enum Kind: Sendable { case line, record, choice, conversation }

    /// The number of the record, from 1.
    package let number: Int
    /// The kind of place: a line, a record in a list, a choice or a conversation.
    let kind: Kind
    /// The file's name; nil if there is only one file.
    let file: String?

    package var sentence: Sentence {
        switch (kind, file) {
        case (.line, let file?): "Line \(number) of \(file)"
        case (.record, let file?): "Record \(number) of \(file)"
        case (.line, nil): "Line \(number)"
        case (.record, nil): "Record \(number)"
        case (.choice, _): "Choice \(number)"
        case (.conversation, _): "Conversation \(number)"
        }
    }
}

/// The refused records. The error names the first refused record, and the number of refused records.
package struct RefusedRecords {
    private var first: Sentence?
    private var count = 0

    package init() {}

    /// Runs `body`, and counts a `MeSPError` that it throws as a refusal. In the message, the error's sentence follows the record's place.
    package mutating func collect(_ place: RecordPlace, _ body: () throws -> Void) rethrows {
        do { try body() } catch let error as MeSPError {
            count += 1
            first = first ?? "\(place.sentence): \(error.sentence)."
        }
    }

    /// - Throws: `MeSPError` if a record was refused.
    package func check() throws {
        guard let first else { return }
        throw MeSPError(count == 1 ? first : "\(first). In all, \(count) records are refused.")
    }
}
