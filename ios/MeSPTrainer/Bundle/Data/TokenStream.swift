import Foundation
import MeSPSentences

/// One sequence of T inputs: token i is the input at position i, token i + 1 its target.
package struct Example: Sendable, Equatable {
    /// T + 1 token ids, padded at the end.
    package let tokens: [Int32]
    /// The positions in `0 ..< T` whose targets count in the loss, ascending; not empty.
    package let counted: [Int]
    /// The inputs of each record of a packed sequence, together `0 ..< T`; nil where the sequence is one. A record's tokens see no others,
    /// and its positions begin at 0.
    package let records: [Range<Int>]?

    package init(tokens: [Int32], counted: [Int], records: [Range<Int>]? = nil) {
        (self.tokens, self.counted, self.records) = (tokens, counted, records)
    }

    /// A sequence of a prompt and an answer, whose tokens count, cut to the longest of `lengths`, which are ascending, or padded to the next.
    package init(prompt: [Int32], answer: [Int32], lengths: [Int]) {
        let tokens = (prompt + answer).prefix((lengths.last ?? 0) + 1)
        let length = (lengths.first { tokens.count <= $0 + 1 } ?? tokens.count - 1) + 1
        self.init(
            tokens: tokens + [Int32](repeating: 0, count: length - tokens.count),
            counted: Array(prompt.count - 1..<tokens.count - 1))
    }

    /// T
    var length: Int { tokens.count - 1 }
    /// The tokens up to the first that counts, which is not among them.
    package var prompt: [Int32] { Array(tokens.prefix((counted.first ?? 0) + 1)) }
    package var inputs: [Int32] { Array(tokens.dropLast()) }
    /// The targets that count.
    package var targets: [Int32] { counted.map { tokens[$0 + 1] } }
    /// The number of inputs up to the last target that counts: of those after it, padding included, nothing depends.
    package var inputCount: Int { (counted.last ?? -1) + 1 }
}

/// Token ids on disk, and the sequences of them that training and evaluation run on.
///
/// A packed stream has windows: window `w` of length T is tokens `wT ... wT + T`, the first of them replaced by `begin` where there is
/// one: a model that was trained on texts which all begin with the same token predicts badly without it. Otherwise each example is one
/// sequence, cut to its first T + 1 tokens; of data to be packed, examples share a sequence as records that do not see each other. An
/// example's first token is not a target, whatever the mask says. What follows a sequence's last target that counts changes nothing, so it
/// is as short as a length allows that holds that target, and padded to it.
package struct TokenStream: Sendable {
    /// Little-endian `uint32`, mapped.
    let tokens: Data
    /// Pairs of little-endian `uint32`, mapped: where an example starts, and its length.
    let examples: Data?
    /// A byte a token, mapped: 1 where its prediction is in the loss, 0 elsewhere; nil where all are.
    let mask: Data?
    /// A `Label` an example, mapped; nil if there are none.
    let labels: Data?
    /// The token that each window of a packed stream begins with; nil where it is the stream's.
    private(set) var begin: Int?
    /// Whether short examples are to share a sequence.
    package let packsExamples: Bool

    /// A label of an answer: good or bad, or chosen or rejected of two answers to a prompt. The rejected answer of a pair directly
    /// follows the chosen one.
    package enum Label: UInt8 { case bad, good, rejected, chosen }

    package init(
        tokens: Data, examples: Data? = nil, mask: Data? = nil, labels: Data? = nil, begin: Int? = nil,
        packsExamples: Bool = false
    ) {
        (self.tokens, self.examples, self.mask, self.labels) = (tokens, examples, mask, labels)
        self.begin = examples == nil ? begin : nil
        self.packsExamples = packsExamples
    }

    package var tokenCount: Int { tokens.count / 4 }

    func token(_ index: Int) -> Int { number(tokens, index) }

    /// Throws where a token is not in `0 ..< vocabulary`, or an example is not within the stream. Messages continue “it …”.
    func check(vocabulary: Int) throws {
        guard mask.map({ $0.count == tokenCount }) ?? true else {
            throw MeSPError("has a mask that is not as long as its tokens")
        }
        if let labels {
            let sound = (0..<labels.count).allSatisfy { index in
                guard let label = label(index) else { return false }
                return hasPairs ? label == (index % 2 == 0 ? .chosen : .rejected) : !label.isOfPair
            }
            guard labels.count == exampleCount, sound, !hasPairs || labels.count % 2 == 0 else {
                throw MeSPError("has labels that do not fit its examples")
            }
        }
        if let begin, !(0..<vocabulary).contains(begin) {
            throw MeSPError("begins with the token \(begin), and the model has only \(vocabulary)")
        }
        for index in 0..<tokenCount where token(index) >= vocabulary {
            throw MeSPError("holds the token \(token(index)), and the model has only \(vocabulary)")
        }
        for index in 0..<exampleCount {
            let (start, length) = bounds(index)
            guard length >= 2, start + length <= tokenCount else {
                throw MeSPError("has an example that is not within its tokens, number \(index)")
            }
        }
    }

    /// The stream as examples of `length` inputs, the last with those that are left: to evaluate a text that may be shorter than a sequence.
    package func pieces(of length: Int) -> TokenStream {
        let bounds = stride(from: 0, to: max(0, tokenCount - 1), by: length).flatMap {
            [UInt32($0).littleEndian, UInt32(min(length + 1, tokenCount - $0)).littleEndian]
        }
        var pieces = TokenStream(tokens: tokens, examples: bounds.withUnsafeBytes { Data($0) })
        pieces.begin = begin
        return pieces
    }

    /// Whether each example has a text of its own: a packed stream has none, and of records that were split into several examples these
    /// overlap, or leave out what lies between.
    package var hasWholeRecords: Bool {
        examples != nil && !packsExamples
            && (1..<max(exampleCount, 1)).allSatisfy { index in
                let before = bounds(index - 1)
                return bounds(index).start == before.start + before.length
            }
    }

    package var hasExamples: Bool { examples != nil }
    /// Whether the split is preference data.
    package var hasPreferences: Bool { labels != nil }
    /// Whether the preference data has pairs of answers.
    package var hasPairs: Bool { (labels?.first).flatMap(Label.init)?.isOfPair ?? false }

    fileprivate func label(_ example: Int) -> Label? {
        labels.flatMap { Label(rawValue: $0[$0.startIndex + example]) }
    }

    /// The sequences of at most the last of `lengths` inputs, each of one of these lengths, which are ascending. Those without a target
    /// that counts, also after they were cut, are not among them, nor the other answer of such a pair.
    ///
    /// - Parameters:
    ///   - lengths: in tokens, not empty.
    ///   - packed: whether several examples go into a sequence of the last of `lengths`.
    package func sequences(lengths: [Int], packed: Bool = false) -> Sequences {
        guard let length = lengths.last else { preconditionFailure("sequences of no length") }
        let all = examples == nil ? max(0, tokenCount - 1) / length : exampleCount
        if examples == nil, mask == nil {
            return Sequences(stream: self, lengths: lengths, count: all, usable: nil, starts: nil)
        }
        var usable = (0..<all).filter { !counted(bounds($0, length)).isEmpty }
        if hasPairs {
            let whole = Set(usable)
            usable = usable.filter { whole.contains($0 ^ 1) }
        }
        guard packed else {
            return Sequences(stream: self, lengths: lengths, count: usable.count, usable: usable, starts: nil)
        }
        let sequences = pack(usable, length)
        let starts = sequences.reduce(into: [0]) { $0.append($0[$0.count - 1] + $1.count) }
        return Sequences(
            stream: self, lengths: lengths, count: sequences.count, usable: sequences.flatMap { $0 }, starts: starts)
    }

    /// The examples that share a sequence of at most `length` inputs. Each goes into the first of the last sequences that has room for all
    /// of its tokens, or else begins another. The last token of a sequence is a target alone, no input.
    private func pack(_ examples: [Int], _ length: Int) -> [[Int]] {
        var (sequences, room) = ([[Int]](), [Int]())
        for example in examples {
            let tokens = bounds(example, length).length
            let open = sequences.indices.suffix(Self.openSequences)
            if let sequence = open.first(where: { tokens <= room[$0] }) {
                sequences[sequence].append(example)
                room[sequence] -= tokens
            } else {
                sequences.append([example])
                room.append(length + 1 - tokens)
            }
        }
        return sequences
    }

    /// The number of sequences that may take another example at a time.
    private static let openSequences = 16

    private var exampleCount: Int { (examples?.count ?? 0) / 8 }

    private func bounds(_ example: Int) -> (start: Int, length: Int) {
        guard let examples else { return (0, 0) }
        return (number(examples, 2 * example), number(examples, 2 * example + 1))
    }

    /// The range of the example or the window of T inputs with this index, cut to T + 1 tokens.
    fileprivate func bounds(_ index: Int, _ length: Int) -> (start: Int, length: Int) {
        guard examples != nil else { return (index * length, length + 1) }
        let bounds = bounds(index)
        return (bounds.start, min(bounds.length, length + 1))
    }

    /// The positions from a sequence's first input whose targets count.
    fileprivate func counted(_ bounds: (start: Int, length: Int)) -> [Int] {
        let positions = 0..<bounds.length - 1
        guard let mask else { return Array(positions) }
        return mask.withUnsafeBytes { (bytes: UnsafeRawBufferPointer) in
            positions.filter { bytes[bounds.start + $0 + 1] != 0 }
        }
    }

    private func number(_ data: Data, _ index: Int) -> Int {
        data.withUnsafeBytes {
            Int(UInt32(littleEndian: $0.loadUnaligned(fromByteOffset: index * 4, as: UInt32.self)))
        }
    }

    package struct Sequences: Sendable {
        fileprivate let stream: TokenStream
        /// The possible values of T, ascending.
        package let lengths: [Int]
        package let count: Int
        /// The sequences' examples or windows; nil for every window.
        fileprivate let usable: [Int]?
        /// Where those of each begin in `usable`, and their end, if they are records that share a sequence; nil for one each.
        fileprivate let starts: [Int]?

        private func examples(_ index: Int) -> ArraySlice<Int> {
            guard let usable else { return [index] }
            guard let starts else { return usable[index...index] }
            return usable[starts[index]..<starts[index + 1]]
        }

        package subscript(index: Int) -> Example {
            let longest = lengths[lengths.count - 1]
            var (tokens, counted, begins) = ([Int32](), [Int](), [Int]())
            for number in examples(index) {
                let bounds = stream.bounds(number, longest)
                counted += stream.counted(bounds).map { tokens.count + $0 }
                begins.append(tokens.count)
                tokens += (0..<bounds.length).map { Int32(truncatingIfNeeded: stream.token(bounds.start + $0)) }
            }
            let length = lengths.first { counted[counted.count - 1] < $0 } ?? longest
            if let begin = stream.begin { tokens[0] = Int32(truncatingIfNeeded: begin) }
            tokens = Array(tokens.prefix(length + 1))
            let padding = [Int32](repeating: 0, count: length + 1 - tokens.count)
            let records = zip(begins, begins.dropFirst() + [length]).map { $0..<$1 }
            return Example(tokens: tokens + padding, counted: counted, records: starts == nil ? nil : records)
        }

        /// The `position`th sequence of training (from 0): `(position · stride + seed) mod count`, with a stride near the golden
        /// ratio of the count and coprime to it. Each epoch visits every sequence once, scattered; the position is the whole state.
        package func training(_ position: Int, seed: UInt64) -> Example {
            self[Self.scattered(position, of: count, seed: seed)]
        }

        package static func scattered(_ position: Int, of count: Int, seed: UInt64) -> Int {
            var stride = max(1, Int((0.618 * Double(count)).rounded(.up)))
            while greatestCommonDivisor(stride, count) != 1 { stride += 1 }
            let offset = Int(seed % UInt64(count))
            return (position % count * stride + offset) % count
        }

        var hasPairs: Bool { stream.hasPairs }

        /// The label of a sequence, and its number in the stream.
        package func label(_ index: Int) -> (label: Label?, number: Int) {
            let number = usable?[index] ?? index
            return (stream.label(number), number)
        }
    }
}

extension TokenStream.Label {
    var isOfPair: Bool { self == .chosen || self == .rejected }
    package var isGood: Bool { self == .good || self == .chosen }
}

private func greatestCommonDivisor(_ a: Int, _ b: Int) -> Int { b == 0 ? a : greatestCommonDivisor(b, a % b) }
