import Foundation

/// Text of one's own to train on in place of the bundle's: tokenized once, and kept in a folder that `RunSettings.data` names.
///
/// A text becomes one packed stream, and so do JSONL records with `text`. Records with `prompt` and `completion`, or with
/// `messages`, go through the chat template and are one example a sequence, cut to the sequence's length. The last tenth is held out. The same
/// rules as `mesp-export --data`.
public struct TextData: Sendable {
    public enum Source: Sendable {
        /// A UTF-8 file; `.jsonl` has a record a line.
        case file(URL)
        case text(String)
    }

    /// The folder's name inside a run.
    package static let folderName = "data"
    /// One part in this many is held out.
    private static let heldOut = 10

    private let tokenizer: any TextTokenizer
    /// T, the tokens of a sequence.
    private let length: Int
    /// Whether only answers count in the loss, of records that have prompts.
    private let answersOnly: Bool

    public init(tokenizer: any TextTokenizer, length: Int, answersOnly: Bool = false) {
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
        let (name, documents) = try Self.read(source)
        var splits: [String: Split]
        if case .text = documents[0] {
            var stream = [UInt32]()
            for (index, document) in documents.enumerated() {
                if case .text(let text) = document {
                    try encode(text, into: &stream) { part in
                        try progress((Double(index) + part) / Double(documents.count))
                    }
                }
            }
            splits = try holdOut(stream, of: name)
        } else {
            guard tokenizer.hasChatTemplate else {
                throw MeSPError(
                    "The model has no chat template, which the records of \(name) need; take an -Instruct model, or write the records as text."
                )
            }
            var examples = [(tokens: [UInt32], prompt: Int)]()
            for (index, document) in documents.enumerated() {
                if let example = try encode(document) { examples.append(example) }
                try progress(Double(index + 1) / Double(documents.count))
            }
            guard examples.count > 1 else {
                throw MeSPError(
                    "\(name) has \(examples.count) usable records, too few to train on and hold out one; give it more.")
            }
            let held = max(examples.count / Self.heldOut, 1)
            splits = [
                "train": Split(examples: examples.dropLast(held)), "valid": Split(examples: examples.suffix(held)),
            ]
        }
        try Self.write(splits, to: folder)
    }

    // MARK: - Reading

    private enum Document {
        case text(String)
        case messages([ChatMessage])
    }

    private static func read(_ source: Source) throws -> (name: String, [Document]) {
        switch source {
        case .text(let text):
            guard text.contains(where: { !$0.isWhitespace }) else { throw MeSPError("There is no text yet.") }
            return ("The text", [.text(text)])
        case .file(let url):
            let name = url.lastPathComponent
            guard let data = try? Data(contentsOf: url, options: .mappedIfSafe) else {
                throw MeSPError("\(name) cannot be read.")
            }
            guard let text = String(data: data, encoding: .utf8) else {
                throw MeSPError("\(name) is not UTF-8 text; convert it first.")
            }
            guard text.contains(where: { !$0.isWhitespace }) else { throw MeSPError("\(name) has no text in it.") }
            guard url.pathExtension.lowercased() == "jsonl" else { return (name, [.text(text)]) }
            return (name, try records(data, name))
        }
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
                documents.append(
                    .messages([.init(role: "user", content: prompt), .init(role: "assistant", content: completion)]))
            } else if let messages = fields.messages, !messages.isEmpty {
                documents.append(.messages(messages))
            } else if let text = fields.text {
                documents.append(.text(text))
            } else {
                throw MeSPError(
                    "Line \(index + 1) of \(name) has no text; records have \"text\", \"prompt\" and \"completion\", or \"messages\"."
                )
            }
            if case .text = documents[0], case .text = documents[documents.count - 1] { continue }
            if case .messages = documents[0], case .messages = documents[documents.count - 1] { continue }
            throw MeSPError("Line \(index + 1) of \(name) is another kind of record than the first; keep one kind.")
        }
        return documents
    }

    // MARK: - Tokenizing

    /// Appends the ids of `text`, tokenized in pieces, and the token that ends a text.
    private func encode(_ text: String, into stream: inout [UInt32], progress: (Double) throws -> Void) throws {
        let before = stream.count
        let pieces = Self.pieces(text)
        for (index, piece) in pieces.enumerated() {
            stream += tokenizer.encode(String(piece)).map { UInt32($0) }
            try progress(Double(index + 1) / Double(pieces.count))
        }
        if let end = tokenizer.endOfText, stream.count > before, stream.last != UInt32(end) {
            stream.append(UInt32(end))
        }
    }

    /// A long text, cut at starts of lines: tokenizing it whole takes much memory, and byte-level BPE cuts there too.
    private static func pieces(_ text: String, size: Int = 1 << 14) -> [Substring] {
        var (pieces, rest) = ([Substring](), text[...])
        while let limit = rest.utf8.index(rest.startIndex, offsetBy: size, limitedBy: rest.endIndex),
            let lineFeed = rest[limit...].firstIndex(where: \.isNewline)
        {
            let cut = rest.index(after: lineFeed)
            pieces.append(rest[..<cut])
            rest = rest[cut...]
        }
        return rest.isEmpty ? pieces : pieces + [rest]
    }

    /// The ids of a conversation and how many of them are context; nil where nothing would be left to train on.
    private func encode(_ document: Document) throws -> (tokens: [UInt32], prompt: Int)? {
        guard case .messages(let messages) = document else { return nil }
        let tokens = try tokenizer.encode(messages, opensAnswer: false).prefix(length + 1).map { UInt32($0) }
        let asks = messages.last?.role == "assistant"
        let prompt =
            answersOnly && messages.count > 1
            ? try tokenizer.encode(messages.dropLast(), opensAnswer: asks).count : 0
        return max(prompt, 1) < tokens.count ? (tokens, prompt) : nil
    }

    // MARK: - Splits

    private struct Split {
        var tokens: [UInt32]
        /// (start, length, prompt) of each example, back to back; nil where the stream is packed.
        var examples: [UInt32]?

        init(tokens: [UInt32]) { self.tokens = tokens }

        init(examples: ArraySlice<(tokens: [UInt32], prompt: Int)>) {
            var (tokens, bounds) = ([UInt32](), [UInt32]())
            for example in examples {
                bounds += [UInt32(tokens.count), UInt32(example.tokens.count), UInt32(example.prompt)]
                tokens += example.tokens
            }
            (self.tokens, self.examples) = (tokens, bounds)
        }
    }

    private func holdOut(_ stream: [UInt32], of name: String) throws -> [String: Split] {
        let held = max(stream.count / Self.heldOut, length + 1)
        guard stream.count >= held + length + 1 else {
            throw MeSPError(
                "\(name) has \(stream.count) tokens, too few to train on and hold out one sequence of \(length) each; give it more text or take shorter sequences."
            )
        }
        return [
            "train": Split(tokens: Array(stream.dropLast(held))), "valid": Split(tokens: Array(stream.suffix(held))),
        ]
    }

    /// What a folder of token files holds, by split.
    static func entries(in folder: URL) throws -> [String: Manifest.Tokens] {
        guard let json = try? Data(contentsOf: folder.appendingPathComponent("data.json")),
            let entries = try? JSONDecoder().decode([String: Manifest.Tokens].self, from: json)
        else { throw MeSPError("\(folder.path) holds no tokens to train on; tokenize the text again.") }
        return entries
    }

    private static func write(_ splits: [String: Split], to folder: URL) throws {
        let partial = folder.deletingLastPathComponent().appendingPathComponent(".partial-\(UUID().uuidString)")
        defer { try? FileManager.default.removeItem(at: partial) }
        func data(_ words: [UInt32]) -> Data { words.map(\.littleEndian).withUnsafeBytes { Data($0) } }
        do {
            try FileManager.default.createDirectory(at: partial, withIntermediateDirectories: true)
            var entries = [String: Manifest.Tokens]()
            for (name, split) in splits {
                let (file, examples) = ("\(name).bin", "\(name).examples.bin")
                try data(split.tokens).write(to: partial.appendingPathComponent(file))
                if let bounds = split.examples {
                    try data(bounds).write(to: partial.appendingPathComponent(examples))
                }
                entries[name] = .init(
                    file: file, tokens: split.tokens.count,
                    examples: split.examples.map { .init(file: examples, count: $0.count / 3) })
            }
            try JSONEncoder().encode(entries).write(to: partial.appendingPathComponent("data.json"))
            try? FileManager.default.removeItem(at: folder)
            try FileManager.default.moveItem(at: partial, to: folder)
        } catch {
            throw MeSPError("Cannot write the tokens to \(folder.path): \(error.plainSentence).")
        }
    }
}
