import Foundation
import MeSPFiles
import MeSPSentences

/// A conversation: messages for the model's chat template, and the tools that the model may call.
///
/// It is encoded as a record in Hugging Face's format: `{"messages": [{"role": "user", "content": "Hi"}, …], "tools": […]}`.
public struct Conversation: Codable, Sendable, Hashable {
    /// The messages, the oldest first.
    public var messages: [Message]
    /// The definitions of tools. Each is the text of a JSON object.
    public var tools: [String]
    /// The number of messages that come from a record's `prompt`; 0 for a record with `messages`. Answers among these messages are not trained.
    package var prompt = 0
    /// Whether the prompt and the answer are texts, which a model without a chat template takes joined.
    var areTexts = false
    /// Whether the chat template takes the arguments of tool calls as JSON text.
    var argumentsAreText = false
    package var options = [String: JSONValue]()

    /// Creates a conversation.
    public init(_ messages: [Message], tools: [String] = []) { (self.messages, self.tools) = (messages, tools) }

    /// Decodes a record with `messages`, or with `prompt` and `completion`.
    public init(from decoder: any Decoder) throws {
        guard case .object(let columns) = try JSONValue(from: decoder) else { throw Fields.noObject }
        var fields = Fields(columns)
        guard Self.isRead(from: fields) else {
            throw MeSPError("it has no conversation; records have \"messages\", or \"prompt\" and \"completion\".")
        }
        _ = try fields.takeWeight()
        self = try Self.read(&fields)
        try fields.left.check()
    }

    /// Encodes a record with `messages`, or with `prompt` and `completion`. The record has `tools` if the conversation has tools.
    ///
    /// - Throws: ``FineTuningError`` if it has images, whose features no record holds.
    public func encode(to encoder: any Encoder) throws {
        try messages.checkAreText()
        try JSONValue.object(fields).encode(to: encoder)
    }

    /// Reads the conversations in a file. `.jsonl` and `.ndjson` files have a record on each line. A `.json` file has a record on each line, or one
    /// list of records. A record has `messages`, `prompt` and `completion`, or `instruction` and `output` or `response`, and optionally `tools`. Records that are excluded from training by a
    /// key such as `weight` are skipped.
    ///
    /// - Throws: ``FineTuningError`` if the file cannot be read, or with the first unsuitable record and the reason.
    public static func read(contentsOf url: URL) throws -> [Conversation] {
        try FineTuningError.describing {
            let read = try Records(.file(url))
            return try read.records.map { _, record in
                guard let conversation = record as? Conversation else {
                    throw MeSPError("\(read.name) has texts, and no conversations; write records with \"messages\".")
                }
                return conversation
            }
        }
    }

    var fields: [String: JSONValue] {
        let said = messages.map(\.json)
        var fields: [String: JSONValue] =
            prompt == 0
            ? ["messages": .array(said)]
            : ["prompt": .array(Array(said.prefix(prompt))), "completion": .array(Array(said.dropFirst(prompt)))]
        // Text that is not JSON becomes a string. A later check refuses a tool that is a string.
        if let texts { (fields["prompt"], fields["completion"]) = (.string(texts.prompt), .string(texts.answer)) }
        if !options.isEmpty { fields[Fields.options] = .object(options) }
        if !tools.isEmpty { fields["tools"] = .array(tools.map { (try? JSONValue(json: $0.utf8)) ?? .string($0) }) }
        return fields
    }

    var texts: (prompt: String, answer: String)? {
        guard areTexts, prompt == 1, messages.count == 2, messages[0].images.isEmpty, messages[1].toolCalls.isEmpty
        else { return nil }
        return (messages[0].content, messages[1].content)
    }

    var trained: [Int] {
        messages.indices.filter { $0 >= prompt && messages[$0].isAnswer && messages[$0].isTrained }
    }
}

extension Conversation {
    /// A message of a conversation.
    public struct Message: Codable, Sendable, Hashable {
        /// The author's role: `system`, `developer`, `user`, `assistant`, `tool` or `function`.
        public var role: String
        /// The text of the message. In an answer, thoughts come first, in `<think>…</think>`.
        public var content: String
        /// The tool calls of an answer.
        public var toolCalls: [ToolCall]
        /// Whether to train an answer. It has no effect on other messages.
        public var isTrained: Bool
        /// The images of a message that is not an answer. They come before its text, and their tokens are never in the loss. Only training takes them.
        public var images = [ImageFeatures]()
        /// A name for the chat template, such as the name of the tool whose result this message has.
        public var name: String?
        /// The ``ToolCall/id`` of the call to which a tool's result belongs.
        public var toolCallID: String?

        /// Creates a message.
        public init(role: String, content: String, toolCalls: [ToolCall] = [], isTrained: Bool = true) {
            (self.role, self.content, self.toolCalls, self.isTrained) = (role, content, toolCalls, isTrained)
        }

        /// Returns an instruction to the model. It comes first in a conversation.
        public static func system(_ content: String) -> Message { Message(role: "system", content: content) }
        /// Returns a message of the person.
        public static func user(_ content: String, images: [ImageFeatures] = []) -> Message {
            var message = Message(role: "user", content: content)
            message.images = images
            return message
        }
        /// Returns an answer of the model. The answer is trained.
        public static func assistant(_ content: String, toolCalls: [ToolCall] = []) -> Message {
            Message(role: "assistant", content: content, toolCalls: toolCalls)
        }
        /// Returns a message with a tool's result.
        public static func tool(_ content: String) -> Message { Message(role: "tool", content: content) }

        /// Decodes a message of a record.
        public init(from decoder: any Decoder) throws {
            var fields = Fields([:])
            self = try fields.message(JSONValue(from: decoder))
            try fields.left.check()
        }

        /// Encodes the message of a record.
        ///
        /// - Throws: ``FineTuningError`` if it has images, whose features no record holds.
        public func encode(to encoder: any Encoder) throws {
            try [self].checkAreText()
            try json.encode(to: encoder)
        }

        package var isAnswer: Bool { role == "assistant" }

        var json: JSONValue {
            var fields: [String: JSONValue] = ["role": .string(role), "content": .string(content)]
            if !toolCalls.isEmpty { fields["tool_calls"] = .array(toolCalls.map(\.json)) }
            fields["name"] = name.map { .string($0) }
            fields["tool_call_id"] = toolCallID.map { .string($0) }
            if isAnswer, !isTrained { fields["weight"] = .integer(0) }
            return .object(fields)
        }
    }

    /// A call of a tool in an answer.
    public struct ToolCall: Codable, Sendable, Hashable {
        /// The name of the tool.
        public var name: String
        /// The arguments, as the text of a JSON object.
        public var arguments: String
        /// The identifier of the call, for the chat template.
        public var id: String?

        /// Creates a call.
        public init(name: String, arguments: String = "{}", id: String? = nil) {
            (self.name, self.arguments, self.id) = (name, arguments, id)
        }

        /// Decodes a call of a record: `{"type": "function", "function": {…}}` or `{"name": …, "arguments": …}`.
        public init(from decoder: any Decoder) throws {
            var fields = Fields([:])
            self = try fields.call(JSONValue(from: decoder))
            try fields.left.check()
        }

        /// Encodes the call of a record.
        public func encode(to encoder: any Encoder) throws { try json.encode(to: encoder) }

        var json: JSONValue { json(arguments: .string(arguments)) }

        func json(arguments: JSONValue) -> JSONValue {
            let function: JSONValue = .object(["name": .string(name), "arguments": arguments])
            var fields: [String: JSONValue] = ["type": .string("function"), "function": function]
            fields["id"] = id.map { .string($0) }
            return .object(fields)
        }
    }
}
