import MeSPBundle
import MeSPSentences

extension RecordEncoder {
    /// Encodes a prompt, its answer and the end-of-text token, without a chat template.
    mutating func join(_ prompt: String, _ answer: String) throws -> Encoded {
        guard let end = tokenizer.endOfText else {
            throw MeSPError("the model has no token that ends a text, so no answer can end; take another model.")
        }
        let before = try plain.encode(prompt, addsSpecialTokens: true)
        var ids = before + (try plain.encode(answer, addsSpecialTokens: false))
        var counted = ids.indices.map { $0 >= before.count }
        let whole = try plain.encode(prompt + answer, addsSpecialTokens: true)
        let text = tokenizer.decode(whole)
        if tokenizer.decode(ids) != text {
            // Encoded separately, the prompt and the answer decode to a text other than that of `whole`, for example with an added space. So the
            // tokens of `whole` are used. A token with characters of both is in the loss.
            let (read, asked) = (decoded(whole), Array(tokenizer.decode(before).utf8))
            let border = zip(read.bytes, asked).prefix { $0 == $1 }.count
            (ids, counted) = (whole, read.tokens(in: border..<read.bytes.count))
        }
        return Encoded(
            tokens: (ids + [end]).map { UInt32($0) }, counted: (counted + [true]).map { $0 || !answersOnly })
    }
}

extension TextRecord {
    /// Cuts a long text at starts of lines, because tokenizing the whole text at once takes much memory.
    static func pieces(_ text: String, size: Int = TokenFolder.pieceSize) -> [Substring] {
        var (pieces, rest) = ([Substring](), text[...])
        while let limit = rest.unicodeScalars.index(rest.startIndex, offsetBy: size, limitedBy: rest.endIndex),
            let cut = startOfLine(in: rest.unicodeScalars[limit...])
        {
            pieces.append(rest[..<cut])
            rest = rest[cut...]
        }
        return rest.isEmpty ? pieces : pieces + [rest]
    }

    /// Returns the start of the next line that begins with a word, or with one space and a word; nil if there is none.
    private static func startOfLine(in text: Substring.UnicodeScalarView) -> String.Index? {
        var rest = text
        while let lineFeed = rest.firstIndex(of: "\n") {
            rest = rest[rest.index(after: lineFeed)...]
            let word = rest.first == " " ? rest.dropFirst() : rest
            if let first = word.first, !first.properties.isWhitespace { return rest.startIndex }
        }
        return nil
    }
}

extension TextTokenizer {
    /// The begin-of-text token that the tokenizer puts before a text; nil if it puts none.
    var begin: Int? { encode("", addsSpecialTokens: true).first.flatMap { $0 == beginOfText ? $0 : nil } }
}
