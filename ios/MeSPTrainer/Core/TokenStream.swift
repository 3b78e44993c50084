/// A stream of token ids and the windows of it that training and evaluation run on.
///
/// Window `w` of length T is tokens `wT ... wT + T`: T inputs and, shifted by one, T targets.
public struct TokenStream: Sendable {
    public let tokens: [Int32]

    public init(tokens: [Int32]) {
        self.tokens = tokens
    }

    /// How many windows of `length` inputs the stream has.
    public func windowCount(length: Int) -> Int { (tokens.count - 1) / length }

    /// Window `index`: `length + 1` tokens.
    public func window(_ index: Int, length: Int) -> ArraySlice<Int32> {
        tokens[index * length...(index + 1) * length]
    }

    /// The window of step `step` (from 0): `(step · stride + seed) mod count`, with a stride near the golden ratio of the
    /// count and coprime to it. Each epoch visits every window once, scattered; the step number is the whole state.
    public func trainingWindow(step: Int, seed: UInt64, length: Int) -> ArraySlice<Int32> {
        let count = windowCount(length: length)
        var stride = max(1, Int((0.618 * Double(count)).rounded(.up)))
        while greatestCommonDivisor(stride, count) != 1 { stride += 1 }
        let offset = Int(seed % UInt64(count))
        return window((step % count * stride + offset) % count, length: length)
    }
}

private func greatestCommonDivisor(_ a: Int, _ b: Int) -> Int { b == 0 ? a : greatestCommonDivisor(b, a % b) }
