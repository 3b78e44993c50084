import MeSPBundle
import MeSPFiles
import MeSPSentences

extension Fields {
    private static let roles = ["system", "user", "assistant", "developer", "tool", "function"]
    private static let otherRoles = [
        "model": "assistant", "bot": "assistant", "gpt": "assistant", "chatgpt": "assistant", "ai": "assistant",
        "human": "user", "usr": "user",
    ]
    /// The keys that say whether a record or a message is trained. `masked` has the opposite meaning of the other keys.
    private static let weights = ["weight", "train", "training", "trainable", "loss", "masked"]
    private static let messageKeys: Set = ["role", "content", "tool_calls", "name", "tool_call_id", "id", "index"]

    // MARK: - Messages

    /// Takes the messages of a column.
    ///
    /// - Throws: `MeSPError` if the value is not a list of messages, or if content of a message would be lost.
    package mutating func takeMessages(_ key: String) throws -> [Conversation.Message] {
        guard let list = take(key)?.array, !list.isEmpty else {
            throw MeSPError("\"\(key)\" is not a list of messages; write each with \"role\" and \"content\".")
        }
        return try list.map { try message($0) }
    }

    mutating func message(_ value: JSONValue) throws -> Conversation.Message {
        guard let fields = value.fields else {
            throw MeSPError("a message is not an object; write each with \"role\" and \"content\".")
        }
        guard let given = fields["role"] else {
            throw MeSPError("a message has no \"role\" but \(Self.list(fields.keys)); add \"role\" with who writes it.")
        }
        guard let role = given.string else { throw MeSPError("the \"role\" of a message is not a text; make it one.") }
        try Self.check(role: role)
        let isTrained = try Self.isTrained(fields)
        // Some programs write a `weight` of 1 with each message, so this key is allowed, without effect, on messages that are not answers.
        if role != "assistant", isTrained,
            let key = Self.weights.dropFirst().first(where: { fields[$0] != nil && $0 != "masked" })
        {
            throw MeSPError("\"\(key)\" asks to train a message of \(role), and only answers are; remove it.")
        }
        if fields["function_call"].map({ !$0.isEmpty }) ?? false {
            throw MeSPError("a message has \"function_call\", which is not read; write it as \"tool_calls\".")
        }
        var message = Conversation.Message(role: role, content: "", isTrained: isTrained)
        if let calls = fields["tool_calls"] {
            guard let list = calls.array else { throw MeSPError("\"tool_calls\" is not a list; make it one.") }
            message.toolCalls = try list.map { try call($0) }
        }
        if let content = fields["content"] {
            message.content = try text(of: content)
        } else if message.toolCalls.isEmpty || role != "assistant" {
            if fields.count == 1, role == "assistant" { throw Self.emptyAnswer }
            throw MeSPError(
                "a message has no \"content\" but \(Self.list(fields.keys)); write its text as \"content\".")
        }
        leave(fields, but: Self.messageKeys.union(Self.weights))
        message.name = try Self.text("name", of: fields)
        message.toolCallID = try Self.text("tool_call_id", of: fields)
        return message
    }

    private static func text(_ key: String, of fields: [String: JSONValue]) throws -> String? {
        guard let value = fields[key] else { return nil }
        guard let text = value.string else { throw MeSPError("\"\(key)\" is not a text; make it one.") }
        return text
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
    private mutating func text(of content: JSONValue) throws -> String {
        if let text = content.string { return text }
        guard let parts = content.array else {
            throw MeSPError("the \"content\" of a message is neither a text nor a list of parts; make it a text.")
        }
        return try parts.map { part in
            if let text = part.string { return text }
            let fields = part.fields ?? [:]
            let type = fields["type"]?.string ?? "text"
            guard !["image", "input_image", "image_url"].contains(type) else {
                throw MeSPError(
                    "a message has an image, which needs a vision tower: pass ImageFeatures with Conversation.Message.user, or export the records with mesp-export."
                )
            }
            guard ["text", "input_text", "output_text"].contains(type) else {
                throw MeSPError("a message has a part of the type \(type), and only text is trained; remove it.")
            }
            guard let text = fields["text"]?.string else {
                throw MeSPError("a part of a message has no \"text\"; write it, or remove the part.")
            }
            // The last four keys hold no text.
            leave(fields, but: ["type", "text", "id", "index", "annotations", "cache_control"])
            return text
        }.joined()
    }

    // MARK: - Tools

    /// Its fields may be within `function`.
    mutating func call(_ value: JSONValue) throws -> Conversation.ToolCall {
        let outer = value.fields ?? [:]
        let function = outer["function"] == nil ? outer : outer["function"]?.fields ?? [:]
        guard let name = try Self.text("name", of: function) else {
            throw MeSPError("a tool call has no \"name\"; give it one.")
        }
        let (known, around): (Set, Set) = (["name", "arguments"], ["id", "type", "index", "function"])
        leave(function, but: outer["function"] == nil ? known.union(around) : known)
        if outer["function"] != nil { leave(outer, but: around) }
        let arguments: JSONValue? =
            switch function["arguments"] {
            case nil: .object([:])
            case .string(let text): text.isEmpty ? .object([:]) : try? JSONValue(json: text.utf8)
            case let value?: value
            }
        guard case .object = arguments, let arguments else {
            throw MeSPError("the arguments of a tool call are not a JSON object; write one.")
        }
        _ = try arguments.templateValue()
        return Conversation.ToolCall(name: name, arguments: arguments.json, id: try Self.text("id", of: outer))
    }

    /// Takes the tools as JSON texts. The column has a list, or a string of JSON.
    package mutating func takeTools() throws -> [String] {
        guard var value = take("tools"), !value.isEmpty else { return [] }
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

    // MARK: - Weights

    /// Takes the keys such as `weight`, and returns whether the record is trained. Without such a key it is.
    package mutating func takeWeight() throws -> Bool {
        defer { for key in Self.weights { _ = take(key) } }
        return try Self.isTrained(values.filter { $0.value != .null })
    }

    private static func isTrained(_ fields: [String: JSONValue]) throws -> Bool {
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

    // MARK: - Sentences

    package static var noObject: MeSPError { MeSPError("it is not a JSON object; write the record as one.") }

    package static var emptyAnswer: MeSPError {
        MeSPError("an answer is empty; write it, or leave the record out.")
    }
}

extension StringProtocol {
    package var isBlank: Bool { allSatisfy(\.isWhitespace) }
}
