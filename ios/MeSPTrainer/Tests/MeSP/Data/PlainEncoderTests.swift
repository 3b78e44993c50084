import Testing

@testable import MeSP
@testable import MeSPBundle

@Suite struct PlainEncoderTests {
    private let chatML = TemplateTokenizer(words: ["<|", "|>", "im", "\n\n"], template: TemplateTokenizer.chatML)

    private func specials(_ ids: [Int]) -> [Int] { ids.filter { chatML.isSpecial($0) } }

    @Test func aTextHasNoSpecialTokens() throws {
        var plain = PlainEncoder(chatML)
        #expect(
            try plain.encode("a <| b", addsSpecialTokens: false) == chatML.encode("a <| b", addsSpecialTokens: false))
        #expect(!plain.hasSplit)
        for text in [
            "<|im_end|>", "a<|im_end|>\n<|im_start|>", "<|im_<|im_end|>end|>é</s>🙂<s>", "<|im_end|><|im_end|>\n\n",
        ] {
            let ids = try plain.encode(text, addsSpecialTokens: false)
            #expect(chatML.decode(ids) == text && specials(ids).isEmpty)
        }
        #expect(plain.hasSplit)
        let known = ["<|", "im"].map { chatML.encode($0, addsSpecialTokens: false)[0] }
        let ids = try plain.encode("x <|im_end|>", addsSpecialTokens: false)
        #expect(ids.count == 9 && ids[2...3].elementsEqual(known))
    }

    @Test func whatIsPutAroundATextStays() throws {
        let begin = TemplateTokenizer.id("<s>")
        let tokenizer = TemplateTokenizer(beginOfText: begin, addsBegin: true)
        var plain = PlainEncoder(tokenizer)
        let ids = try plain.encode("<s>a</s>", addsSpecialTokens: true)
        #expect(ids.first == begin && !ids.dropFirst().contains { tokenizer.isSpecial($0) })
        #expect(tokenizer.decode(ids) == "<s><s>a</s>")
    }

    @Test func spacesOfSentencePieceAreNotAdded() throws {
        let tokenizer = TemplateTokenizer(addsSpace: true)
        var plain = PlainEncoder(tokenizer)
        for text in ["a</s>b", "</s>\nb", "a </s> :</s>"] {
            #expect(tokenizer.decode(try plain.encode(text, addsSpecialTokens: false)) == text)
        }
    }

    @Test(arguments: [TemplateTokenizer.chatML, TemplateTokenizer.systemIsLast, TemplateTokenizer.phi])
    func theTemplatesTokensStay(_ template: @escaping TemplateTokenizer.Template) throws {
        let tokenizer = TemplateTokenizer(words: ["<|", "|>"], template: template)
        func turns(_ text: String) -> [Said] {
            said(
                ("system", "Be. \(text)"), ("user", text), ("assistant", "\(text) MeSPcut0z"),
                ("user", "MeSPcut1z \(text)"))
        }
        var plain = PlainEncoder(tokenizer)
        func asked(_ text: String) -> Conversation {
            Conversation(turns(text).map { Conversation.Message(role: $0.role, content: $0.content) })
        }
        let usual = try asked("x").applied(to: tokenizer, addsGenerationPrompt: true)
        #expect(try plain.encode(asked("x"), addsGenerationPrompt: true) == usual && !plain.hasSplit)
        for text in ["a<|im_end|>", "</s><s>[INST]", "<|user|>\n<|endoftext|> <|im_start|>"] {
            let ids = try plain.encode(asked(text), addsGenerationPrompt: true)
            #expect(tokenizer.decode(ids) == template(turns(text), true))
            #expect(ids.filter(tokenizer.isSpecial) == usual.filter(tokenizer.isSpecial))
        }
    }

    @Test func whatCannotBeTextIsRefused() {
        let said = message {
            var plain = PlainEncoder(ByteTokenizer())
            _ = try plain.encode("a\0", addsSpecialTokens: false)
        }
        #expect(said == "The model's tokenizer cannot take \0 as text; remove it from the text.")
    }

    private final class Counting: WrappedTokenizer, @unchecked Sendable {
        let wrapped: any TextTokenizer = TemplateTokenizer(template: TemplateTokenizer.chatML)
        var bytes = 0

        func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
            bytes += text.utf8.count
            return wrapped.encode(text, addsSpecialTokens: addsSpecialTokens)
        }
    }

    @Test func aTextOfSpecialTokensTakesNoMoreThanItsLength() throws {
        let tokenizer = Counting()
        var plain = PlainEncoder(tokenizer)
        let text = String(repeating: "<|im_end|>", count: 2_000)
        let ids = try plain.encode(text, addsSpecialTokens: false)
        #expect(specials(ids).isEmpty && chatML.decode(ids) == text)
        #expect(tokenizer.bytes < 10 * text.utf8.count)
    }
}
