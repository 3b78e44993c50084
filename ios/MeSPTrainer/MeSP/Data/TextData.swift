import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// Tokenizes a text for a run, and writes the tokens to a folder. `RunSettings.data` names this folder.
///
/// Plain text becomes one stream of tokens. A record with `text` becomes a sequence, or several if it is long. All their tokens are in the loss. A
/// record with `prompt` and `completion`, or with `messages`, becomes one sequence by the chat template, cut to the sequence length. In such a
/// sequence only answers are in the loss, unless `answersOnly` is false. Without a template the completion directly follows the prompt. The last
/// tenth of the data is held out. A record is refused if it has a field that nothing reads and that may be content.
package struct TextData: Sendable {
    package enum Source: Sendable {
        case file(URL)
        case text(String)
        case conversations([Conversation])
        /// Preference pairs. Only the answers are in the loss.
        case choices([Choice])
    }

    package static var resources: Bundle { .module }
    package static let folderName = "data"
    package static let generalName = "general"
    /// An English text, on which a run measures forgetting; nil if the resource is missing.
    package static var generalText: Source? {
        resources.url(forResource: "general", withExtension: "txt").map { .file($0) }
    }
    package static let generalLength = 64
    /// The divisor for held-out data: 1/`heldOut` of the data is held out.
    static let heldOut = 10

    let tokenizer: any TextTokenizer
    let length: Int
    let answersOnly: Bool
    /// Whether records that cannot be trained are left out.
    let leavesOutInvalid: Bool

    package init(
        tokenizer: any TextTokenizer, length: Int, answersOnly: Bool = true, leavesOutInvalid: Bool = false
    ) {
        (self.tokenizer, self.length) = (tokenizer, length)
        (self.answersOnly, self.leavesOutInvalid) = (answersOnly, leavesOutInvalid)
    }

    /// Tokenizes `source`. Writes `data.json` and the token files to `folder`.
    ///
    /// - Parameters:
    ///   - progress: receives the completed fraction, from 0 to 1. It may throw an error to stop.
    /// - Returns: notices about data that was left out, added or cut.
    /// - Throws: `MeSPError`, for example if the text cannot be read, is too short, or has unsuitable records; also the errors of `progress`.
    @discardableResult
    package func write(
        _ source: Source, to folder: URL, progress: (Double) throws -> Void = { _ in }
    ) throws -> DataNotices {
        var data = try Encoding(source, self)
        try data.encode(upTo: .max, progress: progress)
        try TokenFolder.write(data.isStream ? data.windows() : data.examples(), to: folder)
        return data.notices
    }

    /// Returns the first sequence that `write` would make of `source`, with the notices known so far, or with all if invalid records are left out.
    ///
    /// - Throws: `MeSPError` if `source` cannot be read, or has an unsuitable record. Faults in the tokens of later records are not found.
    package func first(of source: Source) throws -> (example: Example, notices: DataNotices) {
        var data = try Encoding(source, self)
        try data.encode(upTo: leavesOutInvalid ? .max : data.isStream ? length + 1 : 1) { _ in }
        return (try data.first(), data.notices)
    }

    private struct Encoding {
        private let records: Records
        private let data: TextData
        private var encoder: RecordEncoder
        /// The answers of a pair are together, as are the sequences of a text.
        private var parts = [[Encoded]]()
        private var tokens = [UInt32]()
        private var isWhole = false

        init(_ source: Source, _ data: TextData) throws {
            (records, self.data) = (try Records(source, leavesOutInvalid: data.leavesOutInvalid), data)
            // Only the answers of a pair are ever in the loss.
            var answersOnly = data.answersOnly
            if case .choices = source { answersOnly = true }
            encoder = RecordEncoder(tokenizer: data.tokenizer, answersOnly: answersOnly, length: data.length)
            (encoder.notices.leftOut, encoder.notices.noted) = (records.leftOut, records.noted)
            encoder.notices.invalid = records.invalid
        }

        private var isText: Bool { records.records.first?.record is TextRecord }
        var isStream: Bool { (records.records.first?.record as? TextRecord)?.isPiece == true }
        var notices: DataNotices { encoder.notices }

        mutating func encode(upTo limit: Int, progress: (Double) throws -> Void) throws {
            defer { encoder.notices.hasSplit = encoder.plain.hasSplit }
            var refusals = RefusedRecords(areLeftOut: data.leavesOutInvalid)
            for (index, (place, record)) in records.records.enumerated() {
                guard (isStream ? tokens.count : parts.count) < limit else { return }
                if isStream {
                    tokens += try record.mask(&encoder).flatMap(\.tokens)
                } else {
                    try refusals.collect(place) {
                        let encoded = try record.mask(&encoder)
                        take(record is TextRecord ? encoded.flatMap(split) : encoded)
                    }
                    if limit < .max { try refusals.check() }
                }
                try progress(Double(index + 1) / Double(records.records.count))
            }
            try refusals.check()
            encoder.notices.invalid += refusals.invalid.map(InvalidRecord.init)
            encoder.notices.invalid.sort { $0.index < $1.index }
            isWhole = true
        }

        /// Returns the text in sequences. Each begins with the last token of the one before it, so each token is predicted once.
        private func split(_ text: Encoded) -> [Encoded] {
            stride(from: 0, to: text.tokens.count - 1, by: data.length).map {
                let bounds = $0..<min($0 + data.length + 1, text.tokens.count)
                return Encoded(tokens: Array(text.tokens[bounds]), counted: Array(text.counted[bounds]))
            }
        }

        /// Cuts the parts of a record to the sequence length. Leaves the record out if no token in the loss remains in one of them.
        private mutating func take(_ encoded: [Encoded]) {
            guard !encoded.isEmpty else {
                encoder.notices.leftOut += 1
                return
            }
            let cut = encoded.map { part in
                Encoded(
                    tokens: Array(part.tokens.prefix(data.length + 1)),
                    counted: Array(part.counted.prefix(data.length + 1)),
                    images: part.images, isRow: Array(part.isRow.prefix(data.length + 1)))
            }
            guard cut.allSatisfy({ $0.counted.dropFirst().contains(true) }) else {
                encoder.notices.tooLong += 1
                return
            }
            parts.append(cut)
            if zip(encoded, cut).contains(where: { $0.counted.dropFirst($1.counted.count).contains(true) }) {
                encoder.notices.cut += 1
            }
        }

        // MARK: - Splits

        func windows() throws -> [String: TokenStream] {
            let (length, held) = (data.length, max(tokens.count / TextData.heldOut, data.length + 1))
            guard tokens.count >= held + length + 1 else {
                throw MeSPError(
                    "\(records.name) has \(tokens.count) tokens, too few to train on and hold out one sequence of \(length) each; give it more text or take shorter sequences."
                )
            }
            return ["train": tokens.dropLast(held), "valid": tokens.suffix(held)].mapValues(stream)
        }

        func first() throws -> Example {
            if isStream {
                if isWhole { _ = try windows() }
                return stream(tokens[...]).sequences(lengths: [data.length])[0]
            }
            guard let first = parts.first?.first else { throw tooFew }
            return stream([[first]]).sequences(lengths: [first.tokens.count - 1])[0]
        }

        private func stream(_ tokens: ArraySlice<UInt32>) -> TokenStream {
            TokenStream(tokens: TextData.data(tokens), begin: data.tokenizer.begin)
        }

        func examples() throws -> [String: TokenStream] {
            guard parts.count > 1 else { throw tooFew }
            let held = max(parts.count / TextData.heldOut, 1)
            return ["train": parts.dropLast(held), "valid": parts.suffix(held)].mapValues(stream)
        }

        private func stream(_ parts: ArraySlice<[Encoded]>) -> TokenStream {
            var (tokens, bounds, mask, labels) = ([UInt32](), [UInt32](), Data(), Data())
            var (rows, known, places) = (Data(), [Data: Range<UInt32>](), [UInt32]())
            for part in parts {
                for (index, example) in part.enumerated() {
                    bounds += [UInt32(tokens.count), UInt32(example.tokens.count)]
                    tokens += example.tokens
                    mask += example.counted.map { $0 ? 1 : 0 }
                    // Equal images share rows.
                    for image in example.images where known[image.rows] == nil {
                        let first = UInt32(rows.count / image.width) + 1
                        known[image.rows] = first..<first + UInt32(image.count)
                        rows += image.rows
                    }
                    var own = example.images.compactMap { known[$0.rows] }.joined().makeIterator()
                    places += example.isRow.map { $0 ? own.next() ?? 0 : 0 }
                    places += [UInt32](repeating: 0, count: tokens.count - places.count)
                    if part.count > 1, !isText {
                        labels.append((index == 0 ? TokenStream.Label.chosen : .rejected).rawValue)
                    }
                }
            }
            return TokenStream(
                tokens: TextData.data(tokens), examples: TextData.data(bounds), mask: mask.contains(0) ? mask : nil,
                labels: labels.isEmpty ? nil : labels,
                images: encoder.imageKind.flatMap {
                    let places = TextData.data(places)
                    return rows.isEmpty ? nil : ImageRows(rows: rows, dtype: $0.dtype, width: $0.width, places: places)
                })
        }

        private var tooFew: MeSPError {
            MeSPError(
                "\(records.name) has \(parts.count) usable records of \(records.records.count), too few to train on and hold out one; give it more, or take sequences longer than \(data.length) tokens."
            )
        }
    }

    private static func data(_ words: some Sequence<UInt32>) -> Data {
        words.map(\.littleEndian).withUnsafeBytes { Data($0) }
    }
}
