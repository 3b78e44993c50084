import Foundation
import MeSPFiles
import MeSPSentences

/// A list of messages that the model's chat template renders, with the tools that the model may call.
///
/// It encodes as a record in Hugging Face's format: `{"messages": [{"role": "user", "content": "Hi"}, …], "tools": […]}`. If training would lose some
/// of the content, decoding throws an error that names this content.
public struct Conversation: Codable, Sendable, Hashable {
    /// The messages, in order.
    public var messages: [Message]
    /// The definitions of tools, each a JSON object as text.
    public var tools: [String]
    /// The number of messages at the beginning whose answers are not in the loss, even if only answers are.
    package var prompt = 0

    /// Creates a conversation. Content that training would lose is refused when a run or a preview begins.
    ///
    /// - Parameters:
    ///   - messages: the messages, in order.
    ///   - tools: the definitions of tools, each a JSON object as text.
    public init(_ messages: [Message], tools: [String] = []) { (self.messages, self.tools) = (messages, tools) }

    /// Reads a record with `messages`, or with `prompt` and `completion`.
    public init(from decoder: any Decoder) throws {
        guard let fields = try JSONValue(from: decoder).fields else { throw TextRecords.noObject }
        self = try TextDocuments.conversation(fields)
    }

    /// Writes a record with `messages`, or with `prompt` and `completion`, and with `tools`.
    public func encode(to encoder: any Encoder) throws { try JSONValue.object(fields).encode(to: encoder) }

    /// Reads the conversations in a file. `.jsonl` and `.ndjson` files have a record on each line; a `.json` file has a record on each line or one
    /// list of records. A record has `messages`, or `prompt` and `completion`, and optionally `tools`. Records with a key that excludes them from
    /// training are left out. Other keys are not read.
    ///
    /// - Throws: ``FineTuningError`` if a record cannot be trained as intended. It names the first such record and the reason.
    public static func read(contentsOf url: URL) throws -> [Conversation] {
        try FineTuningError.describing {
            let (name, contents) = try TextDocuments.read(.file(url))
            return try contents.documents.map { document in
                guard let conversation = document.conversation else {
                    throw MeSPError("\(name) has texts, and no conversations; write records with \"messages\".")
                }
                return conversation
            }
        }
    }

    /// The fields of the record.
    var fields: [String: JSONValue] {
        let said = messages.map(\.json)
        var fields: [String: JSONValue] =
            prompt == 0
            ? ["messages": .array(said)]
            : ["prompt": .array(Array(said.prefix(prompt))), "completion": .array(Array(said.dropFirst(prompt)))]
        // Text that is not JSON becomes a string, which is refused later as a value that is not a tool.
        if !tools.isEmpty { fields["tools"] = .array(tools.map { (try? JSONValue(json: $0.utf8)) ?? .string($0) }) }
        return fields
    }

    /// The indices of the answers that are in the loss if only answers are.
    var trained: [Int] {
        messages.indices.filter { $0 >= prompt && messages[$0].isAnswer && messages[$0].isTrained }
    }
}

extension Conversation {
    /// A message of a conversation.
    public struct Message: Codable, Sendable, Hashable {
        /// The author's role: `system`, `developer`, `user`, `assistant`, `tool` or `function`.
        public var role: String
        /// The text of the message. The thoughts of an answer stand before its text, in `<think>…</think>`.
        public var content: String
        /// The tools that an answer calls.
        public var toolCalls: [ToolCall]
        /// Whether an answer is in the loss. It has no effect on other messages.
        public var isTrained: Bool
        /// A name that some chat templates write with a message, such as the tool's name with its result; nil for none.
        public var name: String?
        /// The ``ToolCall/id`` of the call to which a tool's result belongs, which some chat templates write; nil for none.
        public var toolCallID: String?

        /// Creates a message.
        ///
        /// - Parameters:
        ///   - role: the author's role.
        ///   - content: the text of the message.
        ///   - toolCalls: the tools that an answer calls.
        ///   - isTrained: whether an answer is in the loss.
        public init(role: String, content: String, toolCalls: [ToolCall] = [], isTrained: Bool = true) {
            (self.role, self.content, self.toolCalls, self.isTrained) = (role, content, toolCalls, isTrained)
        }

        /// Returns a message with an instruction to the model. It comes first in a conversation.
        public static func system(_ content: String) -> Message { Message(role: "system", content: content) }
        /// Returns a message of the person.
        public static func user(_ content: String) -> Message { Message(role: "user", content: content) }
        /// Returns an answer of the model, which is trained.
        public static func assistant(_ content: String, toolCalls: [ToolCall] = []) -> Message {
            Message(role: "assistant", content: content, toolCalls: toolCalls)
        }
        /// Returns a message with a tool's result.
        public static func tool(_ content: String) -> Message { Message(role: "tool", content: content) }

        /// Reads a message from a record.
        public init(from decoder: any Decoder) throws { self = try TextRecords.message(JSONValue(from: decoder)) }

        /// Writes the message as it stands in a record.
        public func encode(to encoder: any Encoder) throws { try json.encode(to: encoder) }

        package var isAnswer: Bool { role == "assistant" }

        /// The fields of the record.
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
        /// The name of the tool.
        public var name: String
        /// The arguments, a JSON object as text.
        public var arguments: String
        /// The identifier of the call, which some chat templates write; nil for none.
        public var id: String?

        /// Creates a call.
        ///
        /// - Parameters:
        ///   - name: the name of the tool.
        ///   - arguments: the arguments, a JSON object as text.
        ///   - id: the identifier of the call.
        public init(name: String, arguments: String = "{}", id: String? = nil) {
            (self.name, self.arguments, self.id) = (name, arguments, id)
        }

        /// Reads a call from a record, `{"type": "function", "function": {…}}` or `{"name": …, "arguments": …}`.
        public init(from decoder: any Decoder) throws { self = try TextRecords.call(JSONValue(from: decoder)) }

        /// Writes the call as it stands in a record.
        public func encode(to encoder: any Encoder) throws { try json.encode(to: encoder) }

        var json: JSONValue {
            let function: JSONValue = .object(["name": .string(name), "arguments": .string(arguments)])
            var fields: [String: JSONValue] = ["type": .string("function"), "function": function]
            fields["id"] = id.map { .string($0) }
            return .object(fields)
        }
    }
}
