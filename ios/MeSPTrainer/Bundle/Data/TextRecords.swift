import Foundation
import MeSPFiles
import MeSPSentences

/// A message of a conversation to train on.
package struct TrainingMessage: Sendable, Equatable {
    package var message: ChatMessage
    /// Whether it is an answer to learn; of others it says nothing.
    package var isTrained: Bool
    /// Whether it is of a prompt, of which no answer is to be learned where only answers are.
    package var isAsked: Bool

    package init(_ message: ChatMessage, isTrained: Bool = true, isAsked: Bool = false) {
        (self.message, self.isTrained, self.isAsked) = (message, isTrained, isAsked)
    }

    package var isAnswer: Bool { message.role == "assistant" }
}

/// The place of a record, for messages.
package struct RecordPlace: Sendable {
    package enum Kind: Sendable { case line, record, choice }

    /// From 1.
    package let number: Int
    /// Whether a file has a record a line, or is one list of them.
    let kind: Kind
    /// The file's name; nil where the person knows which.
    let file: String?

    package var sentence: Sentence {
        switch (kind, file) {
        case (.line, let file?): "Line \(number) of \(file)"
        case (.record, let file?): "Record \(number) of \(file)"
        case (.line, nil): "Line \(number)"
        case (.record, nil): "Record \(number)"
        case (.choice, _): "Choice \(number)"
        }
    }
}

/// The kinds of files that text is read from, by how their names end, in any letter case.
package enum TextFileKind: Sendable {
    case text
    /// A JSON record a line.
    case lines
    /// A JSON list of records, or a record a line.
    case list

    /// - Throws: `MeSPError` for any other kind.
    package init(of file: URL) throws {
        switch file.pathExtension.lowercased() {
        case "txt", "text", "md", "markdown": self = .text
        case "jsonl", "ndjson": self = .lines
        case "json": self = .list
        default:
            throw MeSPError(
                "\(file.lastPathComponent) is of no kind that is read; take a text as .txt or .md, or records as .jsonl, .ndjson or .json."
            )
        }
    }
}

/// Reads the records of files, in training and in evaluation.
package enum TextRecords {
    /// The records in a file's bytes, with their places. Lines without anything are passed over.
    ///
    /// - Returns: each record's place, and its fields that are not null; no fields where it is not a JSON object.
    package static func objects(
        in data: Data, of file: String?, isList: Bool = true
    ) -> [(place: RecordPlace, fields: [String: JSONValue]?)] {
        if isList, let value = whole(data) {
            return (value.array ?? [value]).enumerated().map { index, value in
                (RecordPlace(number: index + 1, kind: .record, file: file), value.fields)
            }
        }
        var records = [(RecordPlace, [String: JSONValue]?)]()
        for (index, line) in data.split(separator: UInt8(ascii: "\n"), omittingEmptySubsequences: false).enumerated() {
            guard line.contains(where: { $0 > 0x20 }) else { continue }
            let fields = (try? JSONDecoder().decode(JSONValue.self, from: line))?.fields
            records.append((RecordPlace(number: index + 1, kind: .line, file: file), fields))
        }
        return records
    }

    /// All of a file as one value: a list, or one object over several lines; nil where it has a record a line.
    private static func whole(_ data: Data) -> JSONValue? {
        guard let start = data.firstIndex(where: { $0 > 0x20 }) else { return nil }
        func read(_ bytes: Data) -> JSONValue? { try? JSONDecoder().decode(JSONValue.self, from: bytes) }
        let line = data[start...].prefix { $0 != UInt8(ascii: "\n") }
        return data[start] == UInt8(ascii: "[") || read(line) == nil ? read(data) : nil
    }

    // MARK: - Messages

    /// The names that a message's role has elsewhere, with those it has here.
    private static let otherRoles = [
        "model": "assistant", "bot": "assistant", "gpt": "assistant", "chatgpt": "assistant", "ai": "assistant",
        "human": "user", "usr": "user",
    ]
    private static let roles = ["system", "user", "assistant", "developer", "tool"]
    /// Keys of a message that change nothing.
    private static let identifiers: Set = ["id", "name", "tool_call_id"]
    /// Keys that name tools, which no tokens are made of here.
    private static let tools = ["tools", "tool_calls", "functions", "function_call"]
    /// Keys that say whether something is trained; of `masked` the opposite.
    private static let weights = ["weight", "train", "training", "trainable", "loss", "masked"]

    /// The messages in a record's field.
    ///
    /// - Throws: `MeSPError`, which continues the record's place, for what is not a message, and for anything of one that would be lost.
    package static func messages(_ value: JSONValue, in key: String) throws -> [TrainingMessage] {
        guard let list = value.array, !list.isEmpty else {
            throw MeSPError("\"\(key)\" is not a list of messages; write each with \"role\" and \"content\".")
        }
        return try list.map(message)
    }

    private static func message(_ value: JSONValue) throws -> TrainingMessage {
        guard let fields = value.fields else {
            throw MeSPError("a message is not an object; write each with \"role\" and \"content\".")
        }
        guard let given = fields["role"] else {
            throw MeSPError("a message has no \"role\" but \(names(fields)); add \"role\" with who writes it.")
        }
        guard let role = given.string else { throw MeSPError("the \"role\" of a message is not a text; make it one.") }
        try check(role: role)
        try refuseTools(in: fields)
        let isTrained = try isTrained(fields)
        // A weight of 1, which some programs write on every message, asks for nothing.
        if role != "assistant", isTrained, let key = weights.dropFirst().first(where: { fields[$0] != nil }),
            key != "masked"
        {
            throw MeSPError("\"\(key)\" asks to train a message of \(role), and only answers are; remove it.")
        }
        for (key, value) in fields.sorted(by: { $0.key < $1.key }) where !value.isEmpty {
            guard ["role", "content"].contains(key) || identifiers.contains(key) || weights.contains(key) else {
                guard fields["content"] != nil else {
                    throw MeSPError("a message has no \"content\" but \"\(key)\"; name its text \"content\".")
                }
                throw MeSPError("a message has \"\(key)\", which is not read; write it into \"content\", or remove it.")
            }
        }
        guard let content = fields["content"] else {
            if role == "assistant" { throw emptyAnswer }
            throw MeSPError("a message of \(role) has no \"content\"; write it, or remove the message.")
        }
        let text = try self.content(content)
        if role == "assistant", isBlank(text) { throw emptyAnswer }
        return TrainingMessage(ChatMessage(role: role, content: text), isTrained: isTrained)
    }

    package static var noObject: MeSPError { MeSPError("it is not a JSON object; write the record as one.") }

    package static var emptyAnswer: MeSPError {
        MeSPError("an answer is empty; write it, or leave the record out.")
    }

    private static func check(role: String) throws {
        guard !roles.contains(role) else { return }
        let plain = role.lowercased()
        if let other = otherRoles[plain] ?? roles.first(where: { $0 == plain }) {
            throw MeSPError("the role \(role) is not known; write \(other).")
        }
        throw MeSPError("the role \(role) is not known; write system, user, assistant, developer or tool.")
    }

    /// A message's text, of one string or of a list of parts.
    private static func content(_ value: JSONValue) throws -> String {
        if let text = value.string { return text }
        guard let parts = value.array else {
            throw MeSPError("the \"content\" of a message is neither a text nor a list of parts; make it a text.")
        }
        return try parts.map { part in
            if let text = part.string { return text }
            let fields = part.fields ?? [:]
            guard let type = fields["type"]?.string else {
                throw MeSPError("a part of a message has no \"type\"; write its text with the type text.")
            }
            guard ["text", "input_text", "output_text"].contains(type) else {
                throw MeSPError("a message has a part of the type \(type), and only text is trained; remove it.")
            }
            guard let text = fields["text"]?.string else {
                throw MeSPError("a part of a message has no \"text\"; write it, or remove the part.")
            }
            if let key = fields.filter({ !$0.value.isEmpty }).keys.sorted().first(where: {
                !["type", "text"].contains($0)
            }) {
                throw MeSPError("a part of a message has \"\(key)\", which is not read; remove it.")
            }
            return text
        }.joined()
    }

    // MARK: - Keys

    /// Whether the keys of a message or a record that say so leave it in the loss.
    package static func isTrained(_ fields: [String: JSONValue]) throws -> Bool {
        var isTrained = true
        for key in weights {
            let says: Bool
            switch fields[key] {
            case nil: continue
            case .bool(let truth): says = truth
            case .number(1): says = true
            case .number(0): says = false
            default:
                throw MeSPError("\"\(key)\" is neither 1 nor 0, true nor false; other weights are not supported.")
            }
            if says == (key == "masked") { isTrained = false }
        }
        return isTrained
    }

    package static func refuseTools(in fields: [String: JSONValue]) throws {
        for key in tools where fields[key].map({ !$0.isEmpty }) ?? false {
            throw MeSPError("it has \"\(key)\", which the app does not train; train it with mesp on a Mac.")
        }
    }

    /// The keys of a record that are not read, of those that say something.
    package static func unread(_ fields: [String: JSONValue], but known: [String]) -> Set<String> {
        Set(fields.filter { !$0.value.isEmpty }.keys).subtracting(known).subtracting(weights).subtracting(tools)
    }

    static func names(_ fields: [String: JSONValue]) -> String {
        fields.keys.sorted().map { "\"\($0)\"" }.joined(separator: ", ")
    }

    package static func isBlank(_ text: String) -> Bool { !text.contains { !$0.isWhitespace } }
}

/// A file's contents, as they become tokens.
struct TextDocuments: Sendable {
    enum Document: Sendable, Equatable {
        case text(String, isRecord: Bool)
        /// A prompt and its completion, for the chat template where the model has one.
        case answer(String, prompt: String)
        case conversation([TrainingMessage])
    }

    private(set) var documents = [Document]()
    /// Of each document that is a record.
    private(set) var places = [RecordPlace]()
    /// The number of records that ask not to be trained.
    private(set) var leftOut = 0
    /// The keys of records that are not read.
    private(set) var unread = Set<String>()

    init(text: String) { documents = [.text(text, isRecord: false)] }

    /// - Throws: `MeSPError` for the first record that is refused, with how many are.
    init(records data: Data, of file: String, isList: Bool) throws {
        var refusals = Refusals()
        for (place, fields) in TextRecords.objects(in: data, of: file, isList: isList) {
            try refusals.take(place) {
                guard let fields else { throw TextRecords.noObject }
                guard try TextRecords.isTrained(fields) else {
                    leftOut += 1
                    return
                }
                let (document, keys) = try Self.document(fields)
                if let first = documents.first, first.kind != document.kind {
                    throw MeSPError("it is another kind of record than the first; keep one kind.")
                }
                documents.append(document)
                places.append(place)
                unread.formUnion(TextRecords.unread(fields, but: keys))
            }
        }
        try refusals.check()
    }

    /// - Returns: what is read of a source that is not of choices, and its name.
    static func read(_ source: TextData.Source) throws -> (name: Sentence, contents: TextDocuments) {
        switch source {
        case .choices: preconditionFailure("choices are no documents")
        case .text(let text):
            guard !TextRecords.isBlank(text) else { throw MeSPError("There is no text yet.") }
            return ("The text", TextDocuments(text: text))
        case .file(let url):
            let (name, kind) = (url.lastPathComponent, try TextFileKind(of: url))
            guard let data = try? Data(contentsOf: url, options: .mappedIfSafe) else {
                throw MeSPError("\(name) cannot be read.")
            }
            guard let text = String(data: data, encoding: .utf8).map(plain) else {
                throw MeSPError("\(name) is not UTF-8 text; convert it first.")
            }
            guard !TextRecords.isBlank(text) else { throw MeSPError("\(name) has no text in it.") }
            switch kind {
            case .text: return ("\(name)", TextDocuments(text: text))
            case .lines, .list:
                return ("\(name)", try TextDocuments(records: Data(text.utf8), of: name, isList: kind == .list))
            }
        }
    }

    /// A file's text with lines that end as Python reads them, and without the mark that some editors put before it.
    private static func plain(_ text: String) -> String {
        var text = text.replacingOccurrences(of: "\r\n", with: "\n").replacingOccurrences(of: "\r", with: "\n")
        if text.unicodeScalars.first == "\u{FEFF}" { text.unicodeScalars.removeFirst() }
        return text
    }

    private static func document(_ fields: [String: JSONValue]) throws -> (Document, read: [String]) {
        try TextRecords.refuseTools(in: fields)
        let label = fields["completion"] == nil ? nil : "label"
        for key in ["chosen", "rejected", label].compactMap({ $0 }) where fields[key] != nil {
            throw MeSPError(
                "it has \"\(key)\", a preference, which the app does not train of files; train it with mesp on a Mac.")
        }
        if let prompt = fields["prompt"], let completion = fields["completion"] {
            return (try answer(completion, prompt: prompt), ["prompt", "completion"])
        }
        if let messages = fields["messages"], !messages.isEmpty {
            return (.conversation(try TextRecords.messages(messages, in: "messages")), ["messages"])
        }
        if let text = fields["text"] {
            guard let text = text.string else { throw MeSPError("\"text\" is not a text; make it one.") }
            return (.text(text, isRecord: true), ["text"])
        }
        throw MeSPError(
            "it has \(fields.isEmpty ? "nothing" : TextRecords.names(fields)) and no text; records have \"text\", \"prompt\" and \"completion\", or \"messages\"."
        )
    }

    /// A prompt and a completion, each a text or a list of messages. Answers within the prompt are not trained.
    private static func answer(_ completion: JSONValue, prompt: JSONValue) throws -> Document {
        if let prompt = prompt.string, let completion = completion.string {
            if TextRecords.isBlank(completion) { throw TextRecords.emptyAnswer }
            return .answer(completion, prompt: prompt)
        }
        func messages(_ value: JSONValue, _ role: String, _ key: String) throws -> [TrainingMessage] {
            if let text = value.string {
                if role == "assistant", TextRecords.isBlank(text) { throw TextRecords.emptyAnswer }
                return [TrainingMessage(ChatMessage(role: role, content: text))]
            }
            return try TextRecords.messages(value, in: key)
        }
        var asked = try messages(prompt, "user", "prompt")
        for index in asked.indices { asked[index].isAsked = true }
        return .conversation(asked + (try messages(completion, "assistant", "completion")))
    }
}

extension TextDocuments.Document {
    /// A prompt with its completion and a conversation are kinds of their own.
    fileprivate var kind: Int {
        switch self {
        case .text: 0
        case .answer: 1
        case .conversation: 2
        }
    }
}

/// The records that are refused: the first of them is told, with the number of all.
package struct Refusals {
    private var first: Sentence?
    private var count = 0

    package init() {}

    /// Runs `body`, whose `MeSPError` continues the place.
    package mutating func take(_ place: RecordPlace, _ body: () throws -> Void) rethrows {
        do { try body() } catch let error as MeSPError {
            count += 1
            first = first ?? "\(place.sentence): \(error.sentence)."
        }
    }

    /// - Throws: `MeSPError` if there is one.
    package func check() throws {
        guard let first else { return }
        throw MeSPError(count == 1 ? first : "\(first). In all, \(count) records are refused.")
    }
}
