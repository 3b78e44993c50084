import MeSPBundle
import MeSPSentences

/// The bounds of an answer in the marked rendering, in bytes.
struct Answer {
    var start: Int
    /// The end of the answer's last text. After it comes the template's own text.
    var said: Int
    var stop: Int
    /// Whether the template writes no end token after the answer, and the model's turn ends with it.
    var isEndless = false
}

/// The tokens at which generation stops, and those that end an answer if a question follows.
typealias TemplateEnds = (stops: [Int], followed: [Int])

/// Marks the tokens of answers.
///
/// Usually an answer starts where the marked rendering first differs from the prompt for that answer. It ends where the marked rendering first
/// differs from the rendering of all messages up to and including that answer. Both places are moved to token boundaries.
extension RecordEncoder {
    mutating func mask(_ rendering: Rendering) throws -> Encoded {
        let (conversation, whole, shape) = (rendering.conversation, rendering.whole, rendering.shape)
        let trained = conversation.trained
        if let fault = shape.fault { throw fault }
        var (answers, places) = (shape.answers, { (place: Int) in place })
        do { places = try self.places(of: rendering) } catch let error as MeSPError {
            // If all tokens are trained, a text may be anywhere in the rendering.
            guard !answersOnly, conversation.untrained.isEmpty,
                rendering.marked.texts.allSatisfy({ isWritten($0, in: whole) })
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
            if isTrained { notices.addsEnd = true }
        }
        if answersOnly, conversation.prompt > 0, let first = trained.first, first > 0 {
            // The prompt in generation must begin with the training tokens before the answer.
            let prompt = whole.ids.prefix(counted.firstIndex(of: true) ?? 0)
            guard try plainIDs(conversation.beginning(first), asks: true).starts(with: prompt) else {
                throw MeSPError(
                    "the prompt for the answer in message \(first + 1) is not the beginning of the conversation in the chat template; leave it out."
                )
            }
        }
        var encoded = Encoded(tokens: whole.ids.map { UInt32($0) }, counted: counted)
        for (index, end) in additions.sorted(by: { $0.key > $1.key }) {
            encoded.tokens.insert(UInt32(end), at: index)
            encoded.counted.insert(counted[index - 1], at: index)
        }
        return encoded
    }

    // MARK: - Where texts are

    private static var rewrites: MeSPError {
        MeSPError("the chat template rewrites the messages, so an answer cannot be located; take it out.")
    }

    /// Finds each text in the unmarked rendering.
    ///
    /// - Returns: a function from a byte position in the marked rendering, outside of marks, to the position in `whole`.
    func places(of rendering: Rendering) throws -> (Int) -> Int {
        let (marked, whole) = (rendering.marked, rendering.whole)
        let (bytes, marks) = (rendering.shape.marked.text.bytes, rendering.shape.marked.marks)
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

    mutating func answers(of marked: MarkedConversation, _ shape: Rendering.Shape) throws -> [Int: Answer] {
        let (conversation, rendering) = (shape.conversation, shape.marked)
        let ends = try templateEnds()
        let isEnd = Set(ends.stops + ends.followed + [tokenizer.endOfText].compactMap { $0 })
        var answers = [Int: Answer]()
        for index in Set(conversation.trained).union(answersOnly ? [] : conversation.untrained).sorted() {
            let said = rendering.marks.filter { marked.message(of: $0.number) == index }
            guard let first = said.first else { throw Self.notFound(index) }
            let start = try start(of: index, shape, first.range.lowerBound)
            let stop = try stop(of: index, shape)
            let inside = rendering.marks.filter { $0.range.lowerBound < stop && $0.range.upperBound > start }
            // A template may also write a text elsewhere, such as a tool's name with the tool's result.
            guard start < stop, Set(inside.map(\.number)).isSuperset(of: said.map(\.number)),
                inside.allSatisfy({ marked.message(of: $0.number) == index }),
                let last = said.map(\.range.upperBound).filter({ $0 <= stop }).max()
            else { throw Self.notFound(index) }
            var answer = Answer(start: start, said: last, stop: stop)
            let tail = string(rendering.text.bytes[last..<stop]).replacing(
                /\s+\z/.matchingSemantics(.unicodeScalar), with: "")
            if tokenizer.encode(tail, addsSpecialTokens: false).last.map(isEnd.contains) != true {
                // The end token may be part of the text that opens the next message.
                if let end = endToken(beginning: rendering.text.bytes[stop...], isEnd) {
                    answer.stop += end
                } else {
                    answer.isEndless = try !goesOn(after: index, marked, shape)
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
        of index: Int, _ shape: Rendering.Shape, _ first: Int
    ) throws -> Int {
        let rendering = shape.marked
        let header: [UInt8]
        let anchor: Int
        // The first message has no prompt. Some templates throw an error for a prompt without a question.
        if index > 0, let asked = try? beginning(index, of: shape, asks: true), !asked.text.bytes.isEmpty {
            let after: Int
            (anchor, after) = Self.lastMark(rendering, asked)
            let agreed = rendering.text.agreed(from: anchor, to: first, with: asked.text, from: after)
            if after + agreed == asked.text.bytes.count { return anchor + agreed }
            let told = try beginning(index, of: shape)
            let same = told.text.agreed(from: after, with: asked.text, from: after)
            if agreed >= same { return anchor + agreed }
            header = Array(asked.text.bytes[(after + same)...])
        } else {
            let (told, asked) = try (probe(shape), probe(shape, asks: true))
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
    private mutating func stop(of index: Int, _ shape: Rendering.Shape) throws -> Int {
        let rendering = shape.marked
        guard index + 1 < shape.conversation.messages.count else { return rendering.text.bytes.count }
        let until = try beginning(index + 1, of: shape)
        let (anchor, after) = Self.lastMark(rendering, until)
        return anchor + rendering.text.agreed(from: anchor, with: until.text, from: after)
    }

    /// Adds a question if the template requires one.
    private mutating func beginning(
        _ count: Int, of shape: Rendering.Shape, asks: Bool = false
    ) throws -> Rendering.Marked {
        var beginning = shape.conversation.beginning(count)
        do { return try marked(beginning, asks: asks) } catch {
            guard !beginning.messages.contains(where: { $0.role == "user" }) else { throw error }
            let hasSystem = beginning.messages.first.map { ["system", "developer"].contains($0.role) } ?? false
            beginning.messages.insert(.user("MeSP"), at: hasSystem ? 1 : 0)
            return try marked(beginning, asks: asks)
        }
    }

    /// Finds the last mark that is in both renderings. Returns the end of this mark in each rendering; (0, 0) if there is none.
    private static func lastMark(_ whole: Rendering.Marked, _ beginning: Rendering.Marked) -> (
        whole: Int, beginning: Int
    ) {
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

    /// Returns whether the model's turn goes on after an answer: the template writes no header before the next answer, or after the results of tools.
    private mutating func goesOn(
        after index: Int, _ marked: MarkedConversation, _ shape: Rendering.Shape
    ) throws -> Bool {
        let messages = shape.conversation.messages
        let results = messages[(index + 1)...].prefix { ["tool", "function"].contains($0.role) }.count
        let count = index + 1 + results
        let isAnswered = count < messages.count && messages[count].isAnswer
        guard isAnswered || count == messages.count else { return false }
        let (quiet, loud) = (try probe(shape), try probe(shape, asks: true))
        let asks = quiet.bytes != loud.bytes
        guard isAnswered || results > 0 || asks && !messages[index].toolCalls.isEmpty else { return false }
        var header = string(
            quiet.bytes.suffix(quiet.bytes.count - (quiet.bytes.places(of: Array("MeSP".utf8)).last ?? 0) - 4))
        if asks {
            let (told, asked) = (try beginning(count, of: shape), try? beginning(count, of: shape, asks: true))
            let same = zip(told.text.bytes, asked?.text.bytes ?? []).prefix { $0 == $1 }.count
            header = string((asked?.text.bytes ?? []).dropFirst(same))
        }
        header = String(header.drop(while: \.isWhitespace))
        guard !header.isEmpty, isAnswered || !asks else { return header.isEmpty }
        let first = tokenizer.encode(header, addsSpecialTokens: false).first.flatMap { isSpecial($0) ? $0 : nil }
        let opening = first.map { tokenizer.decode([$0]) } ?? String(header.prefix { !$0.isWhitespace })
        func marks(_ message: Int) -> [Range<Int>] {
            shape.marked.marks.filter { marked.message(of: $0.number) == message }.map(\.range)
        }
        let (bytes, from) = (shape.marked.text.bytes, marks(index).map(\.upperBound).max() ?? 0)
        let to = marks(count).map(\.lowerBound).min() ?? bytes.count
        return Array(bytes[from..<max(from, to)]).places(of: Array(opening.utf8)).isEmpty
    }

    private mutating func probe(_ shape: Rendering.Shape, asks: Bool = false) throws -> DecodedText {
        var probe = shape.conversation
        probe.messages = [.user("MeSP")]
        return try marked(probe, asks: asks).text
    }

    mutating func templateEnds() throws -> TemplateEnds {
        if let knownEnds { return knownEnds }
        let turns = ["user", "assistant", "user"].enumerated().map {
            Conversation.Message(role: $1, content: MarkedConversation.mark($0))
        }
        func tail(_ count: Int, _ number: Int) throws -> [Int] {
            let rendering = try marked(Conversation(Array(turns.prefix(count))))
            guard let at = rendering.marks.firstIndex(where: { $0.number == number }) else { return [] }
            let next = at + 1 < rendering.marks.count ? rendering.marks[at + 1].range.lowerBound : nil
            let text = rendering.text.bytes[rendering.marks[at].range.upperBound..<(next ?? rendering.text.bytes.count)]
            return tokenizer.encode(string(text), addsSpecialTokens: false)
        }
        var ends: TemplateEnds = ([], [])
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
        var encoder = RecordEncoder(tokenizer: self)
        let stops = hasChatTemplate ? try? encoder.templateEnds().stops : nil
        return (stops ?? []) + [endOfText].compactMap { $0 }
    }

    /// Returns the token ids of a conversation and of the opening of an answer, by the model's chat template. A single message may be encoded as plain
    /// text, if the model or its data has no template.
    package func encode(prompt conversation: Conversation) throws -> [Int] {
        try conversation.messages.checkAreText()
        var encoder = RecordEncoder(tokenizer: self)
        if joinsTexts, conversation.messages.map(\.role) == ["user"], conversation.tools.isEmpty {
            return try encoder.plain.encode(conversation.messages[0].content, addsSpecialTokens: true)
        }
        guard hasChatTemplate else {
            throw MeSPError("The model has no chat template, which a conversation needs; take an -Instruct model.")
        }
        return try encoder.prompt(conversation)
    }
}
