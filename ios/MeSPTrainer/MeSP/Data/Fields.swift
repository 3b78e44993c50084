import MeSPBundle
import MeSPFiles
import MeSPSentences

/// The columns of a record. A kind of record takes what it reads, and what is left is refused by name.
package struct Fields: Sendable {
    private(set) var values: [String: JSONValue]
    private var unread = Set<String>()

    package init(_ values: [String: JSONValue]) { self.values = values }

    func has(_ keys: [String]) -> Bool { keys.allSatisfy { values[$0].map { $0 != .null } ?? false } }

    /// Returns and removes the value of a column; nil if the column is absent or null.
    package mutating func take(_ key: String) -> JSONValue? {
        values.removeValue(forKey: key).flatMap { $0 == .null ? nil : $0 }
    }

    package mutating func takeText(_ key: String) throws -> String {
        guard let text = take(key)?.string else { throw MeSPError("\"\(key)\" is not a text; make it one.") }
        return text
    }

    mutating func leave(_ fields: [String: JSONValue], but known: Set<String>) {
        unread.formUnion(fields.filter { !known.contains($0.key) && !$0.value.isEmpty }.keys)
    }

    package var left: LeftFields {
        let names = unread.union(values.filter { !$0.value.isEmpty }.keys)
        let noted = names.filter { Self.neverContent.contains($0.lowercased().replacing("-", with: "_")) }
        return LeftFields(unread: names.subtracting(noted), noted: noted)
    }

    static func list(_ names: some Sequence<String>) -> String {
        names.sorted().map { "\"\($0)\"" }.joined(separator: ", ")
    }
}

package struct LeftFields: Sendable {
    package var unread = Set<String>()
    package var noted = Set<String>()

    package func check() throws { if !unread.isEmpty { throw Self.refusal(of: unread) } }

    static func refusal(of names: Set<String>) -> MeSPError {
        MeSPError(
            names.count == 1
                ? "it has \(Fields.list(names)), which nothing reads: write its text into what is read, or remove it."
                : "it has \(Fields.list(names)), which nothing reads: write their text into what is read, or remove them."
        )
    }
}

package struct RecordPlace: Sendable {
    package enum Kind: Sendable { case line, record, choice, conversation }

    package let number: Int
    let kind: Kind
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

package struct RefusedRecords {
    private let areLeftOut: Bool
    package private(set) var invalid = [(place: RecordPlace, reason: Sentence)]()
    /// The first record with unread fields, their number, and the unread fields of all records.
    private var unread: (place: RecordPlace, ofFirst: Int, ofAll: Set<String>)?
    package private(set) var noted = Set<String>()

    package init(areLeftOut: Bool = false) { self.areLeftOut = areLeftOut }

    /// Counts a `MeSPError` as a refusal of the record.
    package mutating func collect(_ place: RecordPlace, _ body: () throws -> Void) rethrows {
        do { try body() } catch let error as MeSPError { invalid.append((place, error.sentence)) }
    }

    /// Runs `body`, which reads a record and returns it and what it left; nil if the record is left out.
    ///
    /// - Returns: the record, unless it is refused.
    package mutating func read<R>(_ place: RecordPlace, _ body: () throws -> (R, LeftFields)?) rethrows -> R? {
        var read: (R, LeftFields)?
        try collect(place) { read = try body() }
        guard let (record, left) = read else { return nil }
        noted.formUnion(left.noted)
        guard !left.unread.isEmpty else { return record }
        if areLeftOut {
            invalid.append((place, LeftFields.refusal(of: left.unread).sentence))
            return nil
        }
        unread = unread ?? (place, left.unread.count, [])
        unread?.ofAll.formUnion(left.unread)
        return record
    }

    /// Throws if a record was refused, and is not left out.
    ///
    /// - Throws: `MeSPError` with the first refused record and the reason, and with the number of refused records if there are several.
    package func check() throws {
        guard !areLeftOut else { return }
        if let (place, reason) = invalid.first {
            let first: Sentence = "\(place.sentence): \(reason)."
            let all: Sentence = "\(first). In all, \(invalid.count) records are refused."
            throw MeSPError(invalid.count == 1 ? first : all, .invalidRecord(index: place.number - 1))
        }
        guard let unread else { return }
        throw MeSPError(
            unread.ofAll.count == unread.ofFirst
                ? "\(unread.place.sentence): \(LeftFields.refusal(of: unread.ofAll).sentence)."
                : "\(unread.place.sentence) and records after it have \(Fields.list(unread.ofAll)), which nothing reads: write their text into what is read, or remove them.",
            .invalidRecord(index: unread.place.number - 1))
    }
}
