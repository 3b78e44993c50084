import Foundation
import MeSPFiles

struct ModelCard {
    /// The identifier of the licence; nil if the card has none. For the identifier `other`, the card may give a name and a link.
    private(set) var license: String?
    private(set) var licenseName: String?
    private(set) var licenseLink: String?

    /// Reads the licence of a card in UTF-8; nil for no card. Only values on a single line are read.
    init(_ card: Data?) {
        let text = card.flatMap { String(data: $0, encoding: .utf8) } ?? ""
        let lines = text.trimmingPrefix(while: \.isWhitespace).split(whereSeparator: \.isNewline)
        guard lines.first?.trimmingCharacters(in: .whitespaces) == "---" else { return }
        for line in lines.dropFirst() {
            if line.hasPrefix("---") { break }
            guard let colon = line.firstIndex(of: ":") else { continue }
            let value = Self.scalar(line[line.index(after: colon)...])
            switch line[..<colon] {
            case "license": license = value
            case "license_name": licenseName = value
            case "license_link": licenseLink = value
            default: break
            }
        }
    }

    /// Returns the YAML string in `rest`; nil if the value is of another type, or if the string is invalid, empty or not printable.
    private static func scalar(_ rest: Substring) -> String? {
        var text = rest.trimmingCharacters(in: .whitespaces)
        for quote in ["\"", "'"] where text.hasPrefix(quote) {
            guard let end = text.dropFirst().firstIndex(of: Character(quote)) else { return nil }
            return isLine(String(text[text.index(after: text.startIndex)..<end]))
        }
        if let comment = text.range(of: " #") { text = String(text[..<comment.lowerBound]) }
        text = text.trimmingCharacters(in: .whitespaces)
        let isOther = text.first.map { "[{|>&*!#%@`".contains($0) } ?? true
        let isConstant = ["null", "~", "true", "false", "yes", "no", "on", "off"].contains(text.lowercased())
        let isNumber = text.wholeMatch(of: /[-+.]?[0-9][0-9_.:eE+-]*/) != nil  // or a date
        return isOther || isConstant || isNumber ? nil : isLine(text)
    }

    private static func isLine(_ text: String) -> String? {
        !text.isEmpty && text.isPrintable ? text : nil
    }

    func fields(id: String, revision: String?) -> [String: JSONValue] {
        func value(_ text: String?) -> JSONValue { text.map(JSONValue.string) ?? .null }
        let more = ["license_name": value(licenseName), "license_link": value(licenseLink)].filter { $0.value != .null }
        return ["id": .string(id), "revision": value(revision), "license": value(license)].merging(more) { $1 }
    }
}
