import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// The kinds of text files.
package enum TextFileKind: Sendable {
    case text
    /// A JSON record on each line.
    case lines
    /// A JSON list of records, or a record on each line.
    case list

    /// Returns the kind by the file's extension, in any letter case.
    ///
    /// - Throws: `MeSPError` for an unknown extension.
    package init(of file: URL) throws {
        switch file.pathExtension.lowercased() {
        case "txt", "text", "md", "markdown": self = .text
        case "jsonl", "ndjson": self = .lines
        case "json": self = .list
        default:
            throw MeSPError(
                "\(file.lastPathComponent) is a kind of file that is not read; take a text as .txt or .md, or records as .jsonl, .ndjson or .json."
            )
        }
    }
}

struct TextDocuments: Sendable {
    enum Document: Sendable, Equatable {
        case text(String, isRecord: Bool)
        case answer(String, prompt: String)
        case conversation(Conversation)
    }

    private(set) var documents = [Document]()
    /// The places of the records, in the order of `documents`.
    private(set) var places = [RecordPlace]()
    /// The number of records that are excluded from training by a key.
    private(set) var leftOut = 0
    /// The ignored keys of the records.
    private(set) var unread = Set<String>()

    init(text: String) { documents = [.text(text, isRecord: false)] }

    /// Reads records.
    ///
    /// - Throws: `MeSPError` with the first refused record, and with the number of refused records if there are several.
    init(_ records: [(place: RecordPlace, fields: [String: JSONValue]?)]) throws {
        var refusals = RefusedRecords()
        for (place, fields) in records {
            try refusals.collect(place) {
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

    /// Reads a source other than choices.
    ///
    /// - Returns: the source's name and its documents.
    static func read(_ source: TextData.Source) throws -> (name: Sentence, contents: TextDocuments) {
        switch source {
        case .choices: preconditionFailure("choices are no documents")
        case .conversations(let conversations):
            let records = conversations.enumerated().map { index, conversation in
                (
                    place: RecordPlace(number: index + 1, kind: .conversation, file: nil),
                    fields: Optional(conversation.fields)
                )
            }
            return ("The data", try TextDocuments(records))
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
                let records = TextRecords.objects(in: Data(text.utf8), of: name, isList: kind == .list)
                return ("\(name)", try TextDocuments(records))
            }
        }
    }

    /// Returns a file's text without a byte order mark, with line feeds as its line ends.
    private static func plain(_ text: String) -> String {
        var text = text.replacingOccurrences(of: "\r\n", with: "\n").replacingOccurrences(of: "\r", with: "\n")
        if text.unicodeScalars.first == "\u{FEFF}" { text.unicodeScalars.removeFirst() }
        return text
    }

    private static func document(_ fields: [String: JSONValue]) throws -> (Document, read: [String]) {
        try TextRecords.refuseUnusable(in: fields)
        let label = fields["completion"] == nil ? nil : "label"
        for key in ["chosen", "rejected", label].compactMap({ $0 }) where fields[key] != nil {
            throw MeSPError(
                "it has \"\(key)\", a preference, which the app does not train of files; train it with mesp on a Mac.")
        }
        if let prompt = fields["prompt"], let completion = fields["completion"] {
            return (
                try answer(completion, prompt: prompt, tools: TextRecords.tools(fields)),
                ["prompt", "completion", "tools"]
            )
        }
        if let messages = fields["messages"], !messages.isEmpty {
            let said = try TextRecords.messages(messages, in: "messages")
            return (.conversation(Conversation(said, tools: try TextRecords.tools(fields))), ["messages", "tools"])
        }
        if let text = fields["text"] {
            guard let text = text.string else { throw MeSPError("\"text\" is not a text; make it one.") }
            return (.text(text, isRecord: true), ["text"])
        }
        throw MeSPError(
            "it has \(fields.isEmpty ? "nothing" : TextRecords.names(fields)) and no text; records have \"text\", \"prompt\" and \"completion\", or \"messages\"."
        )
    }

    static func conversation(_ fields: [String: JSONValue]) throws -> Conversation {
        guard let conversation = try document(fields).0.conversation else {
            throw MeSPError("it has no conversation; records have \"messages\", or \"prompt\" and \"completion\".")
        }
        return conversation
    }

    /// Returns the document of a prompt and a completion. Each is a text or a list of messages. Answers within the prompt are not trained.
    private static func answer(_ completion: JSONValue, prompt: JSONValue, tools: [String]) throws -> Document {
        if let prompt = prompt.string, let completion = completion.string, tools.isEmpty {
            if TextRecords.isBlank(completion) { throw TextRecords.emptyAnswer }
            return .answer(completion, prompt: prompt)
        }
        func messages(_ value: JSONValue, _ role: String, _ key: String) throws -> [Conversation.Message] {
            if let text = value.string { return [Conversation.Message(role: role, content: text)] }
            return try TextRecords.messages(value, in: key)
        }
        let asked = try messages(prompt, "user", "prompt")
        let answer = try messages(completion, "assistant", "completion")
        // A completion may begin with a copy of the prompt.
        var conversation = Conversation(
            asked + answer.dropFirst(answer.starts(with: asked) ? asked.count : 0), tools: tools)
        conversation.prompt = asked.count
        return .conversation(conversation)
    }
}

extension TextDocuments.Document {
    /// The document as a conversation; nil for a text.
    var conversation: Conversation? {
        switch self {
        case .text: return nil
        case .answer(let answer, let prompt):
            var conversation = Conversation([.user(prompt), .assistant(answer)])
            conversation.prompt = 1
            return conversation
        case .conversation(let conversation): return conversation
        }
    }

    /// The kind of document. All records of a file have the same kind.
    fileprivate var kind: Int {
        switch self {
        case .text: 0
        case .answer: 1
        case .conversation: 2
        }
    }
}
