import Foundation
import MeSPBundle
import MeSPCore
import MeSPSentences

@testable import MeSP

/// A tokenizer with one token per byte, special token or word. It can have a chat template.
struct TemplateTokenizer: TextTokenizer {
    typealias Template = @Sendable ([Said], Bool) -> String

    static let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|user|>"]

    var beginOfText: Int?
    var addsBegin = false
    var endOfText: Int? = TemplateTokenizer.id("<|endoftext|>")
    var words = [String]()
    /// Whether encoding puts a space before a text and decoding removes it, as SentencePiece does.
    var addsSpace = false
    var template: Template?

    var hasChatTemplate: Bool { template != nil }

    static func id(_ special: String) -> Int { 256 + (specials.firstIndex(of: special) ?? 0) }

    func isSpecial(_ token: Int) -> Bool { (256..<256 + Self.specials.count).contains(token) }

    func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
        let known = (Self.specials + words).map { Array($0.utf8) }
        var (ids, rest) = ([Int](), Array((addsSpace && !text.isEmpty ? " " + text : text).utf8)[...])
        if addsSpecialTokens, addsBegin, let beginOfText { ids.append(beginOfText) }
        while let byte = rest.first {
            if let token = known.firstIndex(where: { rest.starts(with: $0) }) {
                ids.append(256 + token)
                rest = rest.dropFirst(known[token].count)
            } else {
                ids.append(Int(byte))
                rest = rest.dropFirst()
            }
        }
        return ids
    }

    func decode(_ tokens: [Int]) -> String {
        let known = (Self.specials + words).map { Array($0.utf8) }
        let bytes = tokens.flatMap { $0 < 256 ? [UInt8($0)] : known[$0 - 256] }
        let text = String(decoding: bytes, as: UTF8.self)
        return addsSpace && text.hasPrefix(" ") ? String(text.dropFirst()) : text
    }

    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
        options: [String: any Sendable]
    ) throws -> [Int] {
        guard let template else { throw MeSPError("There is no template.") }
        let text = template(Said.read(messages), addsGenerationPrompt)
        var bare = self
        bare.addsSpace = false
        return bare.encode(text, addsSpecialTokens: false)
    }

    // MARK: - Templates

    static let chatML: Template = { messages, opens in
        messages.map { "<|im_start|>\($0.role)\n\($0.content)<|im_end|>\n" }.joined()
            + (opens ? "<|im_start|>assistant\n" : "")
    }
    /// A template like MiniCPM's, which writes nothing after an answer and no white space around a text.
    static let endless: Template = { messages, _ in
        messages.map {
            let text = $0.content.trimmed
            return $0.role == "user" ? "<User>\(text)<AI>" : text
        }.joined()
    }
    /// A template like Phi's. A conversation ends with another token than a message does.
    static let phi: Template = { messages, opens in
        messages.map { "<|\($0.role)|>\n\($0.content)</s>\n" }.joined()
            + (opens ? "<|assistant|>\n" : "<|endoftext|>")
    }
    /// A template that ends a prompt with `<think>`, but does not add `<think>` to an answer.
    static let asksForThoughts: Template = { messages, opens in
        messages.enumerated().map { index, message in
            let text = message.content.components(separatedBy: "</think>")
            let isLast = index + 1 == messages.count
            return
                "<|im_start|>\(message.role)\n\((isLast ? message.content : text[text.count - 1]).trimmed)<|im_end|>\n"
        }.joined() + (opens ? "<|im_start|>assistant\n<think>\n" : "")
    }
    static let passesOver: Template = { messages, opens in
        chatML(messages.filter { ["user", "assistant"].contains($0.role) }, opens)
    }
    /// A template like Mistral's, with the system's text in the last message of the user.
    static let systemIsLast: Template = { messages, _ in
        let system = messages.filter { $0.role == "system" }.map { $0.content + "\n\n" }.joined()
        let last = messages.lastIndex { $0.role == "user" }
        return "<s>"
            + messages.enumerated().map { index, message in
                switch message.role {
                case "user": "[INST] \(index == last ? system : "")\(message.content) [/INST]"
                case "assistant": " \(message.content)</s>"
                default: ""
                }
            }.joined()
    }
    static let inCapitals: Template = { messages, opens in
        chatML(messages.map { Said(role: $0.role, content: $0.content.uppercased()) }, opens)
    }
}

extension String {
    fileprivate var trimmed: String { trimmingCharacters(in: .whitespacesAndNewlines) }
}
