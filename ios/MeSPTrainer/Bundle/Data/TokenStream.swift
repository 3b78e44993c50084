import Foundation
import MeSPFiles
import MeSPSentences

/// A sequence of T inputs. Token i + 1 is the target of token i.
package struct Example: Sendable, Equatable {
    /// The T + 1 token ids. If padding is needed, it is at the end.
    package let tokens: [Int32]
    /// The positions in `0 ..< T` whose targets are in the loss, ascending.
    package let counted: [Int]
    /// The input ranges of the records, or nil if the sequence is not packed. Records do not attend to each other, and positions begin at 0 in each.
    package let records: [Range<Int>]?
    /// The rows that take the place of inputs' embeddings.
    package let images: ImageRows.Slice?

    package init(
        tokens: [Int32], counted: [Int], records: [Range<Int>]? = nil, images: ImageRows.Slice? = nil
    ) {
        (self.tokens, self.counted, self.records, self.images) = (tokens, counted, records, images)
    }

    /// Creates a sequence in which the answer's tokens are in the loss. Pads it to the next of the ascending `lengths`, or cuts it to the longest.
    package init(prompt: [Int32], answer: [Int32], lengths: [Int]) {
        let tokens = (prompt + answer).prefix((lengths.last ?? 0) + 1)
        let length = (lengths.first { tokens.count <= $0 + 1 } ?? tokens.count - 1) + 1
        self.init(
            tokens: tokens + [Int32](repeating: 0, count: length - tokens.count),
            counted: Array(prompt.count - 1..<tokens.count - 1))
    }

    var length: Int { tokens.count - 1 }
    package var prompt: [Int32] { Array(tokens.prefix((counted.first ?? 0) + 1)) }
    package var inputs: [Int32] { Array(tokens.dropLast()) }
    package var targets: [Int32] { counted.map { tokens[$0 + 1] } }
    /// The number of inputs up to the last target in the loss. Later inputs do not affect the loss.
    package var inputCount: Int { (counted.last ?? -1) + 1 }
}

/// The rows `[count, hidden]` of images, from a model's vision tower.
package struct ImageRows: Sendable, Equatable {
    let rows: Data
    let dtype: ElementType
    /// The bytes of a row.
    let width: Int
    var places: Data

    package init(rows: Data, dtype: ElementType, width: Int, places: Data) {
        (self.rows, self.dtype, self.width, self.places) = (rows, dtype, width, places)
    }

    package var count: Int { rows.count / width }

    /// Some of the rows, and the positions in a sequence whose embeddings they replace, ascending.
    package struct Slice: Sendable, Equatable {
        package let positions: [Int]
        package let rows: [Int]
        let of: ImageRows

        package init(positions: [Int], rows: [Int], of images: ImageRows) {
            (self.positions, self.rows, of) = (positions, rows, images)
        }

        package var dtype: ElementType { of.dtype }
        /// The bytes of the rows, one after the other.
        package var bytes: Data {
            rows.reduce(into: Data(capacity: rows.count * of.width)) {
                let start = of.rows.startIndex + $1 * of.width
                $0 += of.rows[start..<start + of.width]
            }
        }
    }
}

/// Token ids on disk, from which training and evaluation take sequences of T inputs.
///
/// - A stream without examples is split into windows: window `w` has the tokens `wT ... wT + T`. `begin` replaces the first token of each window.
/// - A stream with examples has one sequence per example, cut to T + 1 tokens. With `packsExamples`, several examples can share a sequence without
///   attending to each other.
///
/// The first token of an example is never a target.
package struct TokenStream: Sendable {
    /// The token ids as little-endian `uint32`.
    let tokens: Data
    /// The start and length of each example as little-endian `uint32`, or nil for windows.
    let examples: Data?
    /// One byte per token: 1 if the token as a target is in the loss, else 0. If it is nil, all targets are in the loss.
    let mask: Data?
    let labels: Data?
    /// The token that replaces the first token of each window or of each of the `pieces(of:)`, if any.
    private(set) var begin: Int?
    package let packsExamples: Bool
    package let images: ImageRows?

    /// The label of an answer in preference data. In a pair, the rejected answer directly follows the chosen one.
    package enum Label: UInt8 { case bad, good, rejected, chosen }

    package init(
        tokens: Data, examples: Data? = nil, mask: Data? = nil, labels: Data? = nil, begin: Int? = nil,
        packsExamples: Bool = false, images: ImageRows? = nil
    ) {
        (self.tokens, self.examples, self.mask, self.labels) = (tokens, examples, mask, labels)
        self.begin = examples == nil ? begin : nil
        (self.packsExamples, self.images) = (packsExamples, images)
    }

    package var tokenCount: Int { tokens.count / 4 }

    func token(_ index: Int) -> Int { number(tokens, index) }

    /// Throws if a token id is not in `0 ..< vocabulary`, or if examples, mask or labels are invalid. The error messages continue “it …”.
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
        if let images {
            guard images.places.count == tokens.count else {
                throw MeSPError("has images that do not fit its tokens")
            }
            for index in 0..<tokenCount where number(images.places, index) != 0 {
                guard number(images.places, index) <= images.count else {
                    throw MeSPError("names a row that its images do not have")
                }
                guard mask.map({ $0[$0.startIndex + index] == 0 }) ?? false else {
                    throw MeSPError("has an image in the loss")
                }
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

    /// Returns the stream as consecutive examples of `length` inputs. The last example may be shorter.
    package func pieces(of length: Int) -> TokenStream {
        let bounds = stride(from: 0, to: max(0, tokenCount - 1), by: length).flatMap {
            [UInt32($0).littleEndian, UInt32(min(length + 1, tokenCount - $0)).littleEndian]
        }
        var pieces = TokenStream(tokens: tokens, examples: bounds.withUnsafeBytes { Data($0) })
        pieces.begin = begin
        return pieces
    }

    /// Whether the examples directly follow each other and are not packed, so that each is a whole record.
    package var hasWholeRecords: Bool {
        examples != nil && !packsExamples
            && (1..<max(exampleCount, 1)).allSatisfy { index in
                let before = bounds(index - 1)
                return bounds(index).start == before.start + before.length
            }
    }

    package var hasExamples: Bool { examples != nil }
    package var hasPreferences: Bool { labels != nil }
    package var hasPairs: Bool { (labels?.first).flatMap(Label.init)?.isOfPair ?? false }

    fileprivate func label(_ example: Int) -> Label? {
        labels.flatMap { Label(rawValue: $0[$0.startIndex + example]) }
    }

    /// Returns the sequences, each padded or cut to one of `lengths`. Sequences without a target in the loss are left out. If one answer of a pair is
    /// left out, so is the other.
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

    /// Assigns examples to sequences of at most `length` inputs. Each example joins one of the last `openSequences` sequences if it fits, or begins a
    /// new one.
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

    private static let openSequences = 16

    private var exampleCount: Int { (examples?.count ?? 0) / 8 }

    private func bounds(_ example: Int) -> (start: Int, length: Int) {
        guard let examples else { return (0, 0) }
        return (number(examples, 2 * example), number(examples, 2 * example + 1))
    }

    fileprivate func bounds(_ index: Int, _ length: Int) -> (start: Int, length: Int) {
        guard examples != nil else { return (index * length, length + 1) }
        let bounds = bounds(index)
        return (bounds.start, min(bounds.length, length + 1))
    }

    fileprivate func counted(_ bounds: (start: Int, length: Int)) -> [Int] {
        let positions = 0..<bounds.length - 1
        guard let mask else { return Array(positions) }
        return mask.withUnsafeBytes { (bytes: UnsafeRawBufferPointer) in
            positions.filter { bytes[bounds.start + $0 + 1] != 0 }
        }
    }

    fileprivate func number(_ data: Data, _ index: Int) -> Int {
        data.withUnsafeBytes {
            Int(UInt32(littleEndian: $0.loadUnaligned(fromByteOffset: index * 4, as: UInt32.self)))
        }
    }

    package struct Sequences: Sendable {
        fileprivate let stream: TokenStream
        package let lengths: [Int]
        package let count: Int
        /// The indices of the examples or windows in use; nil for all windows.
        fileprivate let usable: [Int]?
        /// The start of each sequence in `usable`. Sequence i has the examples `usable[starts[i] ..< starts[i + 1]]`. If `starts` is nil, each
        /// sequence has one example.
        fileprivate let starts: [Int]?

        private func examples(_ index: Int) -> ArraySlice<Int> {
            guard let usable else { return [index] }
            guard let starts else { return usable[index...index] }
            return usable[starts[index]..<starts[index + 1]]
        }

        package subscript(index: Int) -> Example {
            let longest = lengths[lengths.count - 1]
            var (tokens, counted, begins) = ([Int32](), [Int](), [Int]())
            var (positions, rows) = ([Int](), [Int]())
            for number in examples(index) {
                let bounds = stream.bounds(number, longest)
                counted += stream.counted(bounds).map { tokens.count + $0 }
                begins.append(tokens.count)
                if let images = stream.images {
                    for position in 0..<bounds.length {
                        let place = stream.number(images.places, bounds.start + position)
                        guard place > 0 else { continue }
                        positions.append(tokens.count + position)
                        rows.append(place - 1)
                    }
                }
                tokens += (0..<bounds.length).map { Int32(truncatingIfNeeded: stream.token(bounds.start + $0)) }
            }
            let length = lengths.first { counted[counted.count - 1] < $0 } ?? longest
            if let begin = stream.begin { tokens[0] = Int32(truncatingIfNeeded: begin) }
            tokens = Array(tokens.prefix(length + 1))
            let padding = [Int32](repeating: 0, count: length + 1 - tokens.count)
            let records = zip(begins, begins.dropFirst() + [length]).map { $0..<$1 }
            let inputs = positions.prefix { $0 < length }
            return Example(
                tokens: tokens + padding, counted: counted, records: starts == nil ? nil : records,
                images: inputs.isEmpty
                    ? nil
                    : stream.images.map {
                        .init(positions: Array(inputs), rows: Array(rows.prefix(inputs.count)), of: $0)
                    })
        }

        /// Returns the sequence at a position of the training order. Its index is `(position · stride + seed) mod count`.
        ///
        /// The stride is coprime to the count, so each epoch visits every sequence once. No state but the position is needed.
        package func training(_ position: Int, seed: UInt64) -> Example {
            self[Self.scattered(position, of: count, seed: seed)]
        }

        package static func scattered(_ position: Int, of count: Int, seed: UInt64) -> Int {
            var stride = max(1, Int(whole: (0.618 * Double(count)).rounded(.up)))
            while greatestCommonDivisor(stride, count) != 1 { stride += 1 }
            let offset = Int(seed % UInt64(count))
            return (position % count * stride + offset) % count
        }

        var hasPairs: Bool { stream.hasPairs }

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
