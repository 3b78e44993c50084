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
    /// Cuts a long text at starts of lines, because tokenizing the whole text at once takes much memory. Each line begins with a word, or with one
    /// space and a word.
    static func pieces(_ text: String, size: Int = TokenFolder.pieceSize) -> [Substring] {
        var (pieces, rest) = ([Substring](), text[...])
        while let limit = rest.unicodeScalars.index(rest.startIndex, offsetBy: size, limitedBy: rest.endIndex),
            let line = rest[limit...].firstMatch(of: /\n(?= ?\S)/.matchingSemantics(.unicodeScalar))
        {
            pieces.append(rest[..<line.range.upperBound])
            rest = rest[line.range.upperBound...]
        }
        return rest.isEmpty ? pieces : pieces + [rest]
    }
}

extension TextTokenizer {
    /// The begin-of-text token that the tokenizer puts before a text; nil if it puts none.
    var begin: Int? { encode("", addsSpecialTokens: true).first.flatMap { $0 == beginOfText ? $0 : nil } }
}
