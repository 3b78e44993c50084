import MeSPBundle

@testable import MeSP

/// A token a byte.
struct ByteTokenizer: TextTokenizer {
    var beginOfText: Int?
    /// Whether a text is to begin with that token.
    var addsBegin = false
    let endOfText: Int? = 0
    var hasChatTemplate = true
    /// Whether the template writes a thought before an answer that ends the conversation, or that nothing but answers follow.
    var thinks = false
    func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
        let begin = addsSpecialTokens && addsBegin ? beginOfText.map { [$0] } : nil
        return (begin ?? []) + text.utf8.map { Int($0) }
    }
    func decode(_ tokens: [Int]) -> String { String(decoding: tokens.map { UInt8($0 % 256) }, as: UTF8.self) }
    func isSpecial(_ token: Int) -> Bool { token == beginOfText || token == endOfText }
    func encode(_ messages: [ChatMessage], opensAnswer: Bool) -> [Int] {
        let question = messages.lastIndex { $0.role == "user" } ?? messages.count
        let texts = messages.enumerated().map { index, message in
            "<\(message.role)>\(thinks && index > question ? "(hm)" : "")\(message.content)\n"
        }
        return encode(texts.joined() + (opensAnswer ? "<assistant>" : ""), addsSpecialTokens: false)
    }
}
