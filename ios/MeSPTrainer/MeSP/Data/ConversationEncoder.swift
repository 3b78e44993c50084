import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// Encodes conversations as tokens, and marks the tokens of answers.
///
/// The encoder renders a conversation with the chat template in two ways: unchanged, and with a mark in place of each text (`MarkedConversation`).
/// The marks show where each text is, and whether the template drops a text. Usually an answer starts where the marked rendering first differs from
/// the prompt for that answer. It ends where the marked rendering first differs from the rendering of all messages up to and including that answer.
/// Both places are moved to token boundaries.
struct ConversationEncoder {
    struct Result {
        var tokens = [Int]()
        /// Whether each token is in the loss.
        var counted = [Bool]()
        /// Whether an end-of-text token was added after a trained answer. It is added if the template writes no end token after the answer.
        var addsEnd = false
        /// Whether the template leaves out thoughts.
        var dropsThoughts = false
        /// Whether a message of this or an earlier conversation had special tokens. They were encoded as plain text.
        var hasSplit = false
    }

    let tokenizer: any TextTokenizer
    let answersOnly: Bool
    private var plain: PlainEncoder
    private var pieces = [Int: [UInt8]]()
    /// A cache of renderings of marked conversations. Most conversations differ only in their texts and so share a rendering.
    private var shapes = [Conversation: Shape]()
    private var knownEnds: TemplateEnds?

    init(tokenizer: any TextTokenizer, answersOnly: Bool) {
        (self.tokenizer, self.answersOnly, plain) = (tokenizer, answersOnly, PlainEncoder(tokenizer))
    }

    /// A template's rendering of a marked conversation.
    private struct Shape {
        var argumentsAreText = false
        var rendering: Marked
        /// The located answers, by the index of their message.
        var answers = [Int: Answer]()
        /// The error from locating the answers; nil if there is none.
        var fault: MeSPError?
        /// The first tool that the template leaves out; nil if there is none.
        var lostTool: String?
        /// The first value in a tool call that the template leaves out; nil if there is none.
        var lostValue: (value: JSONValue, message: Int)?
        /// A special token in `besideTexts`; nil if there is none.
        var special: String?
    }

    private struct Marked {
        let text: DecodedText
        let marks: [(number: Int, range: Range<Int>)]

        init(_ text: DecodedText) { (self.text, marks) = (text, MarkedConversation.marks(in: text.bytes)) }
    }

    /// The bounds of an answer in the marked rendering, in bytes.
    private struct Answer {
        var start: Int
        /// The end of the answer's last text. After it comes the template's own text.
        var said: Int
        var stop: Int
        /// Whether the template writes no end token after the answer.
        var isEndless = false
    }

    private struct TemplateEnds {
        /// The tokens at which generation stops.
        var stops = [Int]()
        /// The tokens that end an answer if a question follows.
        var followed = [Int]()
    }

    // MARK: - Encoding

    /// Encodes a conversation.
    ///
    /// - Throws: `MeSPError` if the conversation cannot be trained, for example because the template changes a message.
    mutating func encode(_ conversation: Conversation) throws -> Result {
        let trained = conversation.trained
        for message in trained.map({ conversation.messages[$0] })
        where message.toolCalls.isEmpty && TextRecords.isBlank(message.content) {
            throw TextRecords.emptyAnswer
        }
        let marked = try MarkedConversation(conversation)
        let shape = try shape(of: marked)
        var result = Result()
        result.dropsThoughts = try check(marked, shape)
        if let fault = shape.fault { throw fault }
        let ids = try plainIDs(conversation, shape.argumentsAreText, addsGenerationPrompt: false)
        let whole = decoded(ids)
        var (answers, places) = (shape.answers, { (place: Int) in place })
        do { places = try self.places(of: marked, in: whole, shape) } catch let error as MeSPError {
            // If all tokens are trained, a text may be anywhere in the rendering.
            guard !answersOnly, conversation.untrained.isEmpty, marked.texts.allSatisfy({ isWritten($0, in: whole) })
            else { throw error }
            answers = [:]
        }
        var counted = [Bool](repeating: !answersOnly, count: whole.ids.count)
        // The tokens to insert, by the index of the token that follows.
        var additions = [Int: Int]()
        let stops = Set(try templateEnds().stops + [tokenizer.endOfText].compactMap { $0 })
        for (index, answer) in answers {
            let isTrained = trained.contains(index)
            let (start, said, stop) = (places(answer.start), places(answer.said), places(answer.stop))
            let within = whole.tokens(in: start..<stop)
            guard let last = within.lastIndex(of: true) else { throw Self.rewrites }
            // The last token may extend beyond the answer.
            let over = whole.bounds[last + 1]
            guard over <= stop || whole.bytes[stop..<over].allSatisfy({ $0 <= 0x20 }) else {
                throw MeSPError(
                    "one token holds the end of an answer and the start of the next text; end the answer with a full stop."
                )
            }
            for token in within.indices where within[token] { counted[token] = isTrained }
            if isTrained {
                let spoken = whole.tokens(in: start..<said)
                if let end = whole.ids.indices.first(where: { spoken[$0] && stops.contains(whole.ids[$0]) }) {
                    throw MeSPError(
                        "a message holds \(tokenizer.decode([whole.ids[end]])), which ends an answer; remove it from the text."
                    )
                }
            }
            guard answer.isEndless else { continue }
            guard let end = tokenizer.endOfText else {
                throw MeSPError(
                    "the chat template writes no token after an answer, and the model has none that ends a text; take another model."
                )
            }
            additions[last + 1] = end
            if isTrained { result.addsEnd = true }
        }
        if answersOnly, conversation.prompt > 0, let first = trained.first, first > 0 {
            try checkAsked(conversation, first, ids.prefix(counted.firstIndex(of: true) ?? 0), shape)
        }
        for index in 0...whole.ids.count {
            if let end = additions[index] {
                result.tokens.append(end)
                result.counted.append(counted[index - 1])
            }
            guard index < whole.ids.count else { break }
            result.tokens.append(whole.ids[index])
            result.counted.append(counted[index])
        }
        result.hasSplit = plain.hasSplit
        return result
    }

    /// Returns the token ids of a conversation and of the opening of the answer.
    ///
    /// - Throws: `MeSPError`, for example if the template changes a message.
    mutating func prompt(_ conversation: Conversation) throws -> [Int] {
        var asked = conversation
        asked.prompt = asked.messages.count
        let marked = try MarkedConversation(asked)
        let shape = try shape(of: marked)
        _ = try check(marked, shape)
        let whole = decoded(try plainIDs(asked, shape.argumentsAreText, addsGenerationPrompt: false))
        _ = try places(of: marked, in: whole, shape)
        return try plainIDs(asked, shape.argumentsAreText, addsGenerationPrompt: true)
    }

    /// Returns the tokens that the template writes after an answer. Generation stops at them.
    mutating func endsOfAnswers() -> [Int] {
        tokenizer.hasChatTemplate ? (try? templateEnds().stops) ?? [] : []
    }

    /// Throws an error unless the prompt in generation begins with `prompt`, the training tokens before the answer.
    private mutating func checkAsked(
        _ conversation: Conversation, _ index: Int, _ prompt: some Sequence<Int>, _ shape: Shape
    ) throws {
        let before = conversation.beginning(index)
        guard try plainIDs(before, shape.argumentsAreText, addsGenerationPrompt: true).starts(with: prompt) else {
            throw MeSPError(
                "the prompt for the answer in message \(index + 1) is not the beginning of the conversation in the chat template; leave it out."
            )
        }
    }

    // MARK: - What the template writes

    private mutating func decoded(_ ids: [Int]) -> DecodedText { DecodedText(ids, tokenizer, pieces: &pieces) }

    private mutating func plainIDs(
        _ conversation: Conversation, _ argumentsAreText: Bool, addsGenerationPrompt: Bool
    ) throws -> [Int] {
        try Self.render {
            try plain.encode(
                conversation, argumentsAreText: argumentsAreText, addsGenerationPrompt: addsGenerationPrompt)
        }
    }

    private mutating func marked(
        _ conversation: Conversation, _ argumentsAreText: Bool, asks: Bool = false
    ) throws -> Marked {
        let ids = try Self.render {
            try conversation.applied(
                to: tokenizer, argumentsAreText: argumentsAreText, addsGenerationPrompt: asks)
        }
        return Marked(decoded(ids))
    }

    private static func render(_ body: () throws -> [Int]) throws -> [Int] {
        do { return try body() } catch let error as MeSPError {
            throw error
        } catch {
            throw MeSPError("the chat template refuses it (\(error.plainSentence)); change its messages to fit.")
        }
    }

    private mutating func shape(of marked: MarkedConversation) throws -> Shape {
        let conversation = marked.conversation
        if let known = shapes[conversation] { return known }
        var shape: Shape
        do {
            shape = Shape(rendering: try self.marked(conversation, false))
        } catch {
            guard conversation.messages.contains(where: { !$0.toolCalls.isEmpty }),
                let rendering = try? self.marked(conversation, true)
            else { throw error }
            shape = Shape(argumentsAreText: true, rendering: rendering)
        }
        shape.lostTool = try lostTool(of: conversation, shape)
        shape.lostValue = try lostValue(of: conversation, shape)
        for text in conversation.besideTexts where shape.special == nil { shape.special = plain.special(in: text) }
        do { shape.answers = try answers(of: marked, shape) } catch let error as MeSPError {
            // If all tokens are trained, answers need not be located.
            if answersOnly || !conversation.untrained.isEmpty { shape.fault = error }
        }
        if shapes.count >= 256 { shapes = [:] }
        shapes[conversation] = shape
        return shape
    }

    /// Checks that the template writes each text, tool and value. The template may leave out the thoughts of answers before the last question, and of
    /// answers that are not trained.
    ///
    /// - Returns: whether the template leaves out thoughts.
    /// - Throws: `MeSPError` if the template leaves out anything else.
    private func check(_ marked: MarkedConversation, _ shape: Shape) throws -> Bool {
        let seen = Set(shape.rendering.marks.map(\.number))
        let conversation = marked.conversation
        let question = conversation.messages.lastIndex { $0.role == "user" } ?? -1
        let trained = conversation.trained
        var dropsThoughts = false
        for (number, text) in marked.texts.enumerated() where !seen.contains(number) {
            let (role, place) = (conversation.messages[text.message].role, text.message + 1)
            switch text.kind {
            case .thought where role == "assistant" && (text.message < question || !trained.contains(text.message)):
                dropsThoughts = true
            case .thought:
                throw MeSPError(
                    "the chat template leaves out the thoughts of message \(place); write them into its content, without tags."
                )
            case .content:
                throw MeSPError("the chat template leaves out the message of \(role); take it out.")
            case .call:
                throw MeSPError(
                    "the chat template leaves out the tool call of message \(place) (\(Self.short(text.text))); take a model whose template writes it."
                )
            case .argument:
                throw MeSPError(
                    "the chat template leaves out the arguments of a tool call of message \(place) (\(Self.short(text.text))); take a model whose template writes them."
                )
            }
        }
        if let tool = shape.lostTool {
            throw MeSPError(
                "the chat template leaves out the tools, such as \(Self.short(tool)); take a model whose template has them, or leave them out."
            )
        }
        if let (value, message) = shape.lostValue {
            throw MeSPError(
                "the chat template leaves out \(value.json) in a tool call of message \(message + 1); take a model whose template writes it."
            )
        }
        if let special = shape.special {
            throw MeSPError(
                "it has the special token \(special) outside of its texts, for example in its tools, where it stays special; take it out."
            )
        }
        return dropsThoughts
    }

    private static func short(_ text: String) -> String {
        let text = text.split(whereSeparator: \.isWhitespace).joined(separator: " ")
        return text.count > 30 ? "\(text.prefix(29))…" : text
    }

    private mutating func lostTool(of conversation: Conversation, _ shape: Shape) throws -> String? {
        guard !conversation.tools.isEmpty else { return nil }
        // Tools and texts can have marks with the same number, so the marks of each number are counted.
        var (renamed, names) = (conversation, [String]())
        for (number, tool) in conversation.tools.enumerated() {
            var fields = try JSONValue.object(text: tool)
            let mark = JSONValue.string(MarkedConversation.mark(number))
            if case .object(var function)? = fields["function"] {
                names.append(function["name"]?.string ?? "")
                function["name"] = mark
                fields["function"] = .object(function)
            } else {
                names.append(fields["name"]?.string ?? "")
                fields["name"] = mark
            }
            renamed.tools[number] = JSONValue.object(fields).json
        }
        func counts(_ rendering: Marked) -> [Int] {
            names.indices.map { number in rendering.marks.count { $0.number == number } }
        }
        let (before, after) = (counts(shape.rendering), counts(try marked(renamed, shape.argumentsAreText)))
        return names.indices.first { before[$0] == after[$0] }.map { names[$0] }
    }

    private mutating func lostValue(
        of conversation: Conversation, _ shape: Shape
    ) throws -> (value: JSONValue, message: Int)? {
        for (message, value, changed) in try conversation.otherValues
        where try marked(changed, shape.argumentsAreText).text.ids == shape.rendering.text.ids {
            return (value, message)
        }
        return nil
    }

    // MARK: - Where texts are

    private static var rewrites: MeSPError {
        MeSPError("the chat template rewrites the messages, so an answer cannot be located; take it out.")
    }

    /// Finds each text in the unmarked rendering.
    ///
    /// - Returns: a function from a byte position in the marked rendering, outside of marks, to the position in `whole`.
    private func places(
        of marked: MarkedConversation, in whole: DecodedText, _ shape: Shape
    ) throws -> (Int) -> Int {
        let (bytes, marks) = (shape.rendering.text.bytes, shape.rendering.marks)
        var ends = [(marked: Int, whole: Int)]()
        var (place, from) = (0, 0)
        for (index, mark) in marks.enumerated() {
            let piece = bytes[from..<mark.range.lowerBound]
            guard whole.bytes[place...].starts(with: piece), marked.texts.indices.contains(mark.number) else {
                throw Self.rewrites
            }
            place += piece.count
            let isLast = index + 1 == marks.count
            let following = bytes[mark.range.upperBound..<(isLast ? bytes.count : marks[index + 1].range.lowerBound)]
            let text = marked.texts[mark.number]
            let end = variants(text.text).lazy.compactMap { form -> Int? in
                let end = place + form.count
                guard whole.bytes[place...].starts(with: form), whole.bytes[end...].starts(with: following),
                    !isLast || end + following.count == whole.bytes.count
                else { return nil }
                return end
            }.first
            guard let end else {
                throw MeSPError(
                    "the chat template does not write all of the message of \(marked.conversation.messages[text.message].role) as it is; shorten or change it."
                )
            }
            (place, from) = (end, mark.range.upperBound)
            ends.append((from, end))
        }
        guard whole.bytes[place...].elementsEqual(bytes[from...]) else { throw Self.rewrites }
        return { position in
            guard let last = ends.last(where: { $0.marked <= position }) else { return position }
            return position - last.marked + last.whole
        }
    }

    private func isWritten(_ text: MarkedConversation.Text, in whole: DecodedText) -> Bool {
        text.kind == .thought || variants(text.text).contains { !whole.bytes.places(of: $0).isEmpty }
    }

    /// Returns the forms in which a template may write a text, and after them the same forms encoded and decoded by the tokenizer.
    private func variants(_ text: String) -> some Sequence<[UInt8]> {
        // Most texts appear unchanged, so the slower encoding and decoding comes second.
        (0..<2).lazy.flatMap { pass in
            MarkedConversation.forms(text).lazy.map { form in
                Array((pass == 0 ? form : tokenizer.decode(tokenizer.encode(form, addsSpecialTokens: false))).utf8)
            }
        }
    }

    // MARK: - Where answers are

    private mutating func answers(of marked: MarkedConversation, _ shape: Shape) throws -> [Int: Answer] {
        let (conversation, rendering) = (marked.conversation, shape.rendering)
        let ends = try templateEnds()
        let isEnd = Set(ends.stops + ends.followed + [tokenizer.endOfText].compactMap { $0 })
        func message(_ number: Int) -> Int? {
            marked.texts.indices.contains(number) ? marked.texts[number].message : nil
        }
        var answers = [Int: Answer]()
        for index in Set(conversation.trained).union(answersOnly ? [] : conversation.untrained).sorted() {
            let said = rendering.marks.filter { message($0.number) == index }
            guard let first = said.first else { throw Self.notFound(index) }
            let start = try start(of: index, conversation, shape, first.range.lowerBound)
            let stop = try stop(of: index, conversation, shape)
            let inside = rendering.marks.filter { $0.range.lowerBound < stop && $0.range.upperBound > start }
            // A template may also write a text elsewhere, such as a tool's name with the tool's result.
            guard start < stop, Set(inside.map(\.number)).isSuperset(of: said.map(\.number)),
                inside.allSatisfy({ message($0.number) == index }),
                let last = said.map(\.range.upperBound).filter({ $0 <= stop }).max()
            else { throw Self.notFound(index) }
            var answer = Answer(start: start, said: last, stop: stop)
            let tail = string(rendering.text.bytes[last..<stop])
            if tokenizer.encode(Self.withoutSpaceAtEnd(tail), addsSpecialTokens: false).last.map(isEnd.contains) != true
            {
                // The end token may be part of the text that opens the next message.
                if let end = endToken(beginning: rendering.text.bytes[stop...], isEnd) {
                    answer.stop += end
                } else {
                    answer.isEndless = true
                }
            }
            answers[index] = answer
        }
        return answers
    }

    private static func notFound(_ index: Int) -> MeSPError {
        MeSPError(
            "the chat template does not tell where the answer in message \(index + 1) begins and ends; leave the record out."
        )
    }

    /// Returns the start of an answer: usually the place where the rendering first differs from the prompt for that answer. The answer's first text
    /// is at `first`.
    private mutating func start(
        of index: Int, _ conversation: Conversation, _ shape: Shape, _ first: Int
    ) throws -> Int {
        let rendering = shape.rendering
        let header: [UInt8]
        let anchor: Int
        // The first message has no prompt. Some templates throw an error for a prompt without a question.
        if index > 0, let asked = try? beginning(index, of: conversation, shape, asks: true), !asked.text.bytes.isEmpty
        {
            let after: Int
            (anchor, after) = Self.lastMark(rendering, asked)
            let agreed = rendering.text.agreed(from: anchor, to: first, with: asked.text, from: after)
            if after + agreed == asked.text.bytes.count { return anchor + agreed }
            let told = try beginning(index, of: conversation, shape)
            let same = told.text.agreed(from: after, with: asked.text, from: after)
            if agreed >= same { return anchor + agreed }
            header = Array(asked.text.bytes[(after + same)...])
        } else {
            var probe = conversation
            probe.messages = [.user("MeSP")]
            let asked = try marked(probe, shape.argumentsAreText, asks: true).text
            let told = try marked(probe, shape.argumentsAreText).text
            header = Array(asked.bytes[told.agreed(from: 0, with: asked, from: 0)...])
            anchor = rendering.marks.last { $0.range.upperBound <= first }?.range.upperBound ?? 0
        }
        // The rendering does not contain the prompt, or there is no prompt. The answer then starts after the template's opening of an answer. A
        // template may write only a part of this opening. The part must have a special token.
        let gap = Array(rendering.text.bytes[anchor..<max(anchor, first)])
        let opened = decoded(tokenizer.encode(string(header), addsSpecialTokens: false))
        for count in stride(from: opened.ids.count, to: 0, by: -1) {
            let isWhole = count == opened.ids.count
            let part = Array(opened.bytes[..<opened.bounds[count]])
            if let at = gap.places(of: part).last, isWhole || opened.ids[..<count].contains(where: isSpecial) {
                return anchor + at + part.count
            }
        }
        throw Self.notFound(index)
    }

    /// Returns the end of an answer: the place where the rendering first differs from the rendering of all messages up to and including that answer.
    /// If the answer is the last message, returns the end of the rendering.
    private mutating func stop(of index: Int, _ conversation: Conversation, _ shape: Shape) throws -> Int {
        let rendering = shape.rendering
        guard index + 1 < conversation.messages.count else { return rendering.text.bytes.count }
        let until = try beginning(index + 1, of: conversation, shape)
        let (anchor, after) = Self.lastMark(rendering, until)
        return anchor + rendering.text.agreed(from: anchor, with: until.text, from: after)
    }

    /// Renders the first `count` messages. Adds a question if the template requires one.
    private mutating func beginning(
        _ count: Int, of conversation: Conversation, _ shape: Shape, asks: Bool = false
    ) throws -> Marked {
        var beginning = conversation.beginning(count)
        do { return try marked(beginning, shape.argumentsAreText, asks: asks) } catch {
            guard !beginning.messages.contains(where: { $0.role == "user" }) else { throw error }
            let hasSystem = beginning.messages.first.map { ["system", "developer"].contains($0.role) } ?? false
            beginning.messages.insert(.user("MeSP"), at: hasSystem ? 1 : 0)
            return try marked(beginning, shape.argumentsAreText, asks: asks)
        }
    }

    /// Finds the last mark that is in both renderings. Returns the end of this mark in each rendering; (0, 0) if there is none.
    private static func lastMark(_ whole: Marked, _ beginning: Marked) -> (whole: Int, beginning: Int) {
        for (index, mark) in beginning.marks.enumerated().reversed() {
            // A mark can occur several times, because a template may write a tool's name again with the tool's result.
            let before = beginning.marks[..<index].count { $0.number == mark.number }
            let there = whole.marks.filter { $0.number == mark.number }
            if there.count > before { return (there[before].range.upperBound, mark.range.upperBound) }
        }
        return (0, 0)
    }

    // MARK: - Where answers end

    /// Returns the length in bytes of an end token at the start of the text, including white space before it; nil if there is none.
    private mutating func endToken(beginning text: ArraySlice<UInt8>, _ isEnd: Set<Int>) -> Int? {
        let read = decoded(tokenizer.encode(string(text.prefix(200)), addsSpecialTokens: false))
        for (index, id) in read.ids.enumerated() {
            if isEnd.contains(id) { return read.bounds[index + 1] }
            guard read.bytes[..<read.bounds[index + 1]].allSatisfy({ $0 <= 0x20 }) else { return nil }
        }
        return nil
    }

    private mutating func templateEnds() throws -> TemplateEnds {
        if let knownEnds { return knownEnds }
        let turns = ["user", "assistant", "user"].enumerated().map {
            Conversation.Message(role: $1, content: MarkedConversation.mark($0))
        }
        /// Returns the token ids of the template's text after a message.
        func tail(_ count: Int, _ number: Int) throws -> [Int] {
            let rendering = try marked(Conversation(Array(turns.prefix(count))), false)
            guard let at = rendering.marks.firstIndex(where: { $0.number == number }) else { return [] }
            let next = at + 1 < rendering.marks.count ? rendering.marks[at + 1].range.lowerBound : nil
            let text = rendering.text.bytes[rendering.marks[at].range.upperBound..<(next ?? rendering.text.bytes.count)]
            return tokenizer.encode(string(text), addsSpecialTokens: false)
        }
        var ends = TemplateEnds()
        if let asked = try? tail(2, 0), let last = try? tail(2, 1), let followed = try? tail(3, 1),
            let end = last.last(where: isSpecial)
        {
            let shared = zip(last, followed).prefix { $0 == $1 }.map(\.0).last(where: isSpecial)
            let turn = followed.first(where: isSpecial)
            ends.stops = [end] + (shared.map { [$0] } ?? [])
            ends.followed = [shared ?? (turn == asked.first(where: isSpecial) ? turn : nil)].compactMap { $0 }
        }
        knownEnds = ends
        return ends
    }

    private func isSpecial(_ token: Int) -> Bool { token == tokenizer.endOfText || tokenizer.isSpecial(token) }

    private func string(_ bytes: some Collection<UInt8>) -> String { String(decoding: bytes, as: UTF8.self) }

    private static func withoutSpaceAtEnd(_ text: String) -> String {
        let scalars = text.unicodeScalars
        let end = scalars.lastIndex { !$0.properties.isWhitespace }.map { scalars.index(after: $0) }
        return String(text[..<(end ?? text.startIndex)])
    }
}

extension Conversation {
    var untrained: [Int] { messages.indices.filter { messages[$0].isAnswer && !messages[$0].isTrained } }

    fileprivate func beginning(_ count: Int) -> Conversation {
        var beginning = self
        beginning.messages = Array(messages.prefix(count))
        return beginning
    }
}

extension TextTokenizer {
    /// The tokens that end an answer or a text in training: the chat template's end tokens and the tokenizer's end of text.
    package var trainedEnds: [Int] {
        var encoder = ConversationEncoder(tokenizer: self, answersOnly: true)
        return encoder.endsOfAnswers() + [endOfText].compactMap { $0 }
    }

    /// Returns the token ids of a conversation and of the opening of an answer, by the model's chat template.
    ///
    /// - Throws: `MeSPError`, for example if the template changes a message.
    package func encode(prompt conversation: Conversation) throws -> [Int] {
        var encoder = ConversationEncoder(tokenizer: self, answersOnly: true)
        return try encoder.prompt(conversation)
    }
}
