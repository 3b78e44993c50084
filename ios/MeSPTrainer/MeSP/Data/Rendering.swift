import MeSPBundle
import MeSPFiles
import MeSPSentences

/// A conversation in the chat template: its tokens, and the same text with a mark in place of each text of a message (`MarkedConversation`).
///
/// The marks show where each text is, and whether the template drops a text.
struct Rendering {
    struct Shape {
        var conversation: Conversation
        var marked: Marked
        var answers = [Int: Answer]()
        var fault: MeSPError?
        /// The error if the template leaves out something besides the marked texts; nil if it does not.
        var lost: MeSPError?
        var writesNames = true
    }

    struct Marked {
        let text: DecodedText
        let marks: [(number: Int, range: Range<Int>)]

        init(_ text: DecodedText) { (self.text, marks) = (text, MarkedConversation.marks(in: text.bytes)) }
    }

    let conversation: Conversation
    let marked: MarkedConversation
    let shape: Shape
    let whole: DecodedText
}

extension RecordEncoder {
    /// Renders a conversation.
    ///
    /// - Throws: `MeSPError` if the template refuses the conversation, or leaves out a part of it.
    mutating func render(_ conversation: Conversation) throws -> Rendering {
        for message in conversation.trained.map({ conversation.messages[$0] })
        where message.toolCalls.isEmpty && message.content.isBlank {
            throw Fields.emptyAnswer
        }
        guard conversation.messages.allSatisfy({ !$0.isAnswer || $0.images.isEmpty }) else {
            throw MeSPError("an answer has an image, which no model here writes; put it into a message of the user.")
        }
        let marked = try MarkedConversation(conversation)
        let shape = try shape(of: marked)
        try check(marked, shape)
        var conversation = conversation
        conversation.argumentsAreText = shape.conversation.argumentsAreText
        let ids = try plainIDs(conversation)
        return Rendering(conversation: conversation, marked: marked, shape: shape, whole: decoded(ids))
    }

    mutating func prompt(_ conversation: Conversation) throws -> [Int] {
        var asked = conversation
        asked.prompt = asked.messages.count
        let rendering = try render(asked)
        _ = try places(of: rendering)
        return try plainIDs(rendering.conversation, asks: true)
    }

    // MARK: - What the template writes

    mutating func decoded(_ ids: [Int]) -> DecodedText { DecodedText(ids, tokenizer, pieces: &pieces) }

    mutating func plainIDs(_ conversation: Conversation, asks: Bool = false) throws -> [Int] {
        try Self.render { try plain.encode(conversation, addsGenerationPrompt: asks) }
    }

    mutating func marked(_ conversation: Conversation, asks: Bool = false) throws -> Rendering.Marked {
        let ids = try Self.render { try conversation.applied(to: tokenizer, addsGenerationPrompt: asks) }
        return Rendering.Marked(decoded(ids))
    }

    private static func render(_ body: () throws -> [Int]) throws -> [Int] {
        do { return try body() } catch let error as MeSPError {
            throw error
        } catch {
            throw MeSPError("the chat template refuses it (\(error.plainSentence)); change its messages to fit.")
        }
    }

    private mutating func shape(of marked: MarkedConversation) throws -> Rendering.Shape {
        var conversation = marked.conversation
        if let known = shapes[conversation] { return known }
        var shape: Rendering.Shape
        do { shape = Rendering.Shape(conversation: conversation, marked: try self.marked(conversation)) } catch {
            conversation.argumentsAreText = true
            guard conversation.messages.contains(where: { !$0.toolCalls.isEmpty }),
                let rendering = try? self.marked(conversation)
            else { throw error }
            shape = Rendering.Shape(conversation: conversation, marked: rendering)
        }
        shape.lost = try lost(shape)
        if !conversation.names.isEmpty {
            var unnamed = conversation
            for index in unnamed.messages.indices { unnamed.messages[index].name = nil }
            let ids = try self.marked(unnamed).text.ids
            shape.writesNames = ids != shape.marked.text.ids
        }
        do { shape.answers = try answers(of: marked, shape) } catch let error as MeSPError {
            // If all tokens are trained, answers need not be located.
            if answersOnly || !conversation.untrained.isEmpty { shape.fault = error }
        }
        if shapes.count >= 256 { shapes = [:] }
        shapes[marked.conversation] = shape
        return shape
    }

    // MARK: - What the template leaves out

    /// Checks that the template writes each text, tool and value. The template may leave out the thoughts of answers before the last question, and of
    /// answers that are not trained.
    ///
    /// - Throws: `MeSPError` if the template leaves out anything else.
    private mutating func check(_ marked: MarkedConversation, _ shape: Rendering.Shape) throws {
        let seen = Set(shape.marked.marks.map(\.number))
        let conversation = marked.conversation
        let question = conversation.messages.lastIndex { $0.role == "user" } ?? -1
        let trained = conversation.trained
        for (number, text) in marked.texts.enumerated() where !seen.contains(number) {
            let role = conversation.messages[text.message].role
            if text.kind == .thought, role == "assistant", text.message < question || !trained.contains(text.message) {
                notices.dropsThoughts = true
                continue
            }
            let remedy: Sentence =
                switch role {
                case "system": "write it at the beginning of the user's message"
                case "developer": "write it as a system message or at the beginning of the user's"
                case "assistant": "take a model whose template writes it, or write it into the content"
                default: "write it as a user's message"
                }
            throw MeSPError(
                "the chat template leaves out the \(text.kind.sentence) of message \(text.message + 1), of the role \(role) (\(Self.short(text.text))): \(remedy)."
            )
        }
        if let lost = shape.lost { throw lost }
        // The name of a tool that is called is in the call.
        let called = Set(marked.texts.filter { $0.kind == .call }.map(\.text))
        if !shape.writesNames, !called.isSuperset(of: conversation.names) { try LeftFields(unread: ["name"]).check() }
    }

    private static func short(_ text: String) -> String {
        let text = text.split(whereSeparator: \.isWhitespace).joined(separator: " ")
        return JSONValue.string(text.count > 30 ? "\(text.prefix(29))…" : text).json
    }

    /// Returns the error if the template leaves out a tool or a value in a tool call, or if a special token is where it cannot be text.
    private mutating func lost(_ shape: Rendering.Shape) throws -> MeSPError? {
        let conversation = shape.conversation
        let tools = try conversation.tools.map { try JSONValue.object(text: $0) }
        for key in tools.isEmpty ? [] : ["name", "description"] {
            var changed = conversation
            for (number, tool) in tools.enumerated() {
                let mark = [key: JSONValue.string(MarkedConversation.mark(number))]
                let function = tool["function"]?.fields.map { ["function": .object($0.merging(mark) { $1 })] } ?? mark
                changed.tools[number] = JSONValue.object(tool.merging(function) { $1 }).json
            }
            // Tools and texts can have marks with the same number, so the marks of each number are counted.
            let (before, after) = (shape.marked.marks, try marked(changed).marks)
            for (number, tool) in tools.enumerated() {
                let given = (tool["function"]?.fields ?? tool)[key]?.string ?? ""
                guard !given.isEmpty,
                    before.count(where: { $0.number == number }) == after.count(where: { $0.number == number })
                else { continue }
                return MeSPError(
                    "the chat template leaves out the tools, such as \(Self.short(given)): take a model whose template has them, or leave them out."
                )
            }
        }
        for (message, value, changed) in try conversation.otherValues
        where try self.marked(changed).text.ids == shape.marked.text.ids {
            return MeSPError(
                "the chat template leaves out \(value.json) in a tool call of message \(message + 1): take a model whose template has tool calls."
            )
        }
        for text in conversation.besideTexts {
            if let special = plain.special(in: text) {
                return MeSPError(
                    "it has the special token \(special) outside of its texts, for example in its tools, where it stays special; take it out."
                )
            }
        }
        return nil
    }
}

extension Conversation {
    fileprivate var names: [String] { messages.compactMap(\.name).filter { !$0.isEmpty } }
}

extension Conversation.TextKind {
    fileprivate var sentence: Sentence {
        switch self {
        case .content: "content"
        case .thought: "reasoning"
        case .call: "tool call"
        case .argument: "arguments of a tool call"
        }
    }
}

// MARK: - What the template is given

extension Conversation {
    package func applied(to tokenizer: any TextTokenizer, addsGenerationPrompt: Bool) throws -> [Int] {
        let trained = TrainedTokenizer(tokenizer)
        let options = try trained.options(of: self)
        let inParts = trained.takesPartsAlone || messages.contains { !$0.images.isEmpty }
        return try trained.tokenizer.applyChatTemplate(
            messages: messages.map { try $0.templateFields(argumentsAreText, inParts: inParts) },
            tools: tools.isEmpty
                ? nil : tools.map { try JSONValue.object(text: $0).mapValues { try $0.templateValue() } },
            addsGenerationPrompt: addsGenerationPrompt, options: options.mapValues { try $0.templateValue() })
    }
}

extension Conversation.Message {
    fileprivate func templateFields(_ argumentsAreText: Bool, inParts: Bool) throws -> [String: any Sendable] {
        var fields = json.fields ?? [:]
        fields["weight"] = nil
        if inParts {
            let text: JSONValue = .object(["type": .string("text"), "text": .string(content)])
            fields["content"] = .array(
                images.map { _ in .object(["type": .string("image")]) }
                    + (content.isEmpty && !images.isEmpty ? [] : [text]))
        }
        if !toolCalls.isEmpty {
            fields["tool_calls"] = .array(
                try toolCalls.map { call in
                    let object = JSONValue.object(try JSONValue.object(text: call.arguments))
                    return call.json(arguments: argumentsAreText ? .string(object.json) : object)
                })
        }
        return try fields.mapValues { try $0.templateValue() }
    }
}

extension JSONValue {
    static func object(text: String) throws -> [String: JSONValue] {
        guard case .object(let fields) = try? JSONValue(json: text.utf8) else {
            throw MeSPError("a tool, or the arguments of a call, are not a JSON object; write one.")
        }
        return fields
    }

    /// Returns the value as an argument for chat templates.
    ///
    /// - Throws: `MeSPError` for a number that is too large, or for JSON that is nested too deeply.
    func templateValue() throws -> any Sendable {
        switch self {
        case .null: return String?.none
        case .bool(let truth): return truth
        case .integer(let number): return number
        case .number(let number):
            guard abs(number) < 0x1p63 else {
                throw MeSPError(
                    "a tool, or the arguments of a call, have a number that is too large; write a smaller one.")
            }
            return number
        case .string(let text): return text
        case .array(let values): return try values.map { try $0.templateValue() } as [any Sendable]
        case .object(let fields): return try fields.mapValues { try $0.templateValue() }
        case .deep: throw MeSPError("a tool, or the arguments of a call, are nested too deep; write them flatter.")
        }
    }

    /// Returns the value with changed strings. `change` is called in a fixed order.
    func mapStrings(_ change: (String) throws -> String) rethrows -> JSONValue {
        switch self {
        case .string(let text): return .string(try change(text))
        case .array(let values): return .array(try values.map { try $0.mapStrings(change) })
        case .object(let fields):
            let changed = try fields.sorted { $0.key < $1.key }.map { ($0.key, try $0.value.mapStrings(change)) }
            return .object(Dictionary(uniqueKeysWithValues: changed))
        default: return self
        }
    }
}
