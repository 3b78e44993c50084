/// The tokenizer of a bundle's model, which turns text into token ids and back.
///
/// The library `MeSPTokenizers` has one that reads the bundle's files by swift-transformers. An app that has loaded the model with mlx-swift-lm
/// adapts the tokenizer that it has. Token ids are those of the model's vocabulary, from 0.
public protocol TextTokenizer: Sendable {
    /// The id of the token that begins a text; nil where the model has none.
    var beginOfText: Int? { get }
    /// The id of the token that ends a text; nil where the model has none.
    var endOfText: Int? { get }
    /// Encodes a text: the ids of `text`; where `addsSpecialTokens` is set, with what the model wants around a text. That may be `beginOfText`: some
    /// models that have it do not want it.
    func encode(_ text: String, addsSpecialTokens: Bool) -> [Int]
    /// Decodes ids to their text, with that of special tokens, which ``encode(_:addsSpecialTokens:)`` turns into the same ids again.
    func decode(_ tokens: [Int]) -> String
    /// Tells whether a token is special, as one that ends a message is, and no text.
    func isSpecial(_ token: Int) -> Bool
    /// Whether the model knows conversations.
    var hasChatTemplate: Bool { get }
    /// Encodes a conversation in the model's chat template.
    ///
    /// - Parameters:
    ///   - messages: in the form of Hugging Face's templates: `role` and `content`, and where a message has them `tool_calls`, `name` and
    ///     `tool_call_id`. A call is `{"type": "function", "function": {"name": …, "arguments": {…}}}`; where the template refuses that, it is asked
    ///     again with arguments that are JSON text. Some messages that it is asked for have invented texts, by which the places of texts are found. Objects are dictionaries, a null is an `Optional` without a value. Their keys are to be written in the same
    ///     order each time, as swift-transformers writes them in that of their names.
    ///   - tools: the definitions of tools; nil where there are none.
    ///   - addsGenerationPrompt: whether the opening of an answer follows the last message.
    /// - Returns: the ids.
    /// - Throws: an error where the template refuses the conversation.
    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool
    ) throws -> [Int]
}
