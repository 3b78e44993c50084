import MLX

/// What a model has read of a text: its tokens, and their keys and values in each block. A text that begins with the same tokens is read
/// from there on; each next turn of a conversation is one.
///
///     var cache = KeyValueCache(limit: 1 << 26)
///     try generator.generate(turn, continuing: &cache) { show($0) }
///
/// It is good for one model with one set of adapters. A block that sees a window of tokens keeps those before it too, so every text can be
/// cut back to a beginning.
public struct KeyValueCache {
    private(set) var tokens = [Int]()
    /// None before the first token.
    var blocks = [KeyValues]()
    let limit: Int

    /// - Parameter limit: what is kept at most when a text has ended, in bytes: the beginning of the text that fits.
    public init(limit: Int = .max) { self.limit = limit }

    /// In bytes.
    public var size: Int { blocks.reduce(0) { $0 + $1.keys.nbytes + $1.values.nbytes } }

    /// Readies it to go on with a text: keeps what that begins with, but for its last token, which the next is chosen after.
    ///
    /// - Returns: the tokens to read.
    mutating func begin(_ text: [Int]) -> ArraySlice<Int> {
        let common = zip(tokens, text.dropLast()).prefix { $0 == $1 }.count
        cut(to: common)
        return text[common...]
    }

    /// All blocks have read these.
    mutating func add(_ read: ArraySlice<Int>) { tokens += read }

    /// Lets go of what is above the limit.
    mutating func end() {
        guard size > limit else { return }
        cut(to: tokens.count * limit / size)
    }

    /// A text that was stopped may have left blocks that read more tokens than others.
    private mutating func cut(to count: Int) {
        tokens.removeLast(tokens.count - count)
        for block in blocks.indices where blocks[block].count > count { blocks[block].cut(to: count) }
    }
}
