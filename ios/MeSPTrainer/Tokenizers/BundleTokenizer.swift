#if Tokenizers
    import Foundation
    import MeSP
    import Tokenizers

    /// Loads the tokenizer of a bundle or a model with swift-transformers.
    ///
    /// - Parameter bundle: the folder of the bundle or the model.
    /// - Throws: `FineTuningError` if the tokenizer's files cannot be read.
    public func loadTokenizer(bundle: URL) async throws -> any TextTokenizer {
        try await BundleTokenizer(bundle: bundle)
    }

    struct BundleTokenizer: TextTokenizer {
        private let tokenizer: any Tokenizer

        init(bundle: URL) async throws {
            do {
                tokenizer = try await AutoTokenizer.from(modelFolder: bundle)
            } catch {
                throw FineTuningError(
                    "The tokenizer in \(bundle.lastPathComponent) cannot be read: \(error.localizedDescription) Train on the bundle's own text, or export the bundle again."
                )
            }
        }

        var beginOfText: Int? { tokenizer.bosTokenId }
        var endOfText: Int? { tokenizer.eosTokenId }
        var hasChatTemplate: Bool { tokenizer.hasChatTemplate }

        func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
            tokenizer.encode(text: text, addSpecialTokens: addsSpecialTokens)
        }

        func decode(_ tokens: [Int]) -> String { tokenizer.decode(tokens: tokens) }

        func isSpecial(_ token: Int) -> Bool {
            tokenizer.decode(tokens: [token], skipSpecialTokens: true).isEmpty && !decode([token]).isEmpty
        }

        func applyChatTemplate(
            messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
            options: [String: any Sendable]
        ) throws -> [Int] {
            try tokenizer.applyChatTemplate(
                messages: messages, chatTemplate: nil, addGenerationPrompt: addsGenerationPrompt, truncation: false,
                maxLength: nil, tools: tools, additionalContext: options)
        }
    }
#endif
