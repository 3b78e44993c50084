package struct DecodedText: Sendable {
    package let ids: [Int]
    package let bytes: [UInt8]
    /// The bounds of tokens: token i is `bytes[bounds[i]..<bounds[i + 1]]`. If tokens share a character, each has some of its bytes or none.
    package let bounds: [Int]

    /// Decodes token ids.
    ///
    /// - Parameter pieces: a cache of the texts of single tokens.
    package init(_ ids: [Int], _ tokenizer: any TextTokenizer, pieces: inout [Int: [UInt8]]) {
        (self.ids, bytes) = (ids, Array(tokenizer.decode(ids).utf8))
        bounds =
            Self.single(ids, bytes, tokenizer, &pieces) ?? Self.inContext(ids, bytes, tokenizer)
            ?? Self.byPrefixes(ids, bytes, tokenizer)
    }

    /// Returns the bounds by the texts of single tokens; nil if these texts do not add up to the whole text.
    private static func single(
        _ ids: [Int], _ bytes: [UInt8], _ tokenizer: any TextTokenizer, _ pieces: inout [Int: [UInt8]]
    ) -> [Int]? {
        var bounds = [0]
        for id in ids {
            let piece = pieces[id] ?? Array(tokenizer.decode([id]).utf8)
            pieces[id] = piece
            let place = bounds[bounds.count - 1]
            guard bytes[place...].starts(with: piece) else { return nil }
            bounds.append(place + piece.count)
        }
        return bounds[ids.count] == bytes.count ? bounds : nil
    }

    /// Returns the bounds by the text that each token adds to the six tokens before it; nil if these texts do not add up to the whole text. A single
    /// token can decode differently: decoders drop a leading space, and need all tokens of a character.
    private static func inContext(_ ids: [Int], _ bytes: [UInt8], _ tokenizer: any TextTokenizer) -> [Int]? {
        let context = 6
        var (ends, place) = ([0], 0)
        for index in ids.indices {
            let start = max(0, index - context)
            place += tokenizer.decode(Array(ids[start...index])).utf8.count
            if index > start { place -= tokenizer.decode(Array(ids[start..<index])).utf8.count }
            ends.append(place)
        }
        return place == bytes.count ? ascending(ends, bytes.count) : nil
    }

    private static func byPrefixes(_ ids: [Int], _ bytes: [UInt8], _ tokenizer: any TextTokenizer) -> [Int] {
        let ends = (0..<ids.count).map { tokenizer.decode(Array(ids.prefix($0))).utf8.count } + [bytes.count]
        return ascending(ends, bytes.count)
    }

    /// Makes the ends ascending. They can descend, because a replacement character can be longer than the character that it replaces.
    private static func ascending(_ ends: [Int], _ limit: Int) -> [Int] {
        var least = limit
        return ends.reversed().map { end in
            least = max(0, min(least, end))
            return least
        }.reversed()
    }

    /// Returns for each token whether it has bytes within `range`. A token without bytes gets the value of the previous token.
    func tokens(in range: Range<Int>) -> [Bool] {
        var (within, last) = ([Bool](), false)
        for index in ids.indices {
            let (from, to) = (bounds[index], bounds[index + 1])
            if from < to { last = to > range.lowerBound && from < range.upperBound && !range.isEmpty }
            within.append(last)
        }
        return within
    }

    /// Returns the length of the common prefix of this text from `start` to `end` and another text from `otherStart`. If both texts continue after
    /// the prefix, the prefix is shortened to a token boundary of both.
    func agreed(from start: Int, to end: Int? = nil, with other: DecodedText, from otherStart: Int) -> Int {
        let (mine, others) = (bytes[start..<max(start, end ?? bytes.count)], other.bytes[otherStart...])
        var same = zip(mine, others).prefix { $0 == $1 }.count
        if same == min(mine.count, others.count) { return same }
        while same > 0, !bounds.contains(start + same) || !other.bounds.contains(otherStart + same) { same -= 1 }
        return same
    }
}

extension [UInt8] {
    func places(of part: [UInt8]) -> [Int] {
        guard !part.isEmpty, part.count <= count else { return [] }
        return (0...(count - part.count)).filter {
            self[$0] == part[0] && self[$0..<($0 + part.count)].elementsEqual(part)
        }
    }
}
