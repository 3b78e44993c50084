@testable import MeSP

protocol WrappedTokenizer: TextTokenizer {
    var wrapped: any TextTokenizer { get }
}

extension WrappedTokenizer {
    var beginOfText: Int? { wrapped.beginOfText }
    var endOfText: Int? { wrapped.endOfText }
    var hasChatTemplate: Bool { wrapped.hasChatTemplate }

    func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
        wrapped.encode(text, addsSpecialTokens: addsSpecialTokens)
    }

    func decode(_ tokens: [Int]) -> String { wrapped.decode(tokens) }
    func isSpecial(_ token: Int) -> Bool { wrapped.isSpecial(token) }

    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
        options: [String: any Sendable]
    ) throws -> [Int] {
        try wrapped.applyChatTemplate(
            messages: messages, tools: tools, addsGenerationPrompt: addsGenerationPrompt, options: options)
    }
}
