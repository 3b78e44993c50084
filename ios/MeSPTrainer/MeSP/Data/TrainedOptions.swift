import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

extension TextTokenizer {
    package func asTrained(_ bundle: URL) -> any TextTokenizer {
        var trained = TrainedTokenizer(self)
        let encoding = readJSON("manifest.json", in: bundle)?["encoding"]?.fields
        trained.options = if case .object(let options)? = encoding?[Fields.options] { options } else { [:] }
        trained.avoidsTemplate = encoding?["chat"] == .bool(false)
        return trained
    }

    /// Whether a prompt and an answer that are texts are joined without the chat template. Messages always take it.
    var joinsTexts: Bool { !hasChatTemplate || (self as? TrainedTokenizer)?.avoidsTemplate == true }
}

struct TrainedTokenizer: TextTokenizer {
    let tokenizer: any TextTokenizer
    /// The bundle's variables for the template; nil without a bundle.
    var options: [String: JSONValue]?
    var avoidsTemplate = false
    /// Whether the chat template leaves out a text that is not in a list of parts.
    let takesPartsAlone: Bool

    init(_ tokenizer: any TextTokenizer) {
        if let trained = tokenizer as? TrainedTokenizer {
            self = trained
            return
        }
        func writes(_ content: (String) -> any Sendable) -> Bool {
            let ids = [0, 1].map(MarkedConversation.mark).map {
                try? tokenizer.applyChatTemplate(
                    messages: [["role": "user", "content": content($0)]], tools: nil, addsGenerationPrompt: false,
                    options: [:])
            }
            return ids[0] != ids[1]
        }
        self.tokenizer = tokenizer
        takesPartsAlone =
            tokenizer.hasChatTemplate && !writes { $0 }
            && writes { [["type": "text", "text": $0]] as [[String: any Sendable]] }
    }

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
        guard let options else { return conversation.options }
        guard conversation.options.isEmpty || conversation.options == options else {
            throw MeSPError(
                "it has \"\(Fields.options)\" \(JSONValue.object(conversation.options).json), and the model is asked with \(JSONValue.object(options).json): remove them, or export the bundle with them."
            )
        }
        return options
    }
}
