/// The tokenizer of a bundle's model, which turns text into token ids and back: in the app, swift-transformers' `Tokenizer`.
public protocol TextTokenizer: Sendable {
    /// The id of the token that begins a text; nil where the model has none.
    var beginOfText: Int? { get }
    /// The id of the token that ends a text; nil where the model has none.
    var endOfText: Int? { get }
    /// The ids of `text`; where `addsSpecialTokens` is set, with what the model wants around a text. That may be `beginOfText`: some
    /// models that have it do not want it.
    func encode(_ text: String, addsSpecialTokens: Bool) -> [Int]
    /// The text of ids, with that of special tokens.
    func decode(_ tokens: [Int]) -> String
    /// Whether a token is special, as one that ends a message is, and no text.
    func isSpecial(_ token: Int) -> Bool
    /// Whether the model knows conversations.
    var hasChatTemplate: Bool { get }
    /// The ids of a conversation in the model's chat template, with the opening of an answer where `opensAnswer` is set.
    func encode(_ messages: [ChatMessage], opensAnswer: Bool) throws -> [Int]
}

public struct ChatMessage: Codable, Sendable, Equatable {
    public var role: String
    public var content: String

    public init(role: String, content: String) {
        (self.role, self.content) = (role, content)
    }
}
