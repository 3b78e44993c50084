import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

extension TextTokenizer {
    package func asTrained(_ bundle: URL) -> any TextTokenizer {
        var trained = TrainedTokenizer(tokenizer: self)
        let encoding = readJSON("manifest.json", in: bundle)?["encoding"]?.fields
        if case .object(let options)? = encoding?[Fields.options] { trained.options = options }
        trained.joinsTexts = encoding?["chat"] == .bool(false)
        return trained
    }

    /// Whether a prompt and an answer that are texts are joined without the chat template. Messages always take it.
    var joinsTexts: Bool { !hasChatTemplate || (self as? TrainedTokenizer)?.joinsTexts == true }
}

struct TrainedTokenizer: TextTokenizer {
    let tokenizer: any TextTokenizer
    var options = [String: JSONValue]()
    var joinsTexts = false

    var beginOfText: Int? { tokenizer.beginOfText }
    var endOfText: Int? { tokenizer.endOfText }
    var hasChatTemplate: Bool { tokenizer.hasChatTemplate }
    func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
        tokenizer.encode(text, addsSpecialTokens: addsSpecialTokens)
    }
    func decode(_ tokens: [Int]) -> String { tokenizer.decode(tokens) }
    func isSpecial(_ token: Int) -> Bool { tokenizer.isSpecial(token) }
    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
        options: [String: any Sendable]
    ) throws -> [Int] {
        try tokenizer.applyChatTemplate(
            messages: messages, tools: tools, addsGenerationPrompt: addsGenerationPrompt, options: options)
    }

    /// Returns the variables for a conversation, which must have none or the bundle's.
    func options(of conversation: Conversation) throws -> [String: JSONValue] {
        guard conversation.options.isEmpty || conversation.options == options else {
            throw MeSPError(
                "it has \"\(Fields.options)\" \(JSONValue.object(conversation.options).json), and the model is asked with \(JSONValue.object(options).json): remove them, or export the bundle with them."
            )
        }
        return options
    }
}
