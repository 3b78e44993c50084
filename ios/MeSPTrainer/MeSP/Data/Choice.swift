import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// A preference between two answers to one conversation.
///
/// A choice is encoded as a record that TRL and `mesp data` read. `prompt`, `chosen` and `rejected` are lists of messages. The record also has `id`
/// and `date`. Train on choices with ``FineTuner/train(on:_:)-([Choice],_)``.
public struct Choice: Codable, Sendable, Equatable, Identifiable {
    /// The identifier of the choice.
    public let id: UUID
    /// The time of the choice.
    public let date: Date
    /// The conversation before the answers. Its last message is not an answer.
    public let prompt: [Conversation.Message]
    /// The text of the preferred answer.
    public let chosen: String
    /// The text of the other answer.
    public let rejected: String

    /// Creates a choice.
    ///
    /// - Throws: ``FineTuningError`` if an answer is empty or only white space, both answers are equal, or `prompt` has images or does not end with a
    ///   message to answer.
    public init(prompt: [Conversation.Message], chosen: String, rejected: String, date: Date = .now) throws {
        guard let last = prompt.last, last.role != "assistant" else {
            throw FineTuningError("A choice needs the message that both answers reply to.")
        }
        guard !chosen.isBlank, !rejected.isBlank else { throw FineTuningError("One of the two answers is empty.") }
        guard chosen != rejected else {
            throw FineTuningError("The two answers are equal, so there is nothing to choose.")
        }
        try prompt.checkAreText()
        (id, self.date) = (UUID(), date)
        (self.prompt, self.chosen, self.rejected) = (prompt, chosen, rejected)
    }

    /// The columns of the record, besides `id` and `date`. TRL and `mesp data` read each answer as a list of one message.
    var fields: [String: JSONValue] {
        func answer(_ text: String) -> JSONValue { .array([Conversation.Message.assistant(text).json]) }
        return ["prompt": .array(prompt.map(\.json)), "chosen": answer(chosen), "rejected": answer(rejected)]
    }

    private enum Key: String, CodingKey { case id, date, prompt, chosen, rejected }

    public init(from decoder: any Decoder) throws {
        let fields = try decoder.container(keyedBy: Key.self)
        func answer(_ key: Key) throws -> String {
            let messages = try fields.decode([Conversation.Message].self, forKey: key)
            guard messages.count == 1 else {
                throw DecodingError.dataCorruptedError(forKey: key, in: fields, debugDescription: "not one message")
            }
            return messages[0].content
        }
        id = try fields.decode(UUID.self, forKey: .id)
        date = try fields.decode(Date.self, forKey: .date)
        prompt = try fields.decode([Conversation.Message].self, forKey: .prompt)
        (chosen, rejected) = (try answer(.chosen), try answer(.rejected))
    }

    public func encode(to encoder: any Encoder) throws {
        var container = encoder.container(keyedBy: Key.self)
        try container.encode(id, forKey: .id)
        try container.encode(date, forKey: .date)
        for key in [Key.prompt, .chosen, .rejected] { try container.encode(fields[key.rawValue], forKey: key) }
    }
}
