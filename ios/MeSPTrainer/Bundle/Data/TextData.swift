import Foundation
import MeSPFiles
import MeSPSentences

/// Text of your own to train on in place of the bundle's: tokenized once, and kept in a folder that `RunSettings.data` names.
///
/// A text becomes one packed stream, and so do JSONL records with `text`. Records with `prompt` and `completion`, or with
/// `messages`, go through the chat template and are one example a sequence, cut to the sequence's length; their answers alone are in the
/// loss, unless all is asked for. Without a template a completion follows its prompt as both are written. The last tenth is held out. The
/// same rules as `mesp-export --data`.
public struct TextData: Sendable {
    public enum Source: Sendable {
        /// A UTF-8 file; `.jsonl` has a record a line.
        case file(URL)
        case text(String)
        /// Pairs of answers, for a run with an objective; the answers alone count, as with `mesp-export --data`.
        case choices([Choice])
    }

    /// The folder's name inside a run.
    package static let folderName = "data"
    /// That of the run's general text.
    package static let generalName = "general"
    /// One part in this many is held out.
    private static let heldOut = 10

    private let tokenizer: any TextTokenizer
    /// T, the tokens of a sequence.
    private let length: Int
    /// Whether only answers count in the loss, of records that have some.
    private let answersOnly: Bool

    public init(tokenizer: any TextTokenizer, length: Int, answersOnly: Bool = true) {
        (self.tokenizer, self.length, self.answersOnly) = (tokenizer, length, answersOnly)
    }

    /// Tokenizes `source` and writes `data.json` and token files to `folder`, all or nothing.
    ///
    /// - Parameters:
    ///   - source: the text.
    ///   - folder: is made, or replaced.
    ///   - progress: gets the part that is done, from 0 to 1. May throw to end it.
    /// - Throws: `MeSPError` where the text cannot be read or is too short, and what `progress` throws.
    public func write(_ source: Source, to folder: URL, progress: (Double) throws -> Void = { _ in }) throws {
        if case .choices(let choices) = source { return try Self.write(pairs(choices, progress), to: folder) }
        let (name, documents) = try Self.read(source)
        let splits: [String: TokenStream]
        if case .text = documents[0] {
            var stream = [UInt32]()
            for (index, document) in documents.enumerated() {
                if case .text(let text, let isRecord) = document {
                    try encode(text, isRecord: isRecord, into: &stream) { part in
                        try progress((Double(index) + part) / Double(documents.count))
                    }
                }
            }
            splits = try holdOut(stream, of: name)
        } else {
            if case .messages = documents[0], !tokenizer.hasChatTemplate {
                throw MeSPError(
                    "The model has no chat template, which the messages of \(name) need; take an -Instruct model, or write the records as prompts and answers."
                )
            }
            var examples = [Encoded]()
            let end = answersOnly && tokenizer.hasChatTemplate ? try endOfAnswers() : []
            for (index, document) in documents.enumerated() {
                if let example = try encode(document, end, name) { examples.append(example) }
                try progress(Double(index + 1) / Double(documents.count))
            }
            guard examples.count > 1 else {
                throw MeSPError(
                    "\(name) has \(examples.count) usable records, too few to train on and hold out one; give it more.")
            }
            let held = max(examples.count / Self.heldOut, 1)
            splits = [
                "train": Self.stream(examples.dropLast(held)), "valid": Self.stream(examples.suffix(held)),
            ]
        }
        try Self.write(splits, to: folder)
    }

    // MARK: - Reading

    private enum Document {
        case text(String, isRecord: Bool)
        case answer(String, prompt: String)
        case messages([ChatMessage])
    }

    private static func read(_ source: Source) throws -> (name: Sentence, [Document]) {
        switch source {
        case .choices: preconditionFailure("choices are no documents")
        case .text(let text):
            guard text.contains(where: { !$0.isWhitespace }) else { throw MeSPError("There is no text yet.") }
            return ("The text", [.text(text, isRecord: false)])
        case .file(let url):
            let name = url.lastPathComponent
            guard let data = try? Data(contentsOf: url, options: .mappedIfSafe) else {
                throw MeSPError("\(name) cannot be read.")
            }
            guard let text = String(data: data, encoding: .utf8).map(plain) else {
                throw MeSPError("\(name) is not UTF-8 text; convert it first.")
            }
            guard text.contains(where: { !$0.isWhitespace }) else { throw MeSPError("\(name) has no text in it.") }
            guard url.pathExtension.lowercased() == "jsonl" else {
                return ("\(name)", [.text(text, isRecord: false)])
            }
            return ("\(name)", try records(Data(text.utf8), name))
        }
    }

    /// A file's text with lines that end as Python reads them, and without the mark that some editors put before it.
    private static func plain(_ text: String) -> String {
        var text = text.replacingOccurrences(of: "\r\n", with: "\n").replacingOccurrences(of: "\r", with: "\n")
        if text.unicodeScalars.first == "\u{FEFF}" { text.unicodeScalars.removeFirst() }
        return text
    }

    private struct Fields: Decodable {
        let text: String?
        let prompt: String?
        let completion: String?
        let messages: [ChatMessage]?
    }

    private static func records(_ data: Data, _ name: String) throws -> [Document] {
        var documents = [Document]()
        for (index, line) in data.split(separator: UInt8(ascii: "\n"), omittingEmptySubsequences: false).enumerated() {
            guard line.contains(where: { $0 > 0x20 }) else { continue }
            guard let fields = try? JSONDecoder().decode(Fields.self, from: line) else {
                throw MeSPError("Line \(index + 1) of \(name) is not a JSON record of text.")
            }
            if let prompt = fields.prompt, let completion = fields.completion {
                documents.append(.answer(completion, prompt: prompt))
            } else if let messages = fields.messages, !messages.isEmpty {
                documents.append(.messages(messages))
            } else if let text = fields.text {
                documents.append(.text(text, isRecord: true))
            } else {
                throw MeSPError(
                    "Line \(index + 1) of \(name) has no text; records have \"text\", \"prompt\" and \"completion\", or \"messages\"."
                )
            }
            switch (documents[0], documents[documents.count - 1]) {
            case (.text, .text), (.answer, .answer), (.messages, .messages): continue
            default:
                throw MeSPError("Line \(index + 1) of \(name) is another kind of record than the first; keep one kind.")
            }
        }
        return documents
    }

    // MARK: - Tokenizing

    /// Appends the ids of `text` and the token that ends a text. That of a file is tokenized in pieces; a record's is begun as the model's
    /// texts are, as mlx-lm does it.
    private func encode(
        _ text: String, isRecord: Bool, into stream: inout [UInt32], progress: (Double) throws -> Void
    ) throws {
        let before = stream.count
        if !isRecord, !text.isEmpty, let begin = tokenizer.begin { stream.append(begin) }
        let pieces = isRecord ? [text[...]] : Self.pieces(text)
        for (index, piece) in pieces.enumerated() {
            stream += tokenizer.encode(String(piece), addsSpecialTokens: isRecord).map { UInt32($0) }
            try progress(Double(index + 1) / Double(pieces.count))
        }
        if let end = tokenizer.endOfText, stream.count > before, stream.last != UInt32(end) {
            stream.append(UInt32(end))
        }
    }

    /// A long text, cut at starts of lines: tokenizing it whole takes much memory, and byte-level BPE cuts there too.
    static func pieces(_ text: String, size: Int = 1 << 14) -> [Substring] {
        var (pieces, rest) = ([Substring](), text[...])
        while let limit = rest.unicodeScalars.index(rest.startIndex, offsetBy: size, limitedBy: rest.endIndex),
            let cut = startOfLine(in: rest.unicodeScalars[limit...])
        {
            pieces.append(rest[..<cut])
            rest = rest[cut...]
        }
        return rest.isEmpty ? pieces : pieces + [rest]
    }

    /// After the first line feed before what is not white space but for one space; nil if there is none.
    private static func startOfLine(in text: Substring.UnicodeScalarView) -> String.Index? {
        var rest = text
        while let lineFeed = rest.firstIndex(of: "\n") {
            rest = rest[rest.index(after: lineFeed)...]
            let word = rest.first == " " ? rest.dropFirst() : rest
            if let first = word.first, !first.properties.isWhitespace { return rest.startIndex }
        }
        return nil
    }

    /// Tokens, and which of them are in the loss.
    private typealias Encoded = (tokens: [UInt32], counted: [Bool])

    /// A conversation, or an answer with its prompt; nil where nothing would be left to train on.
    private func encode(_ document: Document, _ end: [Int], _ name: Sentence) throws -> Encoded? {
        let whole: [Int]
        var counted: [Bool]
        switch document {
        case .text: return nil
        case .answer(let answer, let prompt) where !tokenizer.hasChatTemplate:
            whole = joined(prompt, answer)
            let context = tokenizer.encode(prompt, addsSpecialTokens: true).count
            counted = whole.indices.map { $0 >= context }
        case .answer(let answer, let prompt):
            let messages = [ChatMessage(role: "user", content: prompt), .init(role: "assistant", content: answer)]
            return try encode(.messages(messages), end, name)
        case .messages(let messages):
            whole = try tokenizer.encode(messages, opensAnswer: false)
            counted = answersOnly ? try answers(messages, in: whole, end, name) : []
        }
        if !answersOnly { counted = [Bool](repeating: true, count: whole.count) }
        let (tokens, kept) = (whole.prefix(length + 1).map { UInt32($0) }, Array(counted.prefix(length + 1)))
        return kept.dropFirst().contains(true) ? (tokens, kept) : nil
    }

    /// A prompt with the answer right after it and the token that ends a text.
    private func joined(_ prompt: String, _ answer: String) -> [Int] {
        let ids = tokenizer.encode(prompt + answer, addsSpecialTokens: true)
        guard let end = tokenizer.endOfText, ids.last != end else { return ids }
        return ids + [end]
    }

    /// Two examples a choice, the chosen answer's right before the rejected one's. A choice whose prompt leaves no room for an answer is
    /// left out.
    private func pairs(_ choices: [Choice], _ progress: (Double) throws -> Void) throws -> [String: TokenStream] {
        guard tokenizer.hasChatTemplate else {
            throw MeSPError("The model has no chat template, which choices need; take an -Instruct model.")
        }
        var pairs = [[Encoded]]()
        for (index, choice) in choices.enumerated() {
            let asked = try tokenizer.encode(choice.prompt, opensAnswer: true)
            let pair = try [choice.chosen, choice.rejected].compactMap { answer -> Encoded? in
                let messages = choice.prompt + [ChatMessage(role: "assistant", content: answer)]
                let ids = try tokenizer.encode(messages, opensAnswer: false)
                let context = zip(asked, ids).prefix { $0 == $1 }.count
                let tokens = ids.prefix(length + 1).map { UInt32($0) }
                return context < tokens.count ? (tokens, tokens.indices.map { $0 >= context }) : nil
            }
            if pair.count == 2 { pairs.append(pair) }
            try progress(Double(index + 1) / Double(choices.count))
        }
        guard pairs.count > 1 else {
            throw MeSPError(
                "Of \(choices.count) choices \(pairs.count) fit sequences of \(length) tokens, too few to train on and hold out one; make some more."
            )
        }
        let held = max(pairs.count / Self.heldOut, 1)
        return [
            "train": Self.stream(pairs.dropLast(held).joined(), inPairs: true),
            "valid": Self.stream(pairs.suffix(held).joined(), inPairs: true),
        ]
    }

    /// Which of a conversation's ids are of its answers: what the template writes of each after what asks for it, with what ends it.
    private func answers(_ messages: [ChatMessage], in ids: [Int], _ end: [Int], _ name: Sentence) throws -> [Bool] {
        var (counted, stop) = ([Bool](repeating: false, count: ids.count), 0)
        for (index, message) in messages.enumerated() where message.role == "assistant" {
            // No template can be asked to begin a conversation.
            let before = index > 0 ? Array(messages.prefix(index)) : [ChatMessage(role: "user", content: "x")]
            let asked = try tokenizer.encode(before, opensAnswer: true)
            let same = zip(asked, try tokenizer.encode(before, opensAnswer: false)).prefix { $0 == $1 }.count
            // As far as the whole agrees with what asks: a template may ask for thoughts that it then leaves out.
            var start: Int? = zip(asked, ids).prefix { $0 == $1 }.count
            // With thoughts left out before, or nothing before.
            if let agreed = start, agreed < same { start = find(Array(asked[same...]), in: ids, since: stop) }
            let last = index + 1 == messages.count
            guard let start, let next = last ? ids.count : find(end, in: ids, since: start) else {
                throw MeSPError(
                    "The chat template rewrites conversations, so the answers of \(name) cannot be located; train on all of it."
                )
            }
            counted.replaceSubrange(start..<next, with: repeatElement(true, count: next - start))
            stop = next
        }
        return counted
    }

    /// The text that the template writes after each answer.
    private func endOfAnswers() throws -> [Int] {
        func tail(_ others: [ChatMessage]) throws -> [Int] {
            let question = ChatMessage(role: "user", content: "x")
            let (x, y) = (
                try tokenizer.encode([question, .init(role: "assistant", content: "x")] + others, opensAnswer: false),
                try tokenizer.encode([question, .init(role: "assistant", content: "y")] + others, opensAnswer: false)
            )
            return x.suffix(zip(x.reversed(), y.reversed()).prefix { $0 == $1 }.count)
        }
        return zip(try tail([]), try tail([.init(role: "user", content: "x")])).prefix { $0 == $1 }.map(\.0)
    }

    /// The end of the first place of `part` in `ids` from an index on; nil if there is none, or no part.
    private func find(_ part: [Int], in ids: [Int], since start: Int) -> Int? {
        guard !part.isEmpty, start + part.count <= ids.count else { return nil }
        return (start...(ids.count - part.count)).first { ids[$0..<($0 + part.count)].elementsEqual(part) }
            .map { $0 + part.count }
    }

    // MARK: - Splits

    /// Examples back to back, or pairs of a chosen one and a rejected one.
    private static func stream(_ examples: some Sequence<Encoded>, inPairs: Bool = false) -> TokenStream {
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

    /// The token files of a folder, by split.
    static func entries(in folder: URL) throws -> [String: Manifest.Tokens] {
        guard let json = regularFile(folder.appendingPathComponent("data.json")), json.count <= Manifest.largestSize,
            let entries = try? JSONDecoder().decode([String: Manifest.Tokens].self, from: json),
            entries.values.allSatisfy({ $0.files.allSatisfy { isPath($0, within: folder) } })
        else { throw MeSPError("\(folder.path) holds no tokens to train on; tokenize the text again.") }
        return entries
    }

    private static func write(_ splits: [String: TokenStream], to folder: URL) throws {
        let partial = folder.deletingLastPathComponent().appendingPathComponent(".partial-\(UUID().uuidString)")
        defer { try? FileManager.default.removeItem(at: partial) }
        do {
            try FileManager.default.createDirectory(at: partial, withIntermediateDirectories: true)
            var entries = [String: Manifest.Tokens]()
            for (name, split) in splits {
                let (file, examples) = ("\(name).bin", "\(name).examples.bin")
                let (mask, labels) = ("\(name).mask.bin", "\(name).labels.bin")
                let files: [(String, Data?)] = [
                    (file, split.tokens), (examples, split.examples), (mask, split.mask), (labels, split.labels),
                ]
                for (file, data) in files { try data?.write(to: partial.appendingPathComponent(file)) }
                entries[name] = .init(
                    file: file, tokens: split.tokenCount,
                    examples: split.examples.map { .init(file: examples, count: $0.count / 8) },
                    mask: split.mask.map { _ in mask }, labels: split.labels.map { _ in labels },
                    begin: split.begin, pack: nil)
            }
            try JSONEncoder().encode(entries).write(to: partial.appendingPathComponent("data.json"))
            try? FileManager.default.removeItem(at: folder)
            try FileManager.default.moveItem(at: partial, to: folder)
        } catch {
            throw MeSPError("Cannot write the tokens to \(folder.path): \(error.plainSentence).")
        }
    }
}

extension TextTokenizer {
    /// The token that it puts before a text; nil where it puts none.
    fileprivate var begin: UInt32? {
        guard let beginOfText, encode("", addsSpecialTokens: true).first == beginOfText else { return nil }
        return UInt32(beginOfText)
    }
}
