import Foundation
import MeSPFiles
import MeSPSentences

/// Messages that go through the model's chat template, as the `messages` and `tools` of Hugging Face's records.
///
/// Encoded it is such a record, `{"messages": [{"role": "user", "content": "Hi"}, …], "tools": […]}`. Decoding refuses what would be lost in
/// training with a sentence that names it.
public struct Conversation: Codable, Sendable, Hashable {
    /// The messages, the first one first.
    public var messages: [Message]
    /// The definitions of tools, a JSON object each, as text.
    public var tools: [String]
    /// The number of messages, at the beginning, of which no answer is trained where only answers are.
    package var prompt = 0

    /// Makes a conversation. What would be lost in training is refused when a run or a preview begins.
    ///
    /// - Parameters:
    ///   - messages: the messages, the first one first.
    ///   - tools: the definitions of tools, a JSON object each, as text.
    public init(_ messages: [Message], tools: [String] = []) { (self.messages, self.tools) = (messages, tools) }

    /// Reads a record with `messages`, or with `prompt` and `completion`.
    public init(from decoder: any Decoder) throws {
        guard let fields = try JSONValue(from: decoder).fields else { throw TextRecords.noObject }
        self = try TextDocuments.conversation(fields)
    }

    /// Writes a record.
    public func encode(to encoder: any Encoder) throws { try JSONValue.object(fields).encode(to: encoder) }

    /// Reads the conversations of a file: `.jsonl` and `.ndjson` have a record a line, `.json` may be one list of records too. A record has
    /// `messages`, with or without `tools`, or `prompt` and `completion`. Records that ask not to be trained are left out, and other keys
    /// are not read.
    ///
    /// - Throws: ``FineTuningError``, which names the first record that cannot be trained as it is meant, and why.
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

extension Conversation {
    /// A message of a conversation.
    public struct Message: Codable, Sendable, Hashable {
        /// Who writes it: `system`, `developer`, `user`, `assistant`, `tool`, `function`.
        public var role: String
        /// The text of the message. Thoughts of an answer are in `<think>…</think>` before it.
        public var content: String
        /// The tools that an answer calls.
        public var toolCalls: [ToolCall]
        /// Whether an answer is in the loss; of other messages it says nothing.
        public var isTrained: Bool
        /// The name that some chat templates write of a message, as of the tool that answers; nil for none.
        public var name: String?
        /// The ``ToolCall/id`` of the call that a tool answers, where the chat template writes it; nil for none.
        public var toolCallID: String?

        /// Makes a message.
        ///
        /// - Parameters:
        ///   - role: who writes it.
        ///   - content: its text.
        ///   - toolCalls: the tools that an answer calls.
        ///   - isTrained: whether an answer is in the loss.
        public init(role: String, content: String, toolCalls: [ToolCall] = [], isTrained: Bool = true) {
            (self.role, self.content, self.toolCalls, self.isTrained) = (role, content, toolCalls, isTrained)
        }

        /// Makes an instruction to the model, the first message of a conversation.
        public static func system(_ content: String) -> Message { Message(role: "system", content: content) }
        /// Makes a message of the person.
        public static func user(_ content: String) -> Message { Message(role: "user", content: content) }
        /// Makes an answer of the model, which is trained.
        public static func assistant(_ content: String, toolCalls: [ToolCall] = []) -> Message {
            Message(role: "assistant", content: content, toolCalls: toolCalls)
        }
        /// Makes the result of a tool.
        public static func tool(_ content: String) -> Message { Message(role: "tool", content: content) }

        /// Reads a message of a record.
        public init(from decoder: any Decoder) throws { self = try TextRecords.message(JSONValue(from: decoder)) }

        /// Writes a message of a record.
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
        /// The name of the tool.
        public var name: String
        /// The arguments, a JSON object as text.
        public var arguments: String
        /// The identifier of the call, where the chat template writes it; nil for none.
        public var id: String?

        /// Makes a call.
        ///
        /// - Parameters:
        ///   - name: the name of the tool.
        ///   - arguments: the arguments, a JSON object as text.
        ///   - id: the identifier of the call.
        public init(name: String, arguments: String = "{}", id: String? = nil) {
            (self.name, self.arguments, self.id) = (name, arguments, id)
        }

        /// Reads a call of a record, `{"type": "function", "function": {…}}` or `{"name": …, "arguments": …}`.
        public init(from decoder: any Decoder) throws { self = try TextRecords.call(JSONValue(from: decoder)) }

        /// Writes a call of a record.
        public func encode(to encoder: any Encoder) throws { try json.encode(to: encoder) }

        var json: JSONValue {
            let function: JSONValue = .object(["name": .string(name), "arguments": .string(arguments)])
            var fields: [String: JSONValue] = ["type": .string("function"), "function": function]
            fields["id"] = id.map { .string($0) }
            return .object(fields)
        }
    }
}
