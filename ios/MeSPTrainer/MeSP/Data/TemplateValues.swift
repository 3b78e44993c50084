import MeSPBundle
import MeSPFiles
import MeSPSentences

extension Conversation {
    /// Returns the token ids of the conversation, by the tokenizer's chat template.
    ///
    /// - Parameter argumentsAreText: whether the template takes the arguments of tool calls as JSON text.
    package func applied(
        to tokenizer: any TextTokenizer, argumentsAreText: Bool, addsGenerationPrompt: Bool
    ) throws -> [Int] {
        try tokenizer.applyChatTemplate(
            messages: try messages.map { try $0.templateFields(argumentsAreText) },
            tools: tools.isEmpty
                ? nil : try tools.map { try JSONValue.object(text: $0).mapValues { try $0.templateValue() } },
            addsGenerationPrompt: addsGenerationPrompt)
    }
}

extension Conversation.Message {
    fileprivate func templateFields(_ argumentsAreText: Bool) throws -> [String: any Sendable] {
        var fields: [String: any Sendable] = ["role": role, "content": content]
        if !toolCalls.isEmpty { fields["tool_calls"] = try toolCalls.map { try $0.templateFields(argumentsAreText) } }
        if let name { fields["name"] = name }
        if let toolCallID { fields["tool_call_id"] = toolCallID }
        return fields
    }
}

extension Conversation.ToolCall {
    fileprivate func templateFields(_ argumentsAreText: Bool) throws -> [String: any Sendable] {
        let object = try JSONValue.object(text: arguments)
        let given: any Sendable =
            argumentsAreText ? JSONValue.object(object).json : try object.mapValues { try $0.templateValue() }
        let function: [String: any Sendable] = ["name": name, "arguments": given]
        var fields: [String: any Sendable] = ["type": "function", "function": function]
        if let id { fields["id"] = id }
        return fields
    }
}

extension JSONValue {
    static func object(text: String) throws -> [String: JSONValue] {
        guard case .object(let fields) = try? JSONValue(json: text.utf8) else {
            throw MeSPError("a tool, or the arguments of a call, are not a JSON object; write one.")
        }
        return fields
    }

    /// Returns the value as an argument for chat templates.
    ///
    /// - Throws: `MeSPError` for a number that is too large, or for JSON that is nested too deeply.
    func templateValue() throws -> any Sendable {
        switch self {
        case .null: return String?.none
        case .bool(let truth): return truth
        case .integer(let number): return number
        case .number(let number):
            guard abs(number) < 0x1p63 else {
                throw MeSPError(
                    "a tool, or the arguments of a call, have a number that is too large; write a smaller one.")
            }
            return number
        case .string(let text): return text
        case .array(let values): return try values.map { try $0.templateValue() } as [any Sendable]
        case .object(let fields): return try fields.mapValues { try $0.templateValue() }
        case .deep: throw MeSPError("a tool, or the arguments of a call, are nested too deep; write them flatter.")
        }
    }

    /// The value without the null entries of its objects.
    var withoutNull: JSONValue {
        switch self {
        case .array(let values): .array(values.map(\.withoutNull))
        case .object(let fields): .object(fields.filter { $0.value != .null }.mapValues(\.withoutNull))
        default: self
        }
    }

    /// Returns the value with changed strings. `change` is called in a fixed order.
    func mapStrings(_ change: (String) throws -> String) rethrows -> JSONValue {
        switch self {
        case .string(let text): return .string(try change(text))
        case .array(let values): return .array(try values.map { try $0.mapStrings(change) })
        case .object(let fields):
            let changed = try fields.sorted { $0.key < $1.key }.map { ($0.key, try $0.value.mapStrings(change)) }
            return .object(Dictionary(uniqueKeysWithValues: changed))
        default: return self
        }
    }
}
