import MeSPBundle
import MeSPSentences

/// The first training sequence of some data, with notices about the data.
public struct TrainingPreview: Sendable, Equatable {
    /// Consecutive tokens of one kind. All or none are in the loss, and all or none are special.
    public struct Span: Sendable, Equatable, Identifiable {
        /// The index among the spans.
        public let id: Int
        /// The text of the tokens. Line ends, tabs and other invisible characters have visible signs.
        public let text: String
        /// Whether the tokens are in the loss.
        public let isTrained: Bool
        /// Whether the tokens are special, such as the end-of-message token.
        public let isSpecial: Bool

        /// Creates a span, for example for a test.
        public init(id: Int, text: String, isTrained: Bool = true, isSpecial: Bool = false) {
            (self.id, self.text, self.isTrained, self.isSpecial) = (id, text, isTrained, isSpecial)
        }
    }

    /// The sequence, up to its last token in the loss.
    public let spans: [Span]
    /// Notices about the data, one sentence each, in the app's language.
    public var notices: [String] { sentences.map(\.localized) }

    /// The records that are left out because they cannot be trained, with ``TrainingOptions/leavesOutInvalidRecords``.
    public let leftOut: [InvalidRecord]

    package let sentences: [Sentence]

    /// Creates a preview, for example for a test.
    public init(spans: [Span], notices: [String] = [], leftOut: [InvalidRecord] = []) {
        (self.spans, self.leftOut, sentences) = (spans, leftOut, notices.map { Sentence(english: $0) })
    }

    package init(
        _ example: Example, notices: [Sentence] = [], leftOut: [InvalidRecord] = [], tokenizer: any TextTokenizer
    ) {
        (sentences, self.leftOut) = (notices, leftOut)
        // `counted` has the position before each token in the loss. Tokens after the last one in the loss are left out.
        let ids = example.tokens.prefix((example.counted.last ?? -1) + 2).map { Int($0) }
        let counted = Set(example.counted.map { $0 + 1 })
        var pieces = [Int: [UInt8]]()
        let text = DecodedText(ids, tokenizer, pieces: &pieces)
        var isSpecial = [Int: Bool]()
        for id in ids where isSpecial[id] == nil { isSpecial[id] = tokenizer.isSpecial(id) }
        // An image shows as one of its image tokens.
        let rows = Set(example.images?.positions ?? [])
        var (spans, start) = ([Span](), 0)
        for index in ids.indices {
            let next = index + 1
            let isLast = next == ids.count
            if !isLast, counted.contains(index) == counted.contains(next), isSpecial[ids[index]] == isSpecial[ids[next]]
            {
                continue
            }
            let bytes = (start..<next).filter { !rows.isSuperset(of: [$0 - 1, $0]) }
                .flatMap { text.bytes[text.bounds[$0]..<text.bounds[$0 + 1]] }
            spans.append(
                Span(
                    id: spans.count, text: Self.visible(String(decoding: bytes, as: UTF8.self)),
                    isTrained: counted.contains(index), isSpecial: isSpecial[ids[index]] ?? false))
            start = next
        }
        self.spans = spans
    }

    /// Returns the text with signs for what is invisible: one before each line end, one in place of each tab and each other control character below
    /// U+0020, and an escape such as `\u{200B}` in place of other characters.
    private static func visible(_ text: String) -> String {
        text.unicodeScalars.reduce(into: "") { visible, scalar in
            switch scalar {
            case "\n": visible += "⏎\n"
            case "\t": visible += "⇥"
            case _ where scalar.isPrinted: visible.unicodeScalars.append(scalar)
            case let control where control.value < 0x20:
                visible.unicodeScalars.append(Unicode.Scalar(0x2400 + control.value) ?? control)
            default: visible += "\\u{\(String(scalar.value, radix: 16, uppercase: true))}"
            }
        }
    }
}

/// A conversation, a choice or a record of a file that cannot be trained.
public struct InvalidRecord: Sendable, Equatable {
    /// The index among the conversations, the choices or the file's records or lines, from 0.
    public let index: Int
    /// The reason, in the app's language.
    public let reason: String

    /// Creates an invalid record, for example for a test.
    public init(index: Int, reason: String) { (self.index, self.reason) = (index, reason) }

    init(place: RecordPlace, reason: Sentence) { self.init(index: place.number - 1, reason: reason.localized) }
}
