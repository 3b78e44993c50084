import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

package enum TextFileKind: Sendable {
    case text
    case lines
    case list

    /// Returns the kind by the file's extension, in any letter case.
    ///
    /// - Throws: `MeSPError` for an unknown extension.
    package init(of file: URL) throws {
        switch file.pathExtension.lowercased() {
        case "txt", "text", "md", "markdown": self = .text
        case "jsonl", "ndjson": self = .lines
        case "json": self = .list
        default:
            throw MeSPError(
                "\(file.lastPathComponent) is a kind of file that is not read; take a text as .txt or .md, or records as .jsonl, .ndjson or .json."
            )
        }
    }
}

package enum SourceRows {
    /// The columns of a record, which are nil if the record is not a JSON object.
    package typealias Row = (place: RecordPlace, fields: Fields?)

    static func pieces(of text: String) -> [(place: RecordPlace, record: any Record)] {
        let pieces = TextRecord.pieces(text)
        return pieces.enumerated().map { index, piece in
            let record = TextRecord(text: piece, isPiece: true, begins: index == 0, ends: index + 1 == pieces.count)
            return (RecordPlace(number: index + 1, kind: .record, file: nil), record)
        }
    }

    static func rows(_ records: [[String: JSONValue]], _ kind: RecordPlace.Kind) -> [Row] {
        records.enumerated().map { (RecordPlace(number: $0 + 1, kind: kind, file: nil), Fields($1)) }
    }

    /// Returns a file's text without a byte order mark, with line feeds as its line ends.
    ///
    /// - Throws: `MeSPError` if the file cannot be read, or has no text.
    static func text(of file: URL) throws -> String {
        let name = file.lastPathComponent
        guard let data = try? Data(contentsOf: file, options: .mappedIfSafe) else {
            throw MeSPError("\(name) cannot be read.")
        }
        guard var text = String(data: data, encoding: .utf8) else {
            throw MeSPError("\(name) is not UTF-8 text; convert it first.")
        }
        text = text.replacingOccurrences(of: "\r\n", with: "\n").replacingOccurrences(of: "\r", with: "\n")
        if text.unicodeScalars.first == "\u{FEFF}" { text.unicodeScalars.removeFirst() }
        guard !text.isBlank else { throw MeSPError("\(name) has no text in it.") }
        return text
    }

    /// Returns the records in a file's bytes. Empty lines are skipped.
    package static func objects(in data: Data, of file: String?, isList: Bool = true) -> [Row] {
        func row(_ index: Int, _ kind: RecordPlace.Kind, _ value: JSONValue?) -> Row {
            let place = RecordPlace(number: index + 1, kind: kind, file: file)
            guard case .object(let fields) = value else { return (place, nil) }
            return (place, Fields(fields))
        }
        if isList, let value = whole(data) {
            return (value.array ?? [value]).enumerated().map { row($0, .record, $1) }
        }
        return data.split(separator: UInt8(ascii: "\n"), omittingEmptySubsequences: false).enumerated()
            .filter { $1.contains { $0 > 0x20 } }.map { row($0, .line, try? JSONValue(json: $1)) }
    }

    /// Returns the file as one JSON value; nil if the file is not one value, or has a record on each line.
    private static func whole(_ data: Data) -> JSONValue? {
        guard let start = data.firstIndex(where: { $0 > 0x20 }) else { return nil }
        func read(_ bytes: Data) -> JSONValue? { try? JSONValue(json: bytes) }
        let line = data[start...].prefix { $0 != UInt8(ascii: "\n") }
        return data[start] == UInt8(ascii: "[") || read(line) == nil ? read(data) : nil
    }
}
