/// Turns text into token ids and back, as the model that a bundle holds has it: in the app, swift-transformers' `Tokenizer`.
public protocol TextTokenizer: Sendable {
    /// The id of the token that ends a text; nil where the model has none.
    var endOfText: Int? { get }
    /// The ids of `text` alone, without special tokens around it.
    func encode(_ text: String) -> [Int]
    func decode(_ tokens: [Int]) -> String
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
