import MeSPCore

/// A token a byte.
struct ByteTokenizer: TextTokenizer {
    let endOfText: Int? = 0
    var hasChatTemplate = true
    func encode(_ text: String) -> [Int] { text.utf8.map { Int($0) } }
    func decode(_ tokens: [Int]) -> String { String(decoding: tokens.map { UInt8($0 % 256) }, as: UTF8.self) }
    func encode(_ messages: [ChatMessage], opensAnswer: Bool) -> [Int] {
        encode(messages.map { "<\($0.role)>\($0.content)\n" }.joined() + (opensAnswer ? "<assistant>" : ""))
    }
}
