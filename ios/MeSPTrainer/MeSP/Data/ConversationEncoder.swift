import Foundation
import MeSPBundle
import MeSPSentences

/// Makes tokens of conversations, and says which of them are of answers.
///
/// The rendering of a conversation is compared with R, the rendering with a word in the place of each message's text.
/// So each text is found where it is, and none can be lost unseen. An answer begins where R and the opening of an answer to the messages
/// before it part, and ends where R and a conversation that ends with it part; with whole tokens each.
struct ConversationEncoder {
    struct Result {
        var tokens = [Int]()
        /// Which of them are in the loss.
        var counted = [Bool]()
        /// Whether the token that ends a text was put after an answer, where the template writes none.
        var addsEnd = false
        /// Whether the template leaves out thoughts.
        var dropsThoughts = false
        /// Whether a message had special tokens, which are text there.
        var hasSplit = false
    }

    let tokenizer: any TextTokenizer
    /// Whether only answers are in the loss.
    let answersOnly: Bool
    private var plain: PlainEncoder
    private var pieces = [Int: [UInt8]]()
    private var shapes = [[Slot]: Shape]()

    init(tokenizer: any TextTokenizer, answersOnly: Bool) {
        (self.tokenizer, self.answersOnly, plain) = (tokenizer, answersOnly, PlainEncoder(tokenizer))
    }

    /// A message as far as the template's text around it depends on it.
    private struct Slot: Hashable {
        let role: String
        /// What stays of its text: thoughts before an answer, or white space alone.
        let kept: String
        /// Whether it has a text that is looked for.
        let hasText: Bool
    }

    /// The template's own text around the texts of messages.
    private struct Shape {
        /// The messages with texts, as the template writes them one after the other: a system message may be in a later one.
        var order = [Int]()
        /// Before, between and after the texts: one more than these are.
        var pieces = [[UInt8]]()
        /// Of each answer, by its message.
        var answers = [Int: Answer]()
    }

    private struct Answer {
        /// The bytes before its text and after it that are of the answer.
        var lead = 0
        var tail = 0
        /// The token in the tail at which generation stops; nil where the template writes none.
        var end: Int?
    }

    // MARK: - Encoding

    /// - Throws: `MeSPError`, which continues the record's place, where a message or an answer is not what it was.
    mutating func encode(_ conversation: [TrainingMessage]) throws -> Result {
        let messages = conversation.map(\.message)
        let (slots, texts) = Self.split(messages)
        let shape = try shape(of: slots)
        let whole = decoded(try render(messages, opensAnswer: false))
        let places = try self.places(of: texts, in: whole, shape, messages)
        var result = Result()
        result.dropsThoughts = slots.contains { slot in
            let thoughts = slot.role == "assistant" && slot.hasText ? Array(Self.thoughts(slot.kept).utf8) : []
            return !thoughts.isEmpty && whole.bytes.places(of: thoughts).isEmpty
        }
        var counted = [Bool](repeating: !answersOnly, count: whole.ids.count)
        // The token to put after others, by their index.
        var additions = [Int: Int]()
        try checkTexts(places, in: whole, shape)
        for (index, answer) in shape.answers {
            guard let place = places[index] else { throw TextRecords.emptyAnswer }
            let isTrained = conversation[index].isTrained && !(answersOnly && conversation[index].isAsked)
            let span = try tokens(of: answer, at: place, in: whole)
            for token in span { counted[token] = isTrained }
            guard isTrained, answer.end == nil else { continue }
            guard let end = tokenizer.endOfText else {
                throw MeSPError(
                    "the chat template writes no token after an answer, and the model has none that ends a text; take another model."
                )
            }
            additions[span.upperBound - 1] = end
        }
        for (index, id) in whole.ids.enumerated() {
            result.tokens.append(id)
            result.counted.append(counted[index])
            if let end = additions[index] {
                result.tokens.append(end)
                result.counted.append(true)
                result.addsEnd = true
            }
        }
        result.hasSplit = plain.hasSplit
        return result
    }

    /// The ids of a conversation that is to be answered.
    ///
    /// - Throws: `MeSPError` where a message is not in what the template writes.
    mutating func prompt(_ messages: [ChatMessage]) throws -> [Int] {
        let ids = try render(messages, opensAnswer: true)
        let (slots, texts) = Self.split(messages)
        let shape = try around(in: decoded(try render(words(slots), opensAnswer: true)), slots)
        _ = try places(of: texts, in: decoded(ids), shape, messages)
        return ids
    }

    /// The token that the template writes after an answer, at which generation stops; nil where it writes none.
    mutating func endOfAnswers() -> Int? {
        guard tokenizer.hasChatTemplate else { return nil }
        let turns = ["user", "assistant", "user"].map { ChatMessage(role: $0, content: "MeSP") }
        // One that takes no such conversation takes no other.
        return try? shape(of: Self.split(turns).slots).answers[1]?.end
    }

    // MARK: - What the template writes

    private mutating func decoded(_ ids: [Int]) -> DecodedText { DecodedText(ids, tokenizer, pieces: &pieces) }

    private mutating func render(_ messages: [ChatMessage], opensAnswer: Bool) throws -> [Int] {
        do { return try plain.encode(messages, opensAnswer: opensAnswer) } catch let error as MeSPError {
            throw error
        } catch {
            throw MeSPError("the chat template refuses it (\(error.plainSentence)); change its messages to fit.")
        }
    }

    /// Messages as slots and the texts in them, nil where there is only white space.
    private static func split(_ messages: [ChatMessage]) -> (slots: [Slot], texts: [String?]) {
        var (slots, texts) = ([Slot](), [String?]())
        for message in messages {
            var (kept, text) = ("", message.content)
            if message.role == "assistant", text.drop(while: \.isWhitespace).hasPrefix("<think>"),
                let end = text.range(of: "</think>", options: .backwards)
            {
                let space = text[end.upperBound...].prefix(while: \.isWhitespace)
                kept = String(text[..<space.endIndex])
                text = String(text[space.endIndex...])
            }
            let hasText = !TextRecords.isBlank(text)
            slots.append(Slot(role: message.role, kept: hasText ? kept : kept + text, hasText: hasText))
            texts.append(hasText ? text : nil)
        }
        return (slots, texts)
    }

    /// The thoughts in what is kept of an answer.
    private static func thoughts(_ kept: String) -> String {
        let inside = kept.trimmingCharacters(in: .whitespacesAndNewlines).dropFirst("<think>".count)
        return inside.dropLast("</think>".count).trimmingCharacters(in: .whitespacesAndNewlines)
    }

    /// The word that stands for the text of a message.
    private static func word(_ index: Int) -> String { "MeSP\(index)z" }

    private func words(_ slots: some Sequence<Slot>) -> [ChatMessage] {
        slots.enumerated().map { index, slot in
            ChatMessage(role: slot.role, content: slot.kept + (slot.hasText ? Self.word(index) : ""))
        }
    }

    private mutating func shape(of slots: [Slot]) throws -> Shape {
        if let known = shapes[slots] { return known }
        let messages = words(slots)
        let whole = decoded(try render(messages, opensAnswer: false))
        var shape = try around(in: whole, slots)
        for (number, index) in shape.order.enumerated() where slots[index].role == "assistant" {
            let end = try endOfWord(index, in: whole)
            let start = end - Self.word(index).utf8.count
            let piece = (start - shape.pieces[number].count)..<start
            let former = number > 0 ? shape.order[number - 1] : nil
            var answer = Answer()
            answer.lead = piece.count - (try opening(before: index, messages, in: whole, piece, after: former))
            let last = decoded(try render(Array(messages[...index]), opensAnswer: false))
            let other = try endOfWord(index, in: last)
            // Not into the next message's word.
            answer.tail = min(whole.agreed(from: end, with: last, from: other), shape.pieces[number + 1].count)
            answer.end = whole.ids.indices.first {
                whole.bounds[$0] >= end && whole.bounds[$0 + 1] <= end + answer.tail && isEnd(whole.ids[$0])
            }.map { whole.ids[$0] }
            shape.answers[index] = answer
        }
        // Of each answer that has no text there is no place.
        for index in slots.indices where slots[index].role == "assistant" && !slots[index].hasText {
            shape.answers[index] = Answer()
        }
        if slots.allSatisfy({ $0.kept.isEmpty }) { shapes[slots] = shape }
        return shape
    }

    private func isEnd(_ token: Int) -> Bool { token == tokenizer.endOfText || tokenizer.isSpecial(token) }

    /// The bytes of the piece before an answer's text that ask for it: as far as it agrees with the opening of an answer to the messages
    /// before.
    private mutating func opening(
        before index: Int, _ messages: [ChatMessage], in whole: DecodedText, _ piece: Range<Int>, after former: Int?
    ) throws -> Int {
        guard index > 0 else {
            // No template can be asked to begin a conversation.
            let question = [ChatMessage(role: "user", content: Self.word(0))]
            guard let asked = try? decoded(render(question, opensAnswer: true)),
                let told = try? decoded(render(question, opensAnswer: false)),
                let (from, other) = try? (endOfWord(0, in: asked), endOfWord(0, in: told))
            else { return piece.count }
            let opening = Array(asked.bytes[(from + asked.agreed(from: from, with: told, from: other))...])
            let text = Array(whole.bytes[piece])
            return text.places(of: opening).last.map { $0 + opening.count } ?? piece.count
        }
        let asked = decoded(try render(Array(messages[..<index]), opensAnswer: true))
        let from = try former.map { try endOfWord($0, in: asked) } ?? 0
        return min(whole.agreed(from: piece.lowerBound, with: asked, from: from), piece.count)
    }

    private func endOfWord(_ index: Int, in text: DecodedText) throws -> Int {
        let word = Array(Self.word(index).utf8)
        let places = text.bytes.places(of: word)
        guard places.count == 1 else { throw Self.rewrites }
        return places[0] + word.count
    }

    private static var rewrites: MeSPError {
        MeSPError("the chat template rewrites the messages, so an answer cannot be located; take it out.")
    }

    /// The text around the words that stand for texts.
    private func around(in whole: DecodedText, _ slots: [Slot]) throws -> Shape {
        var found = [(start: Int, message: Int)]()
        for index in slots.indices where slots[index].hasText {
            let places = whole.bytes.places(of: Array(Self.word(index).utf8))
            guard let start = places.first else {
                throw MeSPError("the chat template leaves out the message of \(slots[index].role); take it out.")
            }
            guard places.count == 1 else { throw Self.rewrites }
            found.append((start, index))
        }
        var (shape, place) = (Shape(), 0)
        for (start, message) in found.sorted(by: { $0.start < $1.start }) {
            shape.order.append(message)
            shape.pieces.append(Array(whole.bytes[place..<start]))
            place = start + Self.word(message).utf8.count
        }
        shape.pieces.append(Array(whole.bytes[place...]))
        return shape
    }

    // MARK: - Where texts are

    /// The bytes of each message's text in what the template makes of all.
    private func places(
        of texts: [String?], in whole: DecodedText, _ shape: Shape, _ messages: [ChatMessage]
    ) throws -> [Int: Range<Int>] {
        func fault(_ index: Int) -> MeSPError {
            MeSPError(
                "the chat template does not write all of the message of \(messages[index].role) as it is; shorten or change it."
            )
        }
        guard whole.bytes.starts(with: shape.pieces[0]) else { throw Self.rewrites }
        var (places, place) = ([Int: Range<Int>](), shape.pieces[0].count)
        for (number, index) in shape.order.enumerated() {
            let (piece, isLast) = (shape.pieces[number + 1], number + 1 == shape.order.count)
            let end = variants(texts[index] ?? "").lazy.compactMap { text -> Int? in
                let end = place + text.count
                guard whole.bytes[place...].starts(with: text), whole.bytes[end...].starts(with: piece),
                    !isLast || end + piece.count == whole.bytes.count
                else { return nil }
                return end
            }.first
            guard let end else { throw fault(index) }
            places[index] = place..<end
            place = end + piece.count
        }
        guard !shape.order.isEmpty || whole.bytes == shape.pieces[0] else { throw Self.rewrites }
        return places
    }

    /// A text as a template may write it: as it is or without white space at its ends, and as the tokenizer reads it back.
    private func variants(_ text: String) -> some Sequence<[UInt8]> {
        func trimmed(_ text: String) -> [String] {
            let end = String(text.reversed().drop { $0.isWhitespace }.reversed())
            let start = String(text.drop { $0.isWhitespace })
            return [text, end, start, text.trimmingCharacters(in: .whitespacesAndNewlines)]
        }
        // Most are as they are written: to read a text back is for others.
        return (0..<2).lazy.flatMap { pass in
            trimmed(pass == 0 ? text : tokenizer.decode(tokenizer.encode(text, addsSpecialTokens: false)))
                .map { Array($0.utf8) }
        }
    }

    /// Throws where a text holds a token that ends an answer: generation would stop there.
    private func checkTexts(_ places: [Int: Range<Int>], in whole: DecodedText, _ shape: Shape) throws {
        let ends = Set(shape.answers.values.compactMap { $0.end ?? tokenizer.endOfText })
        guard whole.ids.contains(where: ends.contains) else { return }
        for place in places.values {
            let within = whole.tokens(in: place)
            if let index = whole.ids.indices.first(where: { within[$0] && ends.contains(whole.ids[$0]) }) {
                let end = tokenizer.decode([whole.ids[index]])
                throw MeSPError("a message holds \(end), which ends an answer; remove it from the text.")
            }
        }
    }

    /// The tokens of an answer whose text lies at `place`.
    private func tokens(of answer: Answer, at place: Range<Int>, in whole: DecodedText) throws -> Range<Int> {
        let end = place.upperBound + answer.tail
        let within = whole.tokens(in: (place.lowerBound - answer.lead)..<place.upperBound)
        guard let first = within.firstIndex(of: true), var last = within.lastIndex(of: true) else {
            throw Self.rewrites
        }
        // What the last of them has of the next message.
        let over = whole.bounds[last + 1]
        guard over <= end || whole.bytes[end..<over].allSatisfy({ $0 <= 0x20 }) else {
            throw MeSPError(
                "one token holds the end of an answer and the start of the next text; end the answer with a full stop.")
        }
        while last + 1 < whole.ids.count, whole.bounds[last + 2] <= end { last += 1 }
        if let token = answer.end, !whole.ids[first...last].contains(token) { throw Self.rewrites }
        return first..<last + 1
    }
}

extension TextTokenizer {
    /// The tokens that end an answer or a text in what is trained: what the chat template writes after an answer, and the tokenizer's.
    package var trainedEnds: [Int] {
        var encoder = ConversationEncoder(tokenizer: self, answersOnly: true)
        return [encoder.endOfAnswers(), endOfText].compactMap { $0 }
    }

    /// The ids of a conversation in the model's chat template, with the opening of an answer.
    ///
    /// - Throws: `MeSPError` where a message is not in what the template writes.
    package func encode(prompt messages: [ChatMessage]) throws -> [Int] {
        var encoder = ConversationEncoder(tokenizer: self, answersOnly: true)
        return try encoder.prompt(messages)
    }
}
