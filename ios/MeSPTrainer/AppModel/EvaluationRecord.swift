import Foundation
import MeSP
import MeSPBundle
import MeSPCore
import MeSPFiles
import MeSPSentences

enum EvaluationRecord: Sendable {
    case text(String)
    /// A multiple-choice question. `answer` is the index of the right choice.
    case question(prompt: String, choices: [String], answer: Int)
    /// A conversation and its expected answer.
    case task(Conversation, answer: String)

    var kind: Evaluation.Score.Kind {
        switch self {
        case .text: .perplexity
        case .question: .accuracy
        case .task: .exactMatch
        }
    }

    /// Parses JSON Lines or a JSON array of records.
    ///
    /// - Returns: the records, and the keys in them that are ignored.
    /// - Throws: `MeSPError` if a record is invalid or there is no record.
    static func read(_ data: Data) throws -> (records: [EvaluationRecord], unread: Set<String>) {
        var (records, unread, refusals) = ([EvaluationRecord](), Set<String>(), RefusedRecords())
        for (place, fields) in TextRecords.objects(in: data, of: nil) {
            try refusals.collect(place) {
                guard let fields else { throw TextRecords.noObject }
                let (record, keys) = try Self.record(fields)
                guard record.kind == records.first?.kind ?? record.kind else {
                    throw MeSPError("it is another kind of record than the first; keep one kind.")
                }
                records.append(record)
                unread.formUnion(TextRecords.unread(fields, but: keys))
            }
        }
        try refusals.check()
        guard !records.isEmpty else { throw MeSPError("The file has no records to measure.") }
        return (records, unread)
    }

    private static func record(_ fields: [String: JSONValue]) throws -> (EvaluationRecord, read: [String]) {
        let wrong = MeSPError(
            "it is not a record to evaluate; records have \"text\", \"prompt\", \"choices\" and \"answer\", \"prompt\" and \"completion\", or \"messages\"."
        )
        try TextRecords.refuseUnusable(in: fields)
        if let choices = fields["choices"] {
            let texts = choices.array?.compactMap(\.string) ?? []
            let answer: Int? =
                switch fields["answer"] {
                case .integer(let index): index
                case .number(let index): Int(exactly: index)
                case .string(let text): texts.firstIndex(of: text)
                default: nil
                }
            guard let prompt = fields["prompt"]?.string, let answer, texts.count > 1,
                texts.count == choices.array?.count,
                texts.indices.contains(answer), !texts.contains(where: \.isEmpty)
            else { throw wrong }
            return (.question(prompt: prompt, choices: texts, answer: answer), ["prompt", "choices", "answer"])
        }
        let tools = try TextRecords.tools(fields)
        if let prompt = fields["prompt"], let completion = fields["completion"], !prompt.isEmpty {
            let asked = try messages(prompt, "user", in: "prompt")
            let answer = try messages(completion, "assistant", in: "completion")
            return (try task(asked + answer, tools), ["prompt", "completion", "tools"])
        }
        if let messages = fields["messages"], !messages.isEmpty {
            return (try task(TextRecords.messages(messages, in: "messages"), tools), ["messages", "tools"])
        }
        guard let text = fields["text"]?.string, !text.isEmpty else { throw wrong }
        return (.text(text), ["text"])
    }

    private static func messages(_ value: JSONValue, _ role: String, in key: String) throws -> [Conversation.Message] {
        if let text = value.string { return [Conversation.Message(role: role, content: text)] }
        return try TextRecords.messages(value, in: key)
    }

    private static func task(_ messages: [Conversation.Message], _ tools: [String]) throws -> EvaluationRecord {
        guard messages.count > 1, let last = messages.last, last.role == "assistant" else {
            throw MeSPError("the last message is not an answer; add an assistant message.")
        }
        guard last.toolCalls.isEmpty else {
            throw MeSPError("the last message calls a tool, which is not compared; leave the record out.")
        }
        if TextRecords.isBlank(last.content) { throw TextRecords.emptyAnswer }
        return .task(Conversation(messages.dropLast(), tools: tools), answer: last.content)
    }
}
