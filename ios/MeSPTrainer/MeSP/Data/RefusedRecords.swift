import MeSPBundle
import MeSPSentences

/// The place of a record, as messages name it.
package struct RecordPlace: Sendable {
    package enum Kind: Sendable { case line, record, choice, conversation }

    /// From 1.
    package let number: Int
    /// Whether a file has a record a line, or is one list of them.
    let kind: Kind
    /// The file's name; nil where there is one file only.
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

/// The records that are refused: an error names the first, with the number of all.
package struct RefusedRecords {
    private var first: Sentence?
    private var count = 0

    package init() {}

    /// Runs `body`, and counts its `MeSPError`, whose sentence continues the record's place, as a refusal.
    package mutating func collect(_ place: RecordPlace, _ body: () throws -> Void) rethrows {
        do { try body() } catch let error as MeSPError {
            count += 1
            first = first ?? "\(place.sentence): \(error.sentence)."
        }
    }

    /// - Throws: `MeSPError` if there is one.
    package func check() throws {
        guard let first else { return }
        throw MeSPError(count == 1 ? first : "\(first). In all, \(count) records are refused.")
    }
}
