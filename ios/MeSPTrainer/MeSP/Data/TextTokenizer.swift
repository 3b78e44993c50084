/// A tokenizer, which turns text into token ids and back.
///
/// The library `MeSPTokenizers` has a tokenizer that reads the files in a bundle with swift-transformers. An app that loads the model with
/// mlx-swift-lm adapts the tokenizer of mlx-swift-lm. Token ids are indices into the model's vocabulary, from 0.
public protocol TextTokenizer: Sendable {
    /// The id of the token that begins a text; nil if the model has none.
    var beginOfText: Int? { get }
    /// The id of the token that ends a text; nil if the model has none.
    var endOfText: Int? { get }
    /// Returns the ids of `text`. If `addsSpecialTokens` is true, the ids include the special tokens that the model puts around a text. `beginOfText`
    /// may be one of these. Some models define `beginOfText` and do not use it.
    func encode(_ text: String, addsSpecialTokens: Bool) -> [Int]
    /// Returns the text of ids, including the text of special tokens. ``encode(_:addsSpecialTokens:)`` turns that text back into the same ids.
    func decode(_ tokens: [Int]) -> String
    /// Returns whether a token is special, such as the token that ends a message.
    func isSpecial(_ token: Int) -> Bool
    /// Whether the model has a chat template.
    var hasChatTemplate: Bool { get }
    /// Encodes a conversation in the model's chat template.
    ///
    /// - Parameters:
    ///   - messages: the messages in the form that Hugging Face's templates take: `role` and `content`, and optionally `tool_calls`, `name` and
    ///     `tool_call_id`. A tool call is `{"type": "function", "function": {"name": …, "arguments": {…}}}`. If the template refuses this form, MeSP
    ///     calls this function again, with the arguments as JSON text. MeSP sometimes passes placeholder texts, to locate the texts in the result. A
    ///     JSON object is a dictionary, and JSON's null is an `Optional` without a value. Write the keys of a dictionary in the same order each time,
    ///     for example sorted, as swift-transformers does.
    ///   - tools: the definitions of tools; nil if there are none.
    ///   - addsGenerationPrompt: whether the opening of an answer follows the last message.
    /// - Returns: the ids.
    /// - Throws: an error if the template refuses the conversation.
    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool
    ) throws -> [Int]
}
