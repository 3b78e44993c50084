#if MLXLM
    import MLXLMCommon
    import MeSP

    struct ContainerTokenizer: TextTokenizer {
        private let tokenizer: any Tokenizer
        let hasChatTemplate: Bool

        init(_ tokenizer: any Tokenizer) {
            self.tokenizer = tokenizer
            do {
                _ = try tokenizer.applyChatTemplate(messages: [["role": "user", "content": "Hi"]])
                hasChatTemplate = true
            } catch TokenizerError.missingChatTemplate {
                hasChatTemplate = false
            } catch {
                hasChatTemplate = true
            }
        }

        var beginOfText: Int? { tokenizer.bosToken.flatMap(tokenizer.convertTokenToId) }
        var endOfText: Int? { tokenizer.eosTokenId }

        func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
            tokenizer.encode(text: text, addSpecialTokens: addsSpecialTokens)
        }

        func decode(_ tokens: [Int]) -> String { tokenizer.decode(tokenIds: tokens, skipSpecialTokens: false) }

        func isSpecial(_ token: Int) -> Bool {
            tokenizer.decode(tokenIds: [token], skipSpecialTokens: true).isEmpty && !decode([token]).isEmpty
        }

        func applyChatTemplate(
            messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
            options: [String: any Sendable]
        ) throws -> [Int] {
            let asks: [String: any Sendable] = ["add_generation_prompt": addsGenerationPrompt]
            return try tokenizer.applyChatTemplate(
                messages: messages, tools: tools, additionalContext: options.merging(asks) { $1 })
        }
    }
#endif
