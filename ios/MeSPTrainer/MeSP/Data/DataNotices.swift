import MeSPBundle
import MeSPSentences

/// Notices about a person's data: the parts that are not trained, and the tokens that are added.
package struct DataNotices: Sendable, Equatable {
    /// T, the number of tokens in a sequence.
    let length: Int
    /// The number of records with a key that excludes them from training.
    var leftOut = 0
    /// The number of records, or pairs of answers, without a token in the loss that fits a sequence.
    var tooLong = 0
    /// The number of records, or pairs of answers, that are cut at the end.
    var cut = 0
    /// The keys of records that are not read.
    var unread = Set<String>()
    /// Whether the token that ends a text was added after answers.
    var addsEnd = false
    /// Whether the chat template leaves out thoughts.
    var dropsThoughts = false
    /// Whether texts had special tokens, which were encoded as text.
    var hasSplit = false

    init(length: Int) { self.length = length }

    mutating func take(_ contents: TextDocuments) {
        leftOut += contents.leftOut
        unread.formUnion(contents.unread)
    }

    mutating func take(_ result: ConversationEncoder.Result) {
        addsEnd = addsEnd || result.addsEnd
        dropsThoughts = dropsThoughts || result.dropsThoughts
        hasSplit = hasSplit || result.hasSplit
    }

    /// The notices, one sentence each.
    package var sentences: [Sentence] {
        var sentences = [Sentence]()
        if addsEnd {
            sentences.append(
                "The chat template writes no token after an answer, so the token that ends a text is added there.")
        }
        if dropsThoughts { sentences.append("The chat template leaves out thoughts, so they are not trained.") }
        if hasSplit { sentences.append("Special tokens in your texts are trained as ordinary text.") }
        if leftOut > 0 { sentences.append("Records that ask not to be trained are left out: \(leftOut).") }
        if tooLong > 0 {
            sentences.append("Records with no answer in the first \(length) tokens are left out: \(tooLong).")
        }
        if cut > 0 { sentences.append("Records longer than \(length) tokens lose their end: \(cut).") }
        if !unread.isEmpty { sentences.append(Self.unread(unread)) }
        return sentences
    }

    package static func unread(_ keys: Set<String>) -> Sentence {
        "Keys of records that are not read: \(keys.sorted().joined(separator: ", "))."
    }
}
