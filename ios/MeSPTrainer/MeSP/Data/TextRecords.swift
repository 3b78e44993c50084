import Foundation
import MeSPBundle
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
