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
    /// - Returns: the records, and the columns that were not read.
    /// - Throws: `MeSPError` if a record is invalid or there is no record.
    static func read(_ data: Data) throws -> (records: [EvaluationRecord], noted: Set<String>) {
        var (records, refusals) = ([EvaluationRecord](), RefusedRecords())
        for (place, columns) in SourceRows.objects(in: data, of: nil) {
            let record = try refusals.read(place) { () -> (EvaluationRecord, LeftFields)? in
                guard var fields = columns else { throw Fields.noObject }
                _ = try fields.takeWeight()
                let record = try Self.record(&fields)
                guard record.kind == records.first?.kind ?? record.kind else {
                    throw MeSPError("it is another kind of record than the first; keep one kind.")
                }
                return (record, fields.left)
            }
            if let record { records.append(record) }
        }
        try refusals.check()
        guard !records.isEmpty else { throw MeSPError("The file has no records to measure.") }
        return (records, refusals.noted)
    }

    private static func record(_ fields: inout Fields) throws -> EvaluationRecord {
        let wrong = MeSPError(
            "it is not a record to evaluate; records have \"text\", \"prompt\", \"choices\" and \"answer\", \"prompt\" and \"completion\", or \"messages\"."
        )
        if let choices = fields.take("choices") {
            let texts = choices.array?.compactMap(\.string) ?? []
            let answer: Int? =
                switch fields.take("answer") {
                case .integer(let index): index
                case .number(let index): Int(exactly: index)
                case .string(let text): texts.firstIndex(of: text)
                default: nil
                }
            guard let prompt = fields.take("prompt")?.string, let answer, texts.count > 1,
                texts.count == choices.array?.count,
                texts.indices.contains(answer), !texts.contains(where: \.isEmpty)
            else { throw wrong }
            return .question(prompt: prompt, choices: texts, answer: answer)
        }
        if Conversation.isRead(from: fields) { return try task(Conversation.read(&fields)) }
        guard let text = fields.take("text")?.string, !text.isEmpty else { throw wrong }
        return .text(text)
    }

    private static func task(_ conversation: Conversation) throws -> EvaluationRecord {
        guard conversation.messages.count > 1, let last = conversation.messages.last, last.role == "assistant" else {
            throw MeSPError("the last message is not an answer; add an assistant message.")
        }
        guard last.toolCalls.isEmpty else {
            throw MeSPError("the last message calls a tool, which is not compared; leave the record out.")
        }
        if last.content.isBlank { throw Fields.emptyAnswer }
        var asked = conversation
        asked.messages.removeLast()
        return .task(asked, answer: last.content)
    }
}
