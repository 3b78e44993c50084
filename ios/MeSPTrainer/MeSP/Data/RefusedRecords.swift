import MeSPBundle
import MeSPSentences

/// The place of a record, for messages.
package struct RecordPlace: Sendable {
    package enum Kind: Sendable { case line, record, choice, conversation }

    /// The number of the record, from 1.
    package let number: Int
    let kind: Kind
    /// The file's name; nil if the message need not name a file.
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

/// The records that were refused.
package struct RefusedRecords {
    private var first: Sentence?
    private var count = 0

    package init() {}

    /// Runs `body`. Counts a `MeSPError` as a refusal of the record.
    package mutating func collect(_ place: RecordPlace, _ body: () throws -> Void) rethrows {
        do { try body() } catch let error as MeSPError {
            count += 1
            first = first ?? "\(place.sentence): \(error.sentence)."
        }
    }

    /// Throws if a record was refused.
    ///
    /// - Throws: `MeSPError` with the first refused record and the reason, and with the number of refused records if there are several.
    package func check() throws {
        guard let first else { return }
        throw MeSPError(count == 1 ? first : "\(first). In all, \(count) records are refused.")
    }
}
