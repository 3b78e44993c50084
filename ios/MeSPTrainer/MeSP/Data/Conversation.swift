import Foundation
import MeSPFiles
import MeSPSentences

/// A message of a ``Conversation``.
public struct Message: Codable, Sendable, Hashable {
    /// Who writes it: `system`, `developer`, `user`, `assistant`, `tool`, `function`.
    public var role: String
    public var content: String
    /// The tools that an answer calls.
    public var toolCalls: [ToolCall]
    /// Whether an answer is in the loss; of other messages it says nothing.
    public var isTrained: Bool
    /// The name that some chat templates write of a message, as of the tool that answers; nil for none.
    public var name: String?
    /// The ``ToolCall/id`` of the call that a tool answers, where the chat template writes it; nil for none.
    public var toolCallID: String?

    public init(role: String, content: String, toolCalls: [ToolCall] = [], isTrained: Bool = true) {
        (self.role, self.content, self.toolCalls, self.isTrained) = (role, content, toolCalls, isTrained)
    }

    public static func system(_ content: String) -> Message { Message(role: "system", content: content) }
    public static func user(_ content: String) -> Message { Message(role: "user", content: content) }
    public static func assistant(_ content: String, toolCalls: [ToolCall] = []) -> Message {
        Message(role: "assistant", content: content, toolCalls: toolCalls)
    }
    public static func tool(_ content: String) -> Message { Message(role: "tool", content: content) }

    public init(from decoder: any Decoder) throws { self = try TextRecords.message(JSONValue(from: decoder)) }
    public func encode(to encoder: any Encoder) throws { try json.encode(to: encoder) }

    package var isAnswer: Bool { role == "assistant" }

    /// As a record has it.
    var json: JSONValue {
        var fields: [String: JSONValue] = ["role": .string(role), "content": .string(content)]
        if !toolCalls.isEmpty { fields["tool_calls"] = .array(toolCalls.map(\.json)) }
        fields["name"] = name.map { .string($0) }
        fields["tool_call_id"] = toolCallID.map { .string($0) }
        if isAnswer, !isTrained { fields["weight"] = .integer(0) }
        return .object(fields)
    }
}

/// A tool that an answer calls.
public struct ToolCall: Codable, Sendable, Hashable {
    public var name: String
    /// A JSON object, as text.
    public var arguments: String
    /// The identifier of the call, where the chat template writes it; nil for none.
    public var id: String?

    public init(name: String, arguments: String = "{}", id: String? = nil) {
        (self.name, self.arguments, self.id) = (name, arguments, id)
    }

    public init(from decoder: any Decoder) throws { self = try TextRecords.call(JSONValue(from: decoder)) }
    public func encode(to encoder: any Encoder) throws { try json.encode(to: encoder) }

    var json: JSONValue {
        let function: JSONValue = .object(["name": .string(name), "arguments": .string(arguments)])
        var fields: [String: JSONValue] = ["type": .string("function"), "function": function]
        fields["id"] = id.map { .string($0) }
        return .object(fields)
    }
}

/// Messages that go through the model's chat template, as the `messages` and `tools` of Hugging Face's records.
public struct Conversation: Codable, Sendable, Hashable {
    public var messages: [Message]
    /// The definitions of tools, a JSON object each, as text.
    public var tools: [String]
    /// The number of messages, at the beginning, of which no answer is trained where only answers are.
    package var prompt = 0

    public init(_ messages: [Message], tools: [String] = []) { (self.messages, self.tools) = (messages, tools) }

    public init(from decoder: any Decoder) throws {
        guard let fields = try JSONValue(from: decoder).fields else { throw TextRecords.noObject }
        self = try TextDocuments.conversation(fields)
    }

    public func encode(to encoder: any Encoder) throws { try JSONValue.object(fields).encode(to: encoder) }

    /// Reads the conversations of a file: `.jsonl` and `.ndjson` have a record a line, `.json` may be one list of records too. A record has
    /// `messages`, with or without `tools`, or `prompt` and `completion`. Records that ask not to be trained are left out, and other keys
    /// are not read.
    ///
    /// - Throws: an error that names the first record that cannot be trained as it is meant, and why.
    public static func read(contentsOf url: URL) throws -> [Conversation] {
        let (name, contents) = try TextDocuments.read(.file(url))
        return try contents.documents.map { document in
            guard let conversation = document.conversation else {
                throw MeSPError("\(name) has texts, and no conversations; write records with \"messages\".")
            }
            return conversation
        }
    }

    /// As a record has it.
    var fields: [String: JSONValue] {
        let said = messages.map(\.json)
        var fields: [String: JSONValue] =
            prompt == 0
            ? ["messages": .array(said)]
            : ["prompt": .array(Array(said.prefix(prompt))), "completion": .array(Array(said.dropFirst(prompt)))]
        // What is no JSON is refused as other values are that are no tool.
        if !tools.isEmpty { fields["tools"] = .array(tools.map { (try? JSONValue(json: $0.utf8)) ?? .string($0) }) }
        return fields
    }

    /// The indices of the answers that are trained where only answers are.
    var trained: [Int] {
        messages.indices.filter { $0 >= prompt && messages[$0].isAnswer && messages[$0].isTrained }
    }
}
