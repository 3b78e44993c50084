import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// Reads records of files for training and evaluation.
package enum TextRecords {
    /// Returns the records in a file's bytes. Empty lines are skipped.
    ///
    /// - Returns: for each record, its place and its fields that are not null. The fields are nil if the record is not a JSON object.
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
            let fields = (try? JSONValue(json: line))?.fields
            records.append((RecordPlace(number: index + 1, kind: .line, file: file), fields))
        }
        return records
    }

    /// Returns the file as one JSON value; nil if the file is not one value, or has a record on each line.
    private static func whole(_ data: Data) -> JSONValue? {
        guard let start = data.firstIndex(where: { $0 > 0x20 }) else { return nil }
        func read(_ bytes: Data) -> JSONValue? { try? JSONValue(json: bytes) }
        let line = data[start...].prefix { $0 != UInt8(ascii: "\n") }
        return data[start] == UInt8(ascii: "[") || read(line) == nil ? read(data) : nil
    }

    // MARK: - Messages

    /// The names of roles in other formats -> their names in MeSP.
    private static let otherRoles = [
        "model": "assistant", "bot": "assistant", "gpt": "assistant", "chatgpt": "assistant", "ai": "assistant",
        "human": "user", "usr": "user",
    ]
    private static let roles = ["system", "user", "assistant", "developer", "tool", "function"]
    /// The keys of a message that do not affect training.
    private static let identifiers: Set = ["id", "index"]
    private static let others: Set = ["role", "content", "tool_calls", "name", "tool_call_id"]
    /// The keys of a record that MeSP cannot use and on which the answer depends. A record with such a key is refused.
    private static let unusable = [
        "images", "image", "audios", "audio", "videos", "video", "documents", "functions", "function_call",
        "tool_calls",
        "history", "system", "system_prompt",
    ]
    /// The keys that say whether a record or a message is trained. `masked` has the opposite meaning of the other keys.
    private static let weights = ["weight", "train", "training", "trainable", "loss", "masked"]

    /// Returns the messages in a record's field.
    ///
    /// - Throws: `MeSPError` if the value is not a list of messages, or if content of a message would be lost.
    package static func messages(_ value: JSONValue, in key: String) throws -> [Conversation.Message] {
        guard let list = value.array, !list.isEmpty else {
            throw MeSPError("\"\(key)\" is not a list of messages; write each with \"role\" and \"content\".")
        }
        return try list.map(message)
    }

    static func message(_ value: JSONValue) throws -> Conversation.Message {
        guard let fields = value.fields else {
            throw MeSPError("a message is not an object; write each with \"role\" and \"content\".")
        }
        guard let given = fields["role"] else {
            throw MeSPError("a message has no \"role\" but \(names(fields)); add \"role\" with who writes it.")
        }
        guard let role = given.string else { throw MeSPError("the \"role\" of a message is not a text; make it one.") }
        try check(role: role)
        let isTrained = try isTrained(fields)
        // Some programs write a `weight` of 1 with each message, so this key is allowed, without effect, on messages that are not answers.
        if role != "assistant", isTrained, let key = weights.dropFirst().first(where: { fields[$0] != nil }),
            key != "masked"
        {
            throw MeSPError("\"\(key)\" asks to train a message of \(role), and only answers are; remove it.")
        }
        let calls = try fields["tool_calls"].map(calls) ?? []
        for (key, value) in fields.sorted(by: { $0.key < $1.key }) where !value.isEmpty {
            guard others.contains(key) || identifiers.contains(key) || weights.contains(key) else {
                if key == "function_call" {
                    throw MeSPError("a message has \"function_call\", which is not read; write it as \"tool_calls\".")
                }
                guard fields["content"] != nil || !calls.isEmpty else {
                    throw MeSPError("a message has no \"content\" but \"\(key)\"; name its text \"content\".")
                }
                throw MeSPError("a message has \"\(key)\", which is not read; write it into \"content\", or remove it.")
            }
        }
        var message = Conversation.Message(role: role, content: "", toolCalls: calls, isTrained: isTrained)
        if let content = fields["content"] {
            message.content = try self.content(content)
        } else if role != "assistant" {
            throw MeSPError("a message of \(role) has no \"content\"; write it, or remove the message.")
        } else if calls.isEmpty {
            throw emptyAnswer
        }
        message.name = try text("name", of: fields)
        message.toolCallID = try text("tool_call_id", of: fields)
        return message
    }

    /// Returns the string of a field; nil if the field is missing.
    private static func text(_ key: String, of fields: [String: JSONValue]) throws -> String? {
        guard let value = fields[key] else { return nil }
        guard let text = value.string else { throw MeSPError("\"\(key)\" is not a text; make it one.") }
        return text
    }

    // MARK: - Tools

    private static func calls(_ value: JSONValue) throws -> [Conversation.ToolCall] {
        guard let list = value.array else { throw MeSPError("\"tool_calls\" is not a list; make it one.") }
        return try list.map(call)
    }

    /// Returns a tool call. Its fields may be within `function`.
    static func call(_ value: JSONValue) throws -> Conversation.ToolCall {
        let outer = value.fields ?? [:]
        let function = outer["function"] == nil ? outer : outer["function"]?.fields ?? [:]
        guard let name = try text("name", of: function) else {
            throw MeSPError("a tool call has no \"name\"; give it one.")
        }
        let around: Set = ["id", "type", "index"]
        let known: Set = ["name", "arguments"]
        let unread = Set(function.keys).subtracting(outer["function"] == nil ? known.union(around) : known)
            .union(outer["function"] == nil ? [] : Set(outer.keys).subtracting(around.union(["function"])))
        if let key = unread.sorted().first {
            throw MeSPError(
                "a tool call has \"\(key)\", which is not read; a call has \"name\" and \"arguments\".")
        }
        let arguments: JSONValue? =
            switch function["arguments"] {
            case nil: .object([:])
            case .string(let text): text.isEmpty ? .object([:]) : try? JSONValue(json: text.utf8)
            case let value?: value.withoutNull
            }
        guard case .object = arguments, let arguments else {
            throw MeSPError("the arguments of a tool call are not a JSON object; write one.")
        }
        _ = try arguments.templateValue()
        return Conversation.ToolCall(name: name, arguments: arguments.json, id: try text("id", of: outer))
    }

    /// Returns a record's tools as JSON texts. The record has a list, or a string of JSON.
    package static func tools(_ fields: [String: JSONValue]) throws -> [String] {
        guard var value = fields["tools"]?.withoutNull, !value.isEmpty else { return [] }
        if let text = value.string { value = (try? JSONValue(json: text.utf8)) ?? value }
        guard let list = value.array else { throw MeSPError("\"tools\" is not a list; write one of JSON objects.") }
        return try list.map { tool in
            guard let fields = tool.fields else {
                throw MeSPError("a tool is not a JSON object; write each with a \"name\".")
            }
            let function = fields["function"] == nil ? fields : fields["function"]?.fields ?? [:]
            guard function["name"]?.string != nil else { throw MeSPError("a tool has no \"name\"; give it one.") }
            _ = try tool.templateValue()
            return tool.json
        }
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
        throw MeSPError("the role \(role) is not known; write system, user, assistant, developer, tool or function.")
    }

    /// Returns the text of a message. The value is a string or a list of parts.
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

    /// Returns whether a message or a record is trained, by keys such as `weight`. Without such a key it is trained.
    package static func isTrained(_ fields: [String: JSONValue]) throws -> Bool {
        var isTrained = true
        for key in weights {
            let says: Bool
            switch fields[key] {
            case nil: continue
            case .bool(let truth): says = truth
            case .integer(1), .number(1): says = true
            case .integer(0), .number(0): says = false
            default:
                throw MeSPError("\"\(key)\" is neither 1 nor 0, true nor false; other weights are not supported.")
            }
            if says == (key == "masked") { isTrained = false }
        }
        return isTrained
    }

    /// Checks that a record has no unusable key on which its answer depends.
    ///
    /// - Throws: `MeSPError` if it has one.
    package static func refuseUnusable(in fields: [String: JSONValue]) throws {
        if let key = unusable.first(where: { fields[$0].map { !$0.isEmpty } ?? false }) {
            throw MeSPError("it has \"\(key)\", which cannot be used; write its text as messages, or remove it.")
        }
    }

    /// Returns the keys of a record that have a value and are ignored.
    package static func unread(_ fields: [String: JSONValue], but known: [String]) -> Set<String> {
        Set(fields.filter { !$0.value.isEmpty }.keys).subtracting(known).subtracting(weights)
    }

    static func names(_ fields: [String: JSONValue]) -> String {
        fields.keys.sorted().map { "\"\($0)\"" }.joined(separator: ", ")
    }

    package static func isBlank(_ text: String) -> Bool { !text.contains { !$0.isWhitespace } }
}
