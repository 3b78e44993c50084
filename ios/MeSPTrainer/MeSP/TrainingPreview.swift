import MeSPBundle
import MeSPSentences

/// The first sequence of some data as it is trained, and what to know of the whole.
public struct TrainingPreview: Sendable, Equatable {
    /// Consecutive tokens that are alike: all trained or none, all special or none.
    public struct Span: Sendable, Equatable, Identifiable {
        /// The index among the spans.
        public let id: Int
        /// The text of the tokens, with a sign for each line end, tab and control character.
        public let text: String
        /// Whether the tokens are in the loss.
        public let isTrained: Bool
        /// Whether the tokens are special, as those that begin and end a message, and no text.
        public let isSpecial: Bool
    }

    /// The sequence, up to its last token in the loss.
    public let spans: [Span]
    /// What was left out, cut or added, a sentence each in the language of the app.
    public var notices: [String] { sentences.map(\.localized) }

    package let sentences: [Sentence]

    package init(_ example: Example, notices: [Sentence] = [], tokenizer: any TextTokenizer) {
        sentences = notices
        // What follows the last token in the loss is padding, or changes nothing.
        let ids = example.tokens.prefix((example.counted.last ?? -1) + 2).map { Int($0) }
        let counted = Set(example.counted.map { $0 + 1 })
        var pieces = [Int: [UInt8]]()
        let text = DecodedText(ids, tokenizer, pieces: &pieces)
        var isSpecial = [Int: Bool]()
        for id in ids where isSpecial[id] == nil { isSpecial[id] = tokenizer.isSpecial(id) }
        var (spans, start) = ([Span](), 0)
        for index in ids.indices {
            let next = index + 1
            let isLast = next == ids.count
            if !isLast, counted.contains(index) == counted.contains(next), isSpecial[ids[index]] == isSpecial[ids[next]]
            {
                continue
            }
            let bytes = text.bytes[text.bounds[start]..<text.bounds[next]]
            spans.append(
                Span(
                    id: spans.count, text: Self.visible(String(decoding: bytes, as: UTF8.self)),
                    isTrained: counted.contains(index), isSpecial: isSpecial[ids[index]] ?? false))
            start = next
        }
        self.spans = spans
    }

    /// A text with a sign before each line end, and in place of what else is not seen.
    private static func visible(_ text: String) -> String {
        var visible = String.UnicodeScalarView()
        for scalar in text.unicodeScalars {
            switch scalar {
            case "\n": visible += "⏎\n".unicodeScalars
            case "\t": visible.append("⇥")
            case let control where control.value < 0x20:
                visible.append(Unicode.Scalar(0x2400 + control.value) ?? control)
            default: visible.append(scalar)
            }
        }
        return String(visible)
    }
}
