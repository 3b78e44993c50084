import Foundation

/// A text for a person. Logs and programs show it in English, and the screen shows it in the app's language.
///
/// A sentence is written as a literal, `"\(name) has \(count) tokens"`. Xcode derives the key in the String Catalog from the literal: `%@ has %lld
/// tokens`. Whole numbers are `%lld`, and other values are `%@`. A translation may reorder the values, as `%2$lld` and `%1$@`. A sentence within a
/// sentence loses its full stop.
public struct Sentence: ExpressibleByStringInterpolation, Sendable {
    private let key: String
    private let values: [Value]
    /// What the error is about that the sentence describes, or that a sentence within it describes.
    package private(set) var kind: ErrorKind?

    fileprivate enum Value: Sendable {
        case number(Int64)
        case text(String)
        case sentence(Sentence)
    }

    public init(stringLiteral text: String) { self.init(english: text) }

    package init(english: String) { (key, values) = (english, []) }

    public init(stringInterpolation literal: Interpolation) {
        (key, values, kind) = (literal.key, literal.values, literal.kind)
    }

    /// Returns the sentence with a kind of error.
    package func about(_ kind: ErrorKind?) -> Sentence {
        var sentence = self
        sentence.kind = kind ?? self.kind
        return sentence
    }

    package var english: String { filled(key, locale: nil) { $0.english } }

    /// The sentence in the app's language; in English if the table `Sentences` of the main bundle has no translation.
    public var localized: String { localized(by: .main) }

    package func localized(by bundle: Bundle) -> String {
        filled(bundle.localizedString(forKey: key, value: nil, table: "Sentences"), locale: .current) {
            $0.localized(by: bundle)
        }
    }

    private func filled(_ format: String, locale: Locale?, _ words: (Sentence) -> String) -> String {
        // Without values the key is not a format, so a % stays a %.
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

    public struct Interpolation: StringInterpolationProtocol {
        fileprivate var key = ""
        fileprivate var values = [Value]()
        fileprivate var kind: ErrorKind?

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

        public mutating func appendInterpolation(_ sentence: Sentence) {
            kind = kind ?? sentence.kind
            append("%@", .sentence(sentence))
        }

        private mutating func append(_ specifier: String, _ value: Value) {
            key += specifier
            values.append(value)
        }
    }
}

extension Sentence: Equatable {
    public static func == (one: Sentence, other: Sentence) -> Bool { one.english == other.english }
}

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
