import MeSPBundle
import MeSPSentences

package struct DataNotices: Sendable, Equatable {
    let length: Int
    var leftOut = 0
    var tooLong = 0
    var cut = 0
    package var invalid = [InvalidRecord]()
    var noted = Set<String>()
    var addsEnd = false
    var dropsThoughts = false
    /// Whether texts had special tokens. They were encoded as plain text.
    var hasSplit = false

    init(length: Int) { self.length = length }

    package var sentences: [Sentence] {
        var sentences = [Sentence]()
        if addsEnd {
            sentences.append(
                "The chat template writes no token after an answer, so the token that ends a text is added there.")
        }
        if dropsThoughts { sentences.append("The chat template leaves out thoughts, so they are not trained.") }
        if hasSplit { sentences.append("Special tokens in your texts are trained as ordinary text.") }
        if leftOut > 0 { sentences.append("Records that ask not to be trained are left out: \(leftOut).") }
        if !invalid.isEmpty { sentences.append("Records that cannot be trained are left out: \(invalid.count).") }
        if tooLong > 0 {
            sentences.append("Records with no answer in the first \(length) tokens are left out: \(tooLong).")
        }
        if cut > 0 { sentences.append("Records longer than \(length) tokens lose their end: \(cut).") }
        if !noted.isEmpty { sentences.append(Self.noted(noted)) }
        return sentences
    }

    package static func noted(_ keys: Set<String>) -> Sentence {
        "Columns that were not read: \(keys.sorted().joined(separator: ", "))."
    }
}
