import Foundation
import MeSPBundle
import MeSPSentences

/// Encodes texts that people wrote. Special tokens in these texts are encoded as plain text.
///
/// A tokenizer recognizes a special token anywhere in a text. To avoid this, the encoder cuts the text within each special token and encodes the
/// pieces separately. It chooses the cut with the fewest tokens. In a conversation the template's own special tokens stay special.
package struct PlainEncoder {
    private let tokenizer: any TextTokenizer
    /// Other tokens have an empty text here.
    private var specials = [Int: [UInt8]]()
    private var cuts = [[UInt8]: Int]()
    package private(set) var hasSplit = false

    package init(_ tokenizer: any TextTokenizer) { self.tokenizer = tokenizer }

    /// Returns the token ids of `text`.
    ///
    /// - Throws: `MeSPError` if a special token in the text cannot be encoded as plain text.
    package mutating func encode(_ text: String, addsSpecialTokens: Bool) throws -> [Int] {
        let bytes = Array(text.utf8)
        guard !specials(in: bytes).isEmpty else { return tokenizer.encode(text, addsSpecialTokens: addsSpecialTokens) }
        hasSplit = true
        let ids = encode(try pieces(of: bytes))
        guard addsSpecialTokens else { return ids }
        // The ids get the special tokens that the tokenizer puts around a text.
        let (bare, whole) = (
            tokenizer.encode("a", addsSpecialTokens: false), tokenizer.encode("a", addsSpecialTokens: true)
        )
        let start = whole.indices.first { whole[$0...].starts(with: bare) } ?? 0
        return whole[..<start] + ids + whole.dropFirst(start + bare.count)
    }

    package mutating func encode(_ conversation: Conversation, addsGenerationPrompt: Bool) throws -> [Int] {
        func ids(_ conversation: Conversation) throws -> [Int] {
            try conversation.applied(to: tokenizer, addsGenerationPrompt: addsGenerationPrompt)
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
        // The template's text must encode to the template's tokens. The pieces must decode to this text without the marks, and have only the
        // template's special tokens.
        guard tokenizer.encode(text, addsSpecialTokens: false) == rendered,
            specialTexts(of: split) == specialTexts(of: rendered),
            Array(tokenizer.decode(split).utf8) == pieces.flatMap({ $0 })
        else { throw Self.refusal(of: token) }
        return split
    }

    mutating func special(in text: String) -> String? { specials(in: Array(text.utf8)).first.map(Self.string) }

    // MARK: - Special tokens

    private mutating func specialTexts(of ids: [Int]) -> [[UInt8]] {
        ids.map { id in
            if let known = specials[id] { return known }
            let isSpecial = tokenizer.isSpecial(id) || id == tokenizer.beginOfText || id == tokenizer.endOfText
            let text = isSpecial ? Array(tokenizer.decode([id]).utf8) : []
            specials[id] = text
            return text
        }.filter { !$0.isEmpty }
    }

    /// Returns the special tokens that the tokenizer recognizes in a text, the longest first.
    private mutating func specials(in text: [UInt8]) -> [[UInt8]] {
        let ids = tokenizer.encode(Self.string(text), addsSpecialTokens: false)
        return Set(specialTexts(of: ids)).filter { !text.places(of: $0).isEmpty }.sorted { $0.count > $1.count }
    }

    private static func refusal(of token: [UInt8]) -> MeSPError {
        MeSPError("The model's tokenizer cannot take \(string(token)) as text; remove it from the text.")
    }

    // MARK: - Pieces

    /// Cuts a text into pieces without special tokens. `apart` also separates the halves of special tokens from other text.
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

    private mutating func cut(of token: [UInt8]) throws -> Int {
        if let known = cuts[token] { return known }
        var best: (cut: Int, count: Int)?
        // A cut never divides a character.
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

    private func encode(_ pieces: [[UInt8]]) -> [Int] {
        pieces.filter { !$0.isEmpty }.enumerated().flatMap { index, piece in
            let text = Self.string(piece)
            // SentencePiece adds a space before the first word of a text. To avoid this, each piece except the first is encoded after another
            // character, whose ids are then removed. If that character shares a token with the piece, the next character is tried.
            for feed in index == 0 ? [] : ["\n", ":"] {
                let before = tokenizer.encode(feed, addsSpecialTokens: false)
                let ids = tokenizer.encode(feed + text, addsSpecialTokens: false)
                if ids.starts(with: before) { return Array(ids.dropFirst(before.count)) }
            }
            return tokenizer.encode(text, addsSpecialTokens: false)
        }
    }

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
