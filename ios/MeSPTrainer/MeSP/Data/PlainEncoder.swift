import Foundation
import MeSPBundle
import MeSPSentences

/// Encodes what people wrote, in which a special token is text.
///
/// A tokenizer finds special tokens wherever a text has them. So such a text is encoded in pieces: it is cut within each special token, at
/// the place that makes the fewest tokens. A tokenizer that read the special token as text would mostly end a token there too. In a
/// conversation the template's special tokens stay, and each of a person's is encoded by itself, as by `mesp data
/// --split-special-tokens`.
package struct PlainEncoder {
    private let tokenizer: any TextTokenizer
    /// The text of each special token that was met, and an empty one for each other token.
    private var specials = [Int: [UInt8]]()
    /// Where to cut the text of each special token that was met.
    private var cuts = [[UInt8]: Int]()
    /// Whether a text had special tokens.
    package private(set) var hasSplit = false

    package init(_ tokenizer: any TextTokenizer) { self.tokenizer = tokenizer }

    /// The ids of `text`, as those of `TextTokenizer`.
    ///
    /// - Throws: `MeSPError` where it has a special token that cannot be taken as text.
    package mutating func encode(_ text: String, addsSpecialTokens: Bool) throws -> [Int] {
        let bytes = Array(text.utf8)
        guard !specials(in: bytes).isEmpty else { return tokenizer.encode(text, addsSpecialTokens: addsSpecialTokens) }
        hasSplit = true
        let ids = encode(try pieces(of: bytes))
        guard addsSpecialTokens else { return ids }
        // It gets the special tokens that any other text has around it.
        let (bare, whole) = (
            tokenizer.encode("a", addsSpecialTokens: false), tokenizer.encode("a", addsSpecialTokens: true)
        )
        let start = whole.indices.first { whole[$0...].starts(with: bare) } ?? 0
        return whole[..<start] + ids + whole.dropFirst(start + bare.count)
    }

    /// The ids of a conversation in the chat template, as `TextTokenizer.applyChatTemplate` makes them.
    ///
    /// - Parameter argumentsAreText: whether the template takes the arguments of tool calls as JSON in a string.
    /// - Throws: `MeSPError` where it has a special token that cannot be taken as text, and what the tokenizer throws.
    package mutating func encode(
        _ conversation: Conversation, argumentsAreText: Bool = false, addsGenerationPrompt: Bool
    ) throws -> [Int] {
        func ids(_ conversation: Conversation) throws -> [Int] {
            try conversation.applied(
                to: tokenizer, argumentsAreText: argumentsAreText, addsGenerationPrompt: addsGenerationPrompt)
        }
        let whole = try ids(conversation)
        let known = Set(specialTexts(of: whole))
        var (written, texts) = ([UInt8]?.none, [String]())
        _ = try conversation.mapTexts { _, _, text in
            texts.append(text)
            let bytes = Array(text.utf8)
            written = written ?? known.first { !bytes.places(of: $0).isEmpty }
            return text
        }
        guard let token = written else { return whole }
        hasSplit = true
        let mark = Self.mark(for: texts)
        let marked = try conversation.mapTexts { _, _, text in
            try self.pieces(of: Array(text.utf8), apart: true).map(Self.string).joined(separator: mark)
        }
        let rendered = try ids(marked)
        let text = tokenizer.decode(rendered)
        let pieces = text.components(separatedBy: mark).map { Array($0.utf8) }
        let split = encode(pieces)
        // The text must be as the template writes it, with no special token of a person's.
        guard tokenizer.encode(text, addsSpecialTokens: false) == rendered,
            specialTexts(of: split) == specialTexts(of: rendered),
            Array(tokenizer.decode(split).utf8) == pieces.flatMap({ $0 })
        else { throw Self.refusal(of: token) }
        return split
    }

    /// The text of a special token that the tokenizer finds in a text; nil where there is none.
    mutating func special(in text: String) -> String? { specials(in: Array(text.utf8)).first.map(Self.string) }

    // MARK: - Special tokens

    /// The texts of the special tokens among `ids`, in their order.
    private mutating func specialTexts(of ids: [Int]) -> [[UInt8]] {
        ids.map { id in
            if let known = specials[id] { return known }
            let isSpecial = tokenizer.isSpecial(id) || id == tokenizer.beginOfText || id == tokenizer.endOfText
            let text = isSpecial ? Array(tokenizer.decode([id]).utf8) : []
            specials[id] = text
            return text
        }.filter { !$0.isEmpty }
    }

    /// The texts of special tokens that the tokenizer finds in a text, the longest first. The token for an unknown character is not in it.
    private mutating func specials(in text: [UInt8]) -> [[UInt8]] {
        let ids = tokenizer.encode(Self.string(text), addsSpecialTokens: false)
        return Set(specialTexts(of: ids)).filter { !text.places(of: $0).isEmpty }.sorted { $0.count > $1.count }
    }

    private static func refusal(of token: [UInt8]) -> MeSPError {
        MeSPError("The model's tokenizer cannot take \(string(token)) as text; remove it from the text.")
    }

    // MARK: - Pieces

    /// Cuts a text into pieces, none of which has a special token. With `apart` no piece has a part of a special token and other text.
    private mutating func pieces(of text: [UInt8], apart: Bool = false) throws -> [[UInt8]] {
        var (done, rest) = ([[UInt8]](), [text])
        while let piece = rest.popLast() {
            let found = specials(in: piece)
            if found.isEmpty { done.append(piece) } else { rest += try split(piece, at: found, apart).reversed() }
        }
        return done
    }

    private mutating func split(_ text: [UInt8], at tokens: [[UInt8]], _ apart: Bool) throws -> [[UInt8]] {
        var (pieces, start, place) = ([[UInt8]](), 0, 0)
        func end(at next: Int) {
            // Also an empty piece, so that a token at an end is apart from what a template writes there.
            if next > start || apart { pieces.append(Array(text[start..<next])) }
            start = next
        }
        while place < text.count {
            guard let token = tokens.first(where: { text[place...].starts(with: $0) }) else {
                place += 1
                continue
            }
            if apart { end(at: place) }
            end(at: try place + cut(of: token))
            place += token.count
            if apart { end(at: place) }
        }
        end(at: text.count)
        return pieces
    }

    /// The bytes of a special token before its cut.
    private mutating func cut(of token: [UInt8]) throws -> Int {
        if let known = cuts[token] { return known }
        var best: (cut: Int, count: Int)?
        // Not within a character.
        for cut in token.indices.dropFirst() where token[cut] & 0xC0 != 0x80 {
            let halves = [Array(token[..<cut]), Array(token[cut...])]
            guard specials(in: halves[0]).isEmpty, specials(in: halves[1]).isEmpty else { continue }
            let count = encode(halves).count
            if count < best?.count ?? .max { best = (cut, count) }
        }
        guard let best else { throw Self.refusal(of: token) }
        cuts[token] = best.cut
        return best.cut
    }

    /// The ids of pieces of a text, each encoded by itself.
    private func encode(_ pieces: [[UInt8]]) -> [Int] {
        pieces.filter { !$0.isEmpty }.enumerated().flatMap { index, piece in
            let text = Self.string(piece)
            // SentencePiece puts a space before what begins a text. A character that shares a token with the piece is no help.
            for feed in index == 0 ? [] : ["\n", ":"] {
                let before = tokenizer.encode(feed, addsSpecialTokens: false)
                let ids = tokenizer.encode(feed + text, addsSpecialTokens: false)
                if ids.starts(with: before) { return Array(ids.dropFirst(before.count)) }
            }
            return tokenizer.encode(text, addsSpecialTokens: false)
        }
    }

    /// A word that is in none of these texts.
    private static func mark(for texts: [String]) -> String {
        var mark = "MeSPcut0z"
        var number = 0
        while texts.contains(where: { $0.contains(mark) }) {
            number += 1
            mark = "MeSPcut\(number)z"
        }
        return mark
    }

    private static func string(_ bytes: [UInt8]) -> String { String(decoding: bytes, as: UTF8.self) }
}
