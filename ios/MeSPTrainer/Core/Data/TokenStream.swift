import Foundation

/// One training sequence of T inputs: token i is the input at position i, token i + 1 its target.
public struct Example: Sendable, Equatable {
    /// T + 1 token ids, padded at the end.
    public let tokens: [Int32]
    /// The positions in `0 ..< T` whose targets count in the loss; not empty.
    public let counted: Range<Int>

    var inputs: [Int32] { Array(tokens.dropLast()) }
    /// The targets that count.
    var targets: [Int32] { counted.map { tokens[$0 + 1] } }
}

/// Token ids on disk, and the sequences of them that training and evaluation run on.
///
/// A packed stream has windows: window `w` of length T is tokens `wT ... wT + T`. Otherwise each example is one sequence, cut to
/// its first T + 1 tokens or padded.
public struct TokenStream: Sendable {
    /// Little-endian `uint32`, mapped.
    private let tokens: Data
    /// Triples of little-endian `uint32`, mapped: where an example starts, its length, and how many tokens at its start are context,
    /// whose prediction is not trained.
    private let examples: Data?

    public init(tokens: Data, examples: Data? = nil) {
        (self.tokens, self.examples) = (tokens, examples)
    }

    public init(tokens: [Int32]) {
        self.init(tokens: tokens.withUnsafeBytes { Data($0) })
    }

    public var tokenCount: Int { tokens.count / 4 }

    func token(_ index: Int) -> Int { number(tokens, index) }

    /// Throws where a token is not in `0 ..< vocabulary`, or an example is not within the stream. Messages continue “it …”.
    func check(vocabulary: Int) throws {
        for index in 0..<tokenCount where token(index) >= vocabulary {
            throw MeSPError("holds the token \(token(index)), and the model has only \(vocabulary)")
        }
        for index in 0..<exampleCount {
            let (start, length, prompt) = bounds(index)
            guard length >= 2, prompt < length, start + length <= tokenCount else {
                throw MeSPError("has an example that is not within its tokens, number \(index)")
            }
        }
    }

    /// The sequences of `length` inputs. An example whose context leaves nothing to train after it was cut is not among them.
    public func sequences(length: Int) -> Sequences {
        guard examples != nil else {
            return Sequences(stream: self, length: length, count: max(0, tokenCount - 1) / length, usable: nil)
        }
        let usable = (0..<exampleCount).filter { !counted(bounds($0), length).isEmpty }
        return Sequences(stream: self, length: length, count: usable.count, usable: usable)
    }

    private var exampleCount: Int { (examples?.count ?? 0) / 12 }

    private func bounds(_ example: Int) -> (start: Int, length: Int, prompt: Int) {
        guard let examples else { return (0, 0, 0) }
        return (number(examples, 3 * example), number(examples, 3 * example + 1), number(examples, 3 * example + 2))
    }

    private func counted(_ bounds: (start: Int, length: Int, prompt: Int), _ length: Int) -> Range<Int> {
        let end = min(bounds.length - 1, length)
        return min(max(bounds.prompt - 1, 0), end)..<end
    }

    private func number(_ data: Data, _ index: Int) -> Int {
        data.withUnsafeBytes {
            Int(UInt32(littleEndian: $0.loadUnaligned(fromByteOffset: index * 4, as: UInt32.self)))
        }
    }

    /// The sequences of one length.
    public struct Sequences: Sendable {
        fileprivate let stream: TokenStream
        /// T
        public let length: Int
        public let count: Int
        /// The examples among all of them, in order; nil for windows.
        fileprivate let usable: [Int]?

        public subscript(index: Int) -> Example {
            guard let usable else {
                let tokens = (0...length).map { Int32(truncatingIfNeeded: stream.token(index * length + $0)) }
                return Example(tokens: tokens, counted: 0..<length)
            }
            let bounds = stream.bounds(usable[index])
            let tokens = (0..<min(bounds.length, length + 1)).map {
                Int32(truncatingIfNeeded: stream.token(bounds.start + $0))
            }
            let padding = [Int32](repeating: 0, count: length + 1 - tokens.count)
            return Example(tokens: tokens + padding, counted: stream.counted(bounds, length))
        }

        /// The `position`th sequence of training (from 0): `(position · stride + seed) mod count`, with a stride near the golden
        /// ratio of the count and coprime to it. Each epoch visits every sequence once, scattered; the position is the whole state.
        public func training(_ position: Int, seed: UInt64) -> Example {
            var stride = max(1, Int((0.618 * Double(count)).rounded(.up)))
            while greatestCommonDivisor(stride, count) != 1 { stride += 1 }
            let offset = Int(seed % UInt64(count))
            return self[(position % count * stride + offset) % count]
        }
    }
}

private func greatestCommonDivisor(_ a: Int, _ b: Int) -> Int { b == 0 ? a : greatestCommonDivisor(b, a % b) }
