@testable import MeSP

struct ByteTokenizer: TextTokenizer {
    var beginOfText: Int?
    var addsBegin = false
    let endOfText: Int? = 0
    var hasChatTemplate = true
    var thinks = false
    func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
        let begin = addsSpecialTokens && addsBegin ? beginOfText.map { [$0] } : nil
        return (begin ?? []) + text.utf8.map { Int($0) }
    }
    func decode(_ tokens: [Int]) -> String { String(decoding: tokens.map { UInt8($0 % 256) }, as: UTF8.self) }
    func isSpecial(_ token: Int) -> Bool { token == beginOfText || token == endOfText }
    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
        options: [String: any Sendable]
    ) -> [Int] {
        let messages = Said.read(messages)
        let question = messages.lastIndex { $0.role == "user" } ?? messages.count
        let texts = messages.enumerated().map { index, message in
            "<\(message.role)>\(thinks && index > question ? "(hm)" : "")\(message.content)\n"
        }
        return encode(texts.joined() + (addsGenerationPrompt ? "<assistant>" : ""), addsSpecialTokens: false)
    }
}

struct Said: Equatable {
    var role: String
    var content: String

    static func read(_ messages: [[String: any Sendable]]) -> [Said] {
        messages.map { Said(role: $0["role"] as? String ?? "", content: text(of: $0["content"])) }
    }

    /// An image is a #.
    private static func text(of content: (any Sendable)?) -> String {
        guard let parts = content as? [any Sendable] else { return content as? String ?? "" }
        return parts.map { part in
            let part = part as? [String: any Sendable] ?? [:]
            return part["type"] as? String == "image" ? "#" : part["text"] as? String ?? ""
        }.joined()
    }
}

func said(_ turns: (role: String, content: String)...) -> [Said] {
    turns.map { Said(role: $0.role, content: $0.content) }
}
