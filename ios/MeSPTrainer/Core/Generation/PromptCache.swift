import MLX
import MeSPAdapters

/// The tokens of a text that a model has read, and the state they left in each block. A text that begins with the same tokens is read from
/// there on; each next turn of a conversation is one.
///
///     var cache = PromptCache(limit: 1 << 26)
///     try generator.generate(turn, continuing: &cache) { show($0) }
///
/// It is good for one bundle's model. Where that has other adapters than those that read the text, it begins with nothing. Attention leaves keys and values of each token, those before a block's window too,
/// so the text can be cut back to any beginning. A recurrent block leaves one state. Where there is such a block, two beginnings are
/// kept: all of the text, and a mark shortly before the end of the last prompt, where a conversation continues if its template shows an
/// answer otherwise than it opened it. A text that differs earlier is read from the start.
package struct PromptCache {
    private(set) var tokens = [Int]()
    /// nil before the first token.
    package var blocks = [MixerState?]()
    let limit: Int
    /// The adapters of the model that read the text; nil for those of a run in memory.
    private var adapters: AdapterSelection?
    /// A beginning of the text, of so many tokens, that blocks which can't be cut go back to, with their states; nil for the other blocks'.
    private var mark: (count: Int, states: [MixerState?])?
    /// The place of the next mark.
    private var nextMark = 0
    /// More tokens than a template takes to open an answer.
    static let opening = 16

    /// - Parameter limit: what is kept at most when a text has ended, in bytes: the beginning of the text that fits.
    package init(limit: Int = .max) { self.limit = limit }

    /// A cache of the same model and limit that has read nothing.
    func emptied() -> PromptCache {
        var cache = PromptCache(limit: limit)
        cache.adapters = adapters
        return cache
    }

    /// Readies it for a model with these adapters: what others have read is let go.
    mutating func ready(for adapters: AdapterSelection?) {
        if adapters == nil || adapters != self.adapters { forget() }
        self.adapters = adapters
    }

    /// In bytes.
    package var size: Int { (blocks + (mark?.states ?? [])).reduce(0) { $0 + ($1?.size ?? 0) } }

    /// The states of recurrent blocks after the last token.
    var recurrentStates: [MLXArray] { blocks.compactMap { $0 }.filter(\.isRecurrent).flatMap(\.arrays) }

    /// The part of `size` that does not grow with the text, in bytes.
    var recurrentSize: Int {
        (blocks + (mark?.states ?? [])).reduce(0) { $0 + ($1.flatMap { $0.isRecurrent ? $0.size : nil } ?? 0) }
    }

    /// Readies it to continue a text: keeps what that begins with, but for its last token, which the next is chosen after.
    ///
    /// - Returns: the tokens to read.
    mutating func begin(_ text: [Int]) -> ArraySlice<Int> {
        cut(to: zip(tokens, text.dropLast()).prefix { $0 == $1 }.count)
        nextMark = max(0, text.count - Self.opening)
        setMark()
        return text[tokens.count...]
    }

    /// So many tokens in pieces of `size` at most, of which one ends where a mark is to be.
    func pieces(of count: Int, size: Int, isRecurrent: Bool) -> [Range<Int>] {
        let before = isRecurrent ? min(max(0, nextMark - tokens.count), count) : 0
        let after = tiles(of: count - before, size: size).map { before + $0.lowerBound..<before + $0.upperBound }
        return tiles(of: before, size: size) + after
    }

    /// All blocks have read these.
    mutating func add(_ read: ArraySlice<Int>) {
        tokens += read
        setMark()
    }

    private mutating func setMark() {
        guard tokens.count == nextMark, nextMark > 0 else { return }
        let states = blocks.map { state in state.flatMap { $0.isRecurrent ? $0 : nil } }
        if states.contains(where: { $0 != nil }) { mark = (nextMark, states) }
    }

    /// Lets go of what is above the limit.
    mutating func end() {
        guard size > limit else { return }
        let isRecurrent = blocks.contains { $0?.isRecurrent == true }
        cut(to: isRecurrent ? mark?.count ?? 0 : tokens.count * limit / size)
        if size > limit { cut(to: 0) }
    }

    /// Goes back to the longest beginning of `count` tokens at most that all blocks can go back to. A text that was stopped may have left
    /// blocks that read more tokens than others.
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
