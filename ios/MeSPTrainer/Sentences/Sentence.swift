import Foundation

/// Words for a person: in English for logs and programs, and for the screen as the app's String Catalog has them.
///
/// Written as a literal, `"\(name) has \(count) tokens"`. Its key in the catalogue is the one that Xcode makes of such a literal,
/// `%@ has %lld tokens`: whole numbers are `%lld`, so that a translation can vary by them, and everything else is `%@`. A translation may
/// put them in another order, as `%2$lld` and `%1$@`. A sentence within a sentence is in the language of the whole, and goes without its
/// full stop.
public struct Sentence: ExpressibleByStringInterpolation, Sendable {
    private let key: String
    private let values: [Value]

    fileprivate enum Value: Sendable {
        case number(Int64)
        case text(String)
        case sentence(Sentence)
    }

    public init(stringLiteral text: String) { self.init(english: text) }

    /// - Parameter english: the words of a sentence that was written to a file. The catalogue has them where it was one without values.
    package init(english: String) { (key, values) = (english, []) }

    public init(stringInterpolation literal: Interpolation) { (key, values) = (literal.key, literal.values) }

    /// The English words, whatever the language of the app.
    package var english: String { filled(key, locale: nil) { $0.english } }

    /// The words in the language of the app, or in English where the table `Sentences` of the main bundle has none.
    public var localized: String { localized(by: .main) }

    /// - Parameter bundle: has the table.
    package func localized(by bundle: Bundle) -> String {
        filled(bundle.localizedString(forKey: key, value: nil, table: "Sentences"), locale: .current) {
            $0.localized(by: bundle)
        }
    }

    private func filled(_ format: String, locale: Locale?, _ words: (Sentence) -> String) -> String {
        // As Xcode has it, a key without values is no format: a % in it is a %.
        guard !values.isEmpty else { return format }
        let arguments = values.map { value -> any CVarArg in
            switch value {
            case .number(let number): number
            case .text(let text): NSString(string: text)
            case .sentence(let sentence): NSString(string: words(sentence).withoutFullStop)
            }
        }
        return String(format: format, locale: locale, arguments: arguments)
    }

    /// Collects the key and the values of a literal.
    public struct Interpolation: StringInterpolationProtocol {
        fileprivate var key = ""
        fileprivate var values = [Value]()

        public init(literalCapacity: Int, interpolationCount: Int) {}

        public mutating func appendLiteral(_ literal: String) {
            key += literal.replacingOccurrences(of: "%", with: "%%")
        }

        public mutating func appendInterpolation<Number: BinaryInteger>(_ number: Number) {
            append("%lld", .number(Int64(clamping: number)))
        }

        public mutating func appendInterpolation<Text: CustomStringConvertible>(_ text: Text) {
            append("%@", .text(text.description))
        }

        public mutating func appendInterpolation(_ sentence: Sentence) { append("%@", .sentence(sentence)) }

        private mutating func append(_ specifier: String, _ value: Value) {
            key += specifier
            values.append(value)
        }
    }
}

/// Equal are those that say the same.
extension Sentence: Equatable {
    public static func == (one: Sentence, other: Sentence) -> Bool { one.english == other.english }
}

/// In files it is the English words.
extension Sentence: Codable {
    public init(from decoder: any Decoder) throws {
        self.init(english: try decoder.singleValueContainer().decode(String.self))
    }

    public func encode(to encoder: any Encoder) throws {
        var container = encoder.singleValueContainer()
        try container.encode(english)
    }
}

extension String {
    fileprivate var withoutFullStop: String { hasSuffix(".") ? String(dropLast()) : self }
}
