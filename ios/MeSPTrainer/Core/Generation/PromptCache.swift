import MLX
import MeSPAdapters

/// The tokens that a model has read, and each block's state after them. A model reuses the cache for a text with the same first tokens, such as the
/// next turn of a conversation.
///
/// A cache is for one bundle's model. The state of attention can be cut back to any number of tokens. A recurrent state cannot.
package struct PromptCache {
    private(set) var tokens = [Int]()
    package var blocks = [MixerState?]()
    let limit: Int
    private var adapters: AdapterSelection?
    /// A number of tokens to which the text can be cut back, and the recurrent blocks' states after these tokens.
    private var mark: (count: Int, states: [MixerState?])?
    private var nextMark = 0
    /// The number of tokens between a mark and the prompt's end.
    static let opening = 16

    package init(limit: Int = .max) { self.limit = limit }

    func emptied() -> PromptCache {
        var cache = PromptCache(limit: limit)
        cache.adapters = adapters
        return cache
    }

    /// Drops all tokens if other adapters read them, or if `adapters` is nil.
    mutating func ready(for adapters: AdapterSelection?) {
        if adapters == nil || adapters != self.adapters { forget() }
        self.adapters = adapters
    }

    package var size: Int { (blocks + (mark?.states ?? [])).reduce(0) { $0 + ($1?.size ?? 0) } }

    var recurrentStates: [MLXArray] { blocks.compactMap { $0 }.filter(\.isRecurrent).flatMap(\.arrays) }

    var recurrentSize: Int {
        (blocks + (mark?.states ?? [])).reduce(0) { $0 + ($1.flatMap { $0.isRecurrent ? $0.size : nil } ?? 0) }
    }

    /// Keeps at most the tokens that the text begins with, without the text's last token.
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

    mutating func add(_ read: ArraySlice<Int>) {
        tokens += read
        setMark()
    }

    private mutating func setMark() {
        guard tokens.count == nextMark, nextMark > 0 else { return }
        let states = blocks.map { state in state.flatMap { $0.isRecurrent ? $0 : nil } }
        if states.contains(where: { $0 != nil }) { mark = (nextMark, states) }
    }

    mutating func end() {
        guard size > limit else { return }
        let isRecurrent = blocks.contains { $0?.isRecurrent == true }
        cut(to: isRecurrent ? mark?.count ?? 0 : tokens.count * limit / size)
        if size > limit { cut(to: 0) }
    }

    /// Cuts the cache back to at most `count` tokens. Recurrent blocks may have to go back further.
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
