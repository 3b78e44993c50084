/// A tokenizer. It turns text into token ids and back. Token ids are indices into the model's vocabulary, from 0.
///
/// The library `MeSPTokenizers` has a tokenizer for the files in a bundle, based on swift-transformers. `MeSPMLXLM` takes that of an mlx-swift-lm
/// container.
public protocol TextTokenizer: Sendable {
    /// The id of the begin-of-text token; nil if the model has none.
    var beginOfText: Int? { get }
    /// The id of the end-of-text token; nil if the model has none.
    var endOfText: Int? { get }
    /// Returns the token ids of `text`. If `addsSpecialTokens` is true, they include the special tokens that the model puts around a text.
    func encode(_ text: String, addsSpecialTokens: Bool) -> [Int]
    /// Returns the text of token ids, including special tokens.
    func decode(_ tokens: [Int]) -> String
    /// Returns whether a token is special, such as the end-of-message token.
    func isSpecial(_ token: Int) -> Bool
    /// Whether the model has a chat template.
    var hasChatTemplate: Bool { get }
    /// Encodes a conversation with the model's chat template.
    ///
    /// MeSP sometimes passes placeholders in place of texts. If the template refuses the arguments of tool calls as JSON objects, MeSP calls this
    /// function again with the arguments as JSON text. Write the keys of a dictionary in a fixed order, for example sorted.
    ///
    /// - Parameters:
    ///   - messages: the messages, with `role` and `content`, and optionally `tool_calls`, `name` and `tool_call_id`. `content` is a text, or a list of
    ///     `{"type": "image"}` and `{"type": "text", "text": …}` with images or for a template that writes only such lists. A tool call is `{"type":
    ///     "function", "function": {"name": …, "arguments": {…}}}`, optionally with `id`. A JSON object is a dictionary, and JSON's null is an empty
    ///     `Optional`.
    ///   - tools: the definitions of tools; nil if there are none.
    ///   - addsGenerationPrompt: whether to add the opening of an answer after the last message.
    ///   - options: variables for the template, such as `enable_thinking`.
    /// - Returns: the token ids.
    /// - Throws: an error if the template refuses the conversation or a variable.
    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
        options: [String: any Sendable]
    ) throws -> [Int]
}
