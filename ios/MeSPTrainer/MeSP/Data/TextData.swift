import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// Tokenizes a text for a run, and writes the tokens to a folder. `RunSettings.data` names this folder.
///
/// Plain text and records with `text` become one stream of tokens, all of them in the loss. A record with `prompt` and `completion`, or with
/// `messages`, becomes one sequence by the chat template, cut to the sequence length. In such a sequence only answers are in the loss, unless
/// `answersOnly` is false. Without a template the completion directly follows the prompt. The last tenth of the data is held out. A record is refused
/// if it has an unsupported field that may matter.
package struct TextData: Sendable {
    package enum Source: Sendable {
        /// A UTF-8 file of a kind in `TextFileKind`.
        case file(URL)
        case text(String)
        case conversations([Conversation])
        /// Preference pairs. Only the answers are in the loss.
        case choices([Choice])
    }

    /// The name of the folder of tokens, within a run's folder.
    package static let folderName = "data"
    /// The name of the folder of the general text's tokens.
    package static let generalName = "general"
    /// An English text, on which a run measures forgetting; nil if the resource is missing.
    package static var generalText: Source? {
        Bundle.module.url(forResource: "general", withExtension: "txt").map { .file($0) }
    }
    /// The sequence length for the general text, in tokens.
    package static let generalLength = 64
    /// The divisor for held-out data: 1/`heldOut` of the data is held out.
    static let heldOut = 10

    let tokenizer: any TextTokenizer
    /// The sequence length, in tokens.
    let length: Int
    /// Whether only answers are in the loss.
    let answersOnly: Bool

    package init(tokenizer: any TextTokenizer, length: Int, answersOnly: Bool = true) {
        (self.tokenizer, self.length, self.answersOnly) = (tokenizer, length, answersOnly)
    }

    /// Tokenizes `source`. Writes `data.json` and the token files to `folder`.
    ///
    /// - Parameters:
    ///   - source: the text.
    ///   - folder: the folder to create or replace.
    ///   - progress: receives the completed fraction, from 0 to 1. It may throw an error to stop.
    /// - Returns: notices about data that was left out, added or cut.
    /// - Throws: `MeSPError`, for example if the text cannot be read, is too short, or has unsuitable records; also the errors of `progress`.
    @discardableResult
    package func write(
        _ source: Source, to folder: URL, progress: (Double) throws -> Void = { _ in }
    ) throws -> DataNotices {
        var notices = DataNotices(length: length)
        let splits: [String: TokenStream]
        if case .choices(let choices) = source {
            splits = try pairs(choices, &notices, progress)
        } else {
            let (name, contents) = try TextDocuments.read(source)
            splits = try self.splits(of: contents, name, &notices, progress)
        }
        try TokenFolder.write(splits, to: folder)
        return notices
    }

    /// Returns the first sequence that `write` would make of `source`, with the notices known so far.
    ///
    /// - Throws: `MeSPError` if `source` cannot be read, or has an unsuitable record. Faults in the tokens of later records are not found.
    package func first(of source: Source) throws -> (example: Example, notices: DataNotices) {
        var notices = DataNotices(length: length)
        if case .choices(let choices) = source {
            try needTemplate()
            var encoder = ConversationEncoder(tokenizer: tokenizer, answersOnly: true)
            for (index, choice) in choices.enumerated() {
                var (found, refusals) = ([Encoded]?.none, RefusedRecords())
                try refusals.collect(RecordPlace(number: index + 1, kind: .choice, file: nil)) {
                    found = try pair(choice, &encoder, &notices)
                }
                try refusals.check()
                if let found { return (Self.example(found[0]), notices) }
            }
            throw Self.tooFew(choices: choices.count, 0, length)
        }
        let (name, contents) = try TextDocuments.read(source)
        notices.take(contents)
        guard let first = contents.documents.first else { throw Self.tooFew(name, 0) }
        if case .text = first {
            let (ids, isWhole) = try stream(of: contents, &notices, upTo: length + 1) { _ in }
            if isWhole { _ = try holdOut(ids, of: name) }
            let start = TokenStream(tokens: Self.data(ids), begin: tokenizer.begin.map(Int.init))
            return (start.sequences(lengths: [length])[0], notices)
        }
        try needTemplate(for: contents, name)
        var encoder = ConversationEncoder(tokenizer: tokenizer, answersOnly: answersOnly)
        var refusals = RefusedRecords()
        for (document, place) in zip(contents.documents, contents.places) {
            var example: Encoded?
            try refusals.collect(place) { example = try encode(document, &encoder, &notices) }
            try refusals.check()
            if let example { return (Self.example(example), notices) }
        }
        throw Self.tooFew(name, 0)
    }

    // MARK: - Texts

    private func splits(
        of contents: TextDocuments, _ name: Sentence, _ notices: inout DataNotices, _ progress: (Double) throws -> Void
    ) throws -> [String: TokenStream] {
        notices.take(contents)
        guard let first = contents.documents.first else { throw Self.tooFew(name, 0) }
        if case .text = first { return try holdOut(stream(of: contents, &notices, progress: progress).ids, of: name) }
        try needTemplate(for: contents, name)
        var (examples, refusals) = ([Encoded](), RefusedRecords())
        var encoder = ConversationEncoder(tokenizer: tokenizer, answersOnly: answersOnly)
        for (index, document) in contents.documents.enumerated() {
            try refusals.collect(contents.places[index]) {
                if let example = try encode(document, &encoder, &notices) { examples.append(example) }
            }
            try progress(Double(index + 1) / Double(contents.documents.count))
        }
        try refusals.check()
        guard examples.count > 1 else { throw Self.tooFew(name, examples.count) }
        let held = max(examples.count / Self.heldOut, 1)
        return ["train": Self.stream(examples.dropLast(held)), "valid": Self.stream(examples.suffix(held))]
    }

    private static func tooFew(_ name: Sentence, _ count: Int) -> MeSPError {
        MeSPError("\(name) has \(count) usable records, too few to train on and hold out one; give it more.")
    }

    /// Returns the token ids of the texts. After each text comes the end-of-text token.
    ///
    /// - Parameter limit: the number of ids at which to stop.
    /// - Returns: the ids, and whether they cover all texts.
    private func stream(
        of contents: TextDocuments, _ notices: inout DataNotices, upTo limit: Int = .max,
        progress: (Double) throws -> Void
    ) throws -> (ids: [UInt32], isWhole: Bool) {
        var (ids, plain) = ([UInt32](), PlainEncoder(tokenizer))
        defer { notices.hasSplit = notices.hasSplit || plain.hasSplit }
        let count = contents.documents.count
        for (index, document) in contents.documents.enumerated() {
            guard case .text(let text, let isRecord) = document else { continue }
            guard ids.count < limit else { return (ids, false) }
            let isWhole = try encode(text, isRecord: isRecord, &plain, upTo: limit, into: &ids) { part in
                try progress((Double(index) + part) / Double(count))
            }
            if !isWhole { return (ids, false) }
        }
        return (ids, true)
    }

    /// Appends the token ids of `text` and the end-of-text token. A record is encoded whole, with the special tokens that the tokenizer adds. Other
    /// text is encoded in pieces, after the begin-of-text token if the tokenizer adds one.
    ///
    /// - Returns: whether the ids cover the whole text.
    private func encode(
        _ text: String, isRecord: Bool, _ plain: inout PlainEncoder, upTo limit: Int, into stream: inout [UInt32],
        progress: (Double) throws -> Void
    ) throws -> Bool {
        let before = stream.count
        let pieces = isRecord ? [text[...]] : Self.pieces(text)
        for (index, piece) in pieces.enumerated() {
            guard stream.count < limit else { return false }
            if index == 0, !isRecord, let begin = tokenizer.begin { stream.append(begin) }
            stream += try plain.encode(String(piece), addsSpecialTokens: isRecord).map { UInt32($0) }
            try progress(Double(index + 1) / Double(pieces.count))
        }
        if let end = tokenizer.endOfText, stream.count > before { stream.append(UInt32(end)) }
        return true
    }

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

    // MARK: - Examples

    typealias Encoded = (tokens: [UInt32], counted: [Bool])

    private func needTemplate(for contents: TextDocuments, _ name: Sentence) throws {
        if case .conversation? = contents.documents.first, !tokenizer.hasChatTemplate {
            throw MeSPError(
                "The model has no chat template, which the messages of \(name) need; take an -Instruct model, or write the records as prompts and answers."
            )
        }
    }

    func needTemplate() throws {
        guard tokenizer.hasChatTemplate else {
            throw MeSPError("The model has no chat template, which choices need; take an -Instruct model.")
        }
    }

    /// Encodes a conversation, or a prompt with its answer. Returns nil if no token can be trained.
    ///
    /// - Throws: `MeSPError` for an unsuitable record.
    private func encode(
        _ document: TextDocuments.Document, _ encoder: inout ConversationEncoder, _ notices: inout DataNotices
    ) throws -> Encoded? {
        switch document {
        case .text: return nil
        case .answer(let answer, let prompt) where !tokenizer.hasChatTemplate:
            let (ids, counted) = try joined(prompt, answer, &notices)
            return cut(ids, counted, &notices)
        case .answer, .conversation:
            guard let conversation = document.conversation else { return nil }
            if answersOnly {
                guard conversation.messages.contains(where: \.isAnswer) else {
                    throw MeSPError(
                        "it has no assistant message; add one, or turn off Learn only from answers."
                    )
                }
                guard !conversation.trained.isEmpty else {
                    notices.leftOut += 1
                    return nil
                }
            }
            let result = try encoder.encode(conversation)
            notices.take(result)
            return cut(result.tokens, result.counted, &notices)
        }
    }

    /// Cuts token ids to the sequence length. Returns nil if no token in the loss remains.
    func cut(_ ids: [Int], _ counted: [Bool], _ notices: inout DataNotices) -> Encoded? {
        let (tokens, kept) = (ids.prefix(length + 1).map { UInt32($0) }, Array(counted.prefix(length + 1)))
        guard kept.dropFirst().contains(true) else {
            notices.tooLong += 1
            return nil
        }
        if counted.dropFirst(kept.count).contains(true) { notices.cut += 1 }
        return (tokens, kept)
    }

    /// Encodes a prompt, its answer and the end-of-text token, without a chat template.
    private func joined(
        _ prompt: String, _ answer: String, _ notices: inout DataNotices
    ) throws -> ([Int], counted: [Bool]) {
        guard let end = tokenizer.endOfText else {
            throw MeSPError("the model has no token that ends a text, so no answer can end; take another model.")
        }
        var plain = PlainEncoder(tokenizer)
        let before = try plain.encode(prompt, addsSpecialTokens: true)
        var ids = before + (try plain.encode(answer, addsSpecialTokens: false))
        var counted = ids.indices.map { $0 >= before.count }
        let whole = try plain.encode(prompt + answer, addsSpecialTokens: true)
        notices.hasSplit = notices.hasSplit || plain.hasSplit
        let text = tokenizer.decode(whole)
        if tokenizer.decode(ids) != text {
            // Encoded separately, the prompt and the answer decode to a text other than that of `whole`, for example with an added space. So the
            // tokens of `whole` are used. A token with characters of both is in the loss.
            var pieces = [Int: [UInt8]]()
            let (read, asked) = (DecodedText(whole, tokenizer, pieces: &pieces), Array(tokenizer.decode(before).utf8))
            let border = zip(read.bytes, asked).prefix { $0 == $1 }.count
            (ids, counted) = (whole, read.tokens(in: border..<read.bytes.count))
        }
        ids.append(end)
        counted.append(true)
        return (ids, answersOnly ? counted : counted.map { _ in true })
    }

    // MARK: - Splits

    private static func example(_ encoded: Encoded) -> Example {
        Example(
            tokens: encoded.tokens.map { Int32(truncatingIfNeeded: $0) },
            counted: encoded.counted.indices.dropFirst().filter { encoded.counted[$0] }.map { $0 - 1 })
    }

    /// Returns a stream of examples. With `inPairs`, chosen and rejected examples alternate.
    static func stream(_ examples: some Sequence<Encoded>, inPairs: Bool = false) -> TokenStream {
        var (tokens, bounds, mask, labels) = ([UInt32](), [UInt32](), Data(), Data())
        for (index, example) in examples.enumerated() {
            bounds += [UInt32(tokens.count), UInt32(example.tokens.count)]
            tokens += example.tokens
            mask += example.counted.map { $0 ? 1 : 0 }
            labels.append((index % 2 == 0 ? TokenStream.Label.chosen : .rejected).rawValue)
        }
        return TokenStream(
            tokens: data(tokens), examples: data(bounds), mask: mask.contains(0) ? mask : nil,
            labels: inPairs ? labels : nil)
    }

    private static func data(_ words: [UInt32]) -> Data {
        words.map(\.littleEndian).withUnsafeBytes { Data($0) }
    }

    private func holdOut(_ stream: [UInt32], of name: Sentence) throws -> [String: TokenStream] {
        let held = max(stream.count / Self.heldOut, length + 1)
        guard stream.count >= held + length + 1 else {
            throw MeSPError(
                "\(name) has \(stream.count) tokens, too few to train on and hold out one sequence of \(length) each; give it more text or take shorter sequences."
            )
        }
        return ["train": stream.dropLast(held), "valid": stream.suffix(held)].mapValues {
            TokenStream(tokens: Self.data(Array($0)), begin: tokenizer.begin.map(Int.init))
        }
    }
}

extension TextTokenizer {
    /// The begin-of-text token that the tokenizer puts before a text; nil if it puts none.
    fileprivate var begin: UInt32? {
        guard let beginOfText, encode("", addsSpecialTokens: true).first == beginOfText else { return nil }
        return UInt32(beginOfText)
    }
}
