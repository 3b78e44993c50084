import Foundation
import MeSP

/// A byte-level tokenizer. Byte b has the id b + 1. The id 0 ends a text.
struct Bytes: TextTokenizer {
    private static let end = "<end>"

    var beginOfText: Int? { nil }
    var endOfText: Int? { 0 }
    var hasChatTemplate: Bool { true }

    func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
        let texts = text.components(separatedBy: Self.end).map { $0.utf8.map { Int($0) + 1 } }
        return Array(texts.joined(separator: [0]))
    }

    func decode(_ tokens: [Int]) -> String {
        tokens.split(separator: 0, omittingEmptySubsequences: false)
            .map { String(decoding: $0.map { UInt8(truncatingIfNeeded: $0 - 1) }, as: UTF8.self) }
            .joined(separator: Self.end)
    }

    func isSpecial(_ token: Int) -> Bool { token == 0 }

    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
        options: [String: any Sendable]
    ) throws -> [Int] {
        var text = try (tools ?? []).map { "tool: \(try json($0))\n" }.joined()
        for message in messages {
            let role = message["role"] as? String ?? ""
            text += "\(role): \(message["content"] as? String ?? "")"
            for call in message["tool_calls"] as? [[String: any Sendable]] ?? [] {
                text += "!\(try json(call["function"] ?? call))"
            }
            text += role == "assistant" ? Self.end : "\n"
        }
        return encode(text + (addsGenerationPrompt ? "assistant: " : ""), addsSpecialTokens: false)
    }

    private func json(_ value: Any) throws -> String {
        let data = try JSONSerialization.data(
            withJSONObject: value, options: [.sortedKeys, .withoutEscapingSlashes, .fragmentsAllowed])
        return String(decoding: data, as: UTF8.self)
    }
}
