import MLX
import MeSPAdapters

/// The tokens of a text that a model has read, and the state after them in each block. For a text that begins with the same tokens, such as
/// the next turn of a conversation, a model reads only the rest.
///
///     var cache = PromptCache(limit: 1 << 26)
///     try generator.generate(turn, continuing: &cache) { show($0) }
///
/// A cache is for one bundle's model. When the model gets other adapters, the cache is emptied. Attention leaves the keys and values of each token,
/// even of those before a block's window, so the text can be cut back to any beginning. A recurrent block leaves one state. With such a block, the
/// cache keeps the states of two beginnings: the whole text, and a mark shortly before the end of the last prompt. A conversation continues from the
/// mark if its template writes a finished answer differently from an answer that has just been opened. A text that differs earlier is read from the
/// start.
package struct PromptCache {
    private(set) var tokens = [Int]()
    /// The state of each block; nil before the first token.
    package var blocks = [MixerState?]()
    let limit: Int
    /// The adapters of the model that read the text; nil for a run's adapters in memory.
    private var adapters: AdapterSelection?
    /// The beginning of the text that recurrent blocks can go back to: the number of its tokens, and the recurrent blocks' states after these, with
    /// nil for other blocks.
    private var mark: (count: Int, states: [MixerState?])?
    /// The number of tokens before the next mark.
    private var nextMark = 0
    /// The number of tokens from a mark to the prompt's end. A template opens an answer with fewer tokens.
    static let opening = 16

    /// - Parameter limit: the most bytes to keep when a text has ended. The beginning of the text that fits is kept.
    package init(limit: Int = .max) { self.limit = limit }

    /// Returns an empty cache with this cache's adapters and limit.
    func emptied() -> PromptCache {
        var cache = PromptCache(limit: limit)
        cache.adapters = adapters
        return cache
    }

    /// Prepares the cache for a model with these adapters. It drops all tokens if other adapters read them, or if `adapters` is nil.
    mutating func ready(for adapters: AdapterSelection?) {
        if adapters == nil || adapters != self.adapters { forget() }
        self.adapters = adapters
    }

    /// The size of the cache, in bytes.
    package var size: Int { (blocks + (mark?.states ?? [])).reduce(0) { $0 + ($1?.size ?? 0) } }

    /// The states of recurrent blocks after the last token.
    var recurrentStates: [MLXArray] { blocks.compactMap { $0 }.filter(\.isRecurrent).flatMap(\.arrays) }

    /// The part of `size` that does not grow with the text, in bytes.
    var recurrentSize: Int {
        (blocks + (mark?.states ?? [])).reduce(0) { $0 + ($1.flatMap { $0.isRecurrent ? $0.size : nil } ?? 0) }
    }

    /// Prepares the cache for a text. It keeps the tokens that the text begins with, but not the text's last token, which must be read to choose the
    /// next token.
    ///
    /// - Returns: the tokens to read.
    mutating func begin(_ text: [Int]) -> ArraySlice<Int> {
        cut(to: zip(tokens, text.dropLast()).prefix { $0 == $1 }.count)
        nextMark = max(0, text.count - Self.opening)
        setMark()
        return text[tokens.count...]
    }

    /// Returns `0..<count` in pieces of at most `size` tokens. With recurrent blocks, one piece ends at the next mark.
    func pieces(of count: Int, size: Int, isRecurrent: Bool) -> [Range<Int>] {
        let before = isRecurrent ? min(max(0, nextMark - tokens.count), count) : 0
        let after = tiles(of: count - before, size: size).map { before + $0.lowerBound..<before + $0.upperBound }
        return tiles(of: before, size: size) + after
    }

    /// Adds tokens that all blocks have read.
    mutating func add(_ read: ArraySlice<Int>) {
        tokens += read
        setMark()
    }

    private mutating func setMark() {
        guard tokens.count == nextMark, nextMark > 0 else { return }
        let states = blocks.map { state in state.flatMap { $0.isRecurrent ? $0 : nil } }
        if states.contains(where: { $0 != nil }) { mark = (nextMark, states) }
    }

    /// Cuts the cache to its limit.
    mutating func end() {
        guard size > limit else { return }
        let isRecurrent = blocks.contains { $0?.isRecurrent == true }
        cut(to: isRecurrent ? mark?.count ?? 0 : tokens.count * limit / size)
        if size > limit { cut(to: 0) }
    }

    /// Goes back to the longest beginning of at most `count` tokens that all blocks can go back to. After a text that was stopped, some blocks may
    /// have read more tokens than other blocks.
    private mutating func cut(to count: Int) {
        if !blocks.allSatisfy({ $0?.canBeCut(to: count) ?? (count == 0) }) {
            guard let mark, mark.count <= count else { return count == 0 ? forget() : cut(to: 0) }
            for (block, state) in mark.states.enumerated() where state != nil { blocks[block] = state }
            return cut(to: mark.count)
        }
        for block in blocks.indices { blocks[block]?.cut(to: count) }
        tokens.removeLast(tokens.count - count)
        if let mark, mark.count >= count { self.mark = nil }
    }

    private mutating func forget() { (tokens, blocks, mark) = ([], [], nil) }
}
