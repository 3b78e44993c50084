import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// A record of one kind. It goes forward only: `read` takes its columns, `render` makes its text, and `mask` its tokens.
protocol Record: Sendable {
    associatedtype Rendered
    /// Sets of columns. A record that has values in all columns of a set is of this kind.
    static var forms: [[String]] { get }
    static func read(_ fields: inout Fields) throws -> Self
    func render(_ encoder: inout RecordEncoder) throws -> Rendered
    /// Returns the tokens, and which of them are in the loss. The list is empty if the record asks not to be trained.
    func mask(_ encoder: inout RecordEncoder) throws -> [Encoded]
}

struct Encoded: Equatable, Sendable {
    var tokens: [UInt32]
    var counted: [Bool]
    var images = [ImageFeatures]()
    /// Which tokens get the rows of `images`, in their order; empty without images.
    var isRow = [Bool]()
}

struct TextRecord: Record {
    static let forms = [["text"]]

    let text: Substring
    /// Its first and its last piece begin and end the file.
    var isPiece = false
    var begins = true
    var ends = true

    static func read(_ fields: inout Fields) throws -> TextRecord {
        TextRecord(text: try fields.takeText("text")[...])
    }

    func render(_ encoder: inout RecordEncoder) -> String { String(text) }

    func mask(_ encoder: inout RecordEncoder) throws -> [Encoded] {
        var ids = try encoder.plain.encode(render(&encoder), addsSpecialTokens: !isPiece)
        if isPiece, begins, let begin = encoder.tokenizer.begin { ids.insert(begin, at: 0) }
        if ends, !ids.isEmpty, let end = encoder.tokenizer.endOfText { ids.append(end) }
        guard isPiece || ids.count > 1 else { throw MeSPError("it has an empty text; leave it out.") }
        return [Encoded(tokens: ids.map { UInt32($0) }, counted: ids.map { _ in true })]
    }
}

extension Conversation: Record {
    static let forms = [
        ["prompt", "completion"], ["messages"],
        ["instruction", "output"],  // Alpaca
        ["instruction", "response"],  // Dolly
    ]

    enum Rendered {
        case chat(Rendering)
        case joined(prompt: String, answer: String)
    }

    package static func isRead(from fields: Fields) -> Bool { forms.contains(where: fields.has) }

    package static func read(_ fields: inout Fields) throws -> Conversation {
        let (tools, options) = (try fields.takeTools(), try fields.takeOptions())
        var conversation: Conversation
        if fields.has(["prompt", "completion"]) {
            conversation = try Conversation(
                fields.takeSaid("prompt", by: "user"), answer: fields.takeSaid("completion", by: "assistant"))
        } else if fields.has(["messages"]) {
            conversation = Conversation(try fields.takeMessages("messages"))
        } else {
            let (source, answer) = fields.has(["output"]) ? ("input", "output") : ("context", "response")
            let instruction = try fields.takeText("instruction")
            let given = fields.has([source]) ? try fields.takeText(source) : ""
            let prompt = given.isBlank ? instruction : "\(instruction)\n\n\(given)"
            conversation = try Conversation(
                ([.user(prompt)], true), answer: fields.takeSaid(answer, by: "assistant"))
            let parts = [instruction, given] + conversation.messages.dropFirst().map(\.content)
            if let whole = fields.values["text"]?.string,
                parts.allSatisfy({ $0.isBlank || whole.contains($0.trimmingCharacters(in: .whitespacesAndNewlines)) })
            {
                _ = fields.take("text")  // Alpaca's text repeats the other columns
            }
        }
        (conversation.tools, conversation.options) = (tools, options)
        return conversation
    }

    typealias Said = (messages: [Message], isText: Bool)

    /// The conversation of a prompt and an answer. Answers within the prompt are not trained. The answer may begin with a copy of the prompt.
    fileprivate init(_ prompt: Said, answer: Said) throws {
        let copied = answer.messages.starts(with: prompt.messages) ? prompt.messages.count : 0
        self.init(prompt.messages + answer.messages.dropFirst(copied))
        (self.prompt, areTexts) = (prompt.messages.count, prompt.isText && answer.isText)
        if areTexts, answer.messages[0].content.isBlank { throw Fields.emptyAnswer }
    }

    /// Returns the conversation with the images of the one that it was read from, whose fields do not have them.
    fileprivate func with(imagesOf original: Conversation) -> Conversation {
        let copied = original.messages.count - messages.count
        var changed = self
        for index in messages.indices {
            changed.messages[index].images = original.messages[index < prompt ? index : index + copied].images
        }
        return changed
    }

    func render(_ encoder: inout RecordEncoder) throws -> Rendered {
        guard encoder.tokenizer.joinsTexts, let texts else {
            if encoder.tokenizer.hasChatTemplate { return .chat(try encoder.render(self)) }
            throw MeSPError(
                "the model's tokenizer has no chat template, which its messages need; take an -Instruct model, or write the records as prompts and answers."
            )
        }
        for (key, isGiven) in [("tools", !tools.isEmpty), (Fields.options, !options.isEmpty)] where isGiven {
            throw MeSPError(
                "it has \(key), which only a chat template reads, and its prompt and answer are joined without one: remove it."
            )
        }
        return .joined(prompt: texts.prompt, answer: texts.answer)
    }

    func mask(_ encoder: inout RecordEncoder) throws -> [Encoded] {
        if encoder.answersOnly {
            guard messages.contains(where: \.isAnswer) else {
                throw MeSPError("it has no assistant message; add one, or train on all text.")
            }
            guard !trained.isEmpty else { return [] }
        }
        switch try render(&encoder) {
        case .chat(let rendering): return [try encoder.put(messages.flatMap(\.images), into: encoder.mask(rendering))]
        case .joined(let prompt, let answer): return [try encoder.join(prompt, answer)]
        }
    }
}

/// A preferred and another answer to a conversation. Only the answers are in the loss.
struct PairRecord: Record {
    static let forms = [["chosen", "rejected"]]

    let chosen: Conversation
    let rejected: Conversation

    static func read(_ fields: inout Fields) throws -> PairRecord {
        let prompt = try fields.takeSaid("prompt", by: "user")
        func answer(_ key: String) throws -> Conversation {
            try Conversation(prompt, answer: fields.takeSaid(key, by: "assistant"))
        }
        return PairRecord(chosen: try answer("chosen"), rejected: try answer("rejected"))
    }

    func render(_ encoder: inout RecordEncoder) throws -> [Conversation.Rendered] {
        [try chosen.render(&encoder), try rejected.render(&encoder)]
    }

    func mask(_ encoder: inout RecordEncoder) throws -> [Encoded] {
        try chosen.mask(&encoder) + rejected.mask(&encoder)
    }
}

struct Records {
    private(set) var name: Sentence = "The data"
    private(set) var records = [(place: RecordPlace, record: any Record)]()
    private(set) var leftOut = 0
    private(set) var noted = Set<String>()
    private(set) var invalid = [InvalidRecord]()

    /// - Throws: `MeSPError` if it is a file that cannot be read, has no text, or has a refused record.
    init(_ source: TextData.Source, leavesOutInvalid: Bool = false) throws {
        var refusals = RefusedRecords(areLeftOut: leavesOutInvalid)
        switch source {
        case .choices(let choices): try read(SourceRows.rows(choices.map(\.fields), .choice), &refusals)
        case .conversations(let conversations):
            try read(SourceRows.rows(conversations.map(\.fields), .conversation), &refusals)
            records = records.map {
                ($0, ($1 as? Conversation)?.with(imagesOf: conversations[$0.number - 1]) ?? $1)
            }
        case .text(let text):
            guard !text.isBlank else { throw MeSPError("There is no text yet.") }
            name = "The text"
            records = SourceRows.pieces(of: text)
        case .file(let url):
            let (file, kind) = (url.lastPathComponent, try TextFileKind(of: url))
            name = "\(file)"
            let text = try SourceRows.text(of: url)
            if kind == .text {
                records = SourceRows.pieces(of: text)
            } else {
                try read(SourceRows.objects(in: Data(text.utf8), of: file, isList: kind == .list), &refusals)
            }
        }
    }

    private mutating func read(_ rows: [SourceRows.Row], _ refusals: inout RefusedRecords) throws {
        for (place, columns) in rows {
            let record = try refusals.read(place) { () -> (any Record, LeftFields)? in
                guard var fields = columns else { throw Fields.noObject }
                guard try fields.takeWeight() else {
                    leftOut += 1
                    return nil
                }
                let record = try fields.takeRecord(place)
                if let first = records.first, type(of: first.record) != type(of: record) {
                    throw MeSPError("it is another kind of record than the first; keep one kind.")
                }
                return (record, fields.left)
            }
            if let record { records.append((place, record)) }
        }
        try refusals.check()
        (noted, invalid) = (refusals.noted, refusals.invalid.map(InvalidRecord.init))
    }
}

extension Fields {
    static let options = "chat_template_kwargs"

    /// Takes a prompt or an answer: a list of messages, or a text, which becomes a message of `role`.
    fileprivate mutating func takeSaid(_ key: String, by role: String) throws -> Conversation.Said {
        guard let text = values[key]?.string else { return (try takeMessages(key), false) }
        _ = take(key)
        return ([Conversation.Message(role: role, content: text)], true)
    }

    fileprivate mutating func takeOptions() throws -> [String: JSONValue] {
        guard let value = take(Self.options) else { return [:] }
        guard case .object(let options) = value else {
            throw MeSPError("it has \"\(Self.options)\" that are not an object: write one.")
        }
        _ = try value.templateValue()
        return options
    }

    fileprivate mutating func takeRecord(_ place: RecordPlace) throws -> any Record {
        if PairRecord.forms.contains(where: has), case .choice = place.kind { return try PairRecord.read(&self) }
        if let key = has(["chosen", "rejected"]) ? "chosen" : has(["prompt", "completion", "label"]) ? "label" : nil {
            throw MeSPError(
                "it has \"\(key)\", a preference, which the app does not train of files; train it with mesp on a Mac.")
        }
        let kinds: [any Record.Type] = [Conversation.self, TextRecord.self]
        if let kind = kinds.first(where: { $0.forms.contains(where: has) }) { return try kind.read(&self) }
        for form in kinds.flatMap({ $0.forms }) where form.allSatisfy({ values[$0] != nil }) {
            if let null = form.first(where: { !has([$0]) }) {
                throw MeSPError("it has a null \"\(null)\": write it, or leave the record out.")
            }
        }
        throw MeSPError(
            "it has \(values.isEmpty ? "nothing" : Self.list(values.keys)) and no text; records have \"text\", \"prompt\" and \"completion\", or \"messages\"."
        )
    }
}
