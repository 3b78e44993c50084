import Foundation
import MeSPFiles

/// A conversation with a mark in place of each text. The marks locate the texts in the output of a chat template.
struct MarkedConversation {
    struct Text {
        let message: Int
        let kind: Conversation.TextKind
        let text: String
    }

    private(set) var conversation = Conversation([])
    private(set) var texts = [Text]()

    init(_ original: Conversation) throws {
        var texts = [Text]()
        conversation = try original.mapTexts { message, kind, text in
            let ends = Self.ends(of: text)
            guard !ends.isEmpty else { return text }
            texts.append(Text(message: message, kind: kind, text: String(text[ends])))
            return text[..<ends.lowerBound] + Self.mark(texts.count - 1) + text[ends.upperBound...]
        }
        self.texts = texts
    }

    func message(of number: Int) -> Int? { texts.indices.contains(number) ? texts[number].message : nil }

    static func mark(_ number: Int) -> String {
        let digits = String(number)
        return "Mk\(String(repeating: "0", count: max(0, 4 - digits.count)))\(digits)yQ"
    }

    static func marks(in bytes: [UInt8]) -> [(number: Int, range: Range<Int>)] {
        bytes.places(of: Array("Mk".utf8)).compactMap { start in
            let digits = bytes[(start + 2)...].prefix { (0x30...0x39).contains($0) }
            let end = start + 2 + digits.count + 2
            guard digits.count >= 4, end <= bytes.count, bytes[(end - 2)..<end].elementsEqual("yQ".utf8),
                let number = Int(String(decoding: digits, as: UTF8.self))
            else { return nil }
            return (number, start..<end)
        }
    }

    /// Returns the range of a text without white space at its ends and without final flags such as `/no_think`. A template may leave these out.
    private static func ends(of text: String) -> Range<String.Index> {
        let scalars = text.unicodeScalars
        let start = scalars.firstIndex { !$0.properties.isWhitespace } ?? scalars.endIndex
        var end = scalars.endIndex
        while end > start {
            let rest = text[start..<end]
            if let last = rest.unicodeScalars.last, last.properties.isWhitespace {
                scalars.formIndex(before: &end)
            } else if let flag = ["/no_think", "/nothink", "/think"].first(where: rest.hasSuffix) {
                end = scalars.index(end, offsetBy: -flag.count)
            } else {
                break
            }
        }
        return start..<end
    }

    /// Returns the forms in which templates write a text: unchanged, escaped as in JSON, and escaped as in Python strings.
    static func forms(_ text: String) -> [String] {
        let json = [false, true].map { JSONValue.escaped(text, inASCII: $0) }
        // Foundation, and so swift-jinja, writes a slash in JSON as \/.
        return [text] + json + json.map { $0.replacingOccurrences(of: "/", with: "\\/") } + inPython(text)
    }

    private static func inPython(_ text: String) -> [String] {
        let escaped = text.unicodeScalars.reduce(into: "") { result, scalar in
            switch scalar {
            case "\\": result += "\\\\"
            case "\n": result += "\\n"
            case "\r": result += "\\r"
            case "\t": result += "\\t"
            case _ where scalar.isPrinted: result.unicodeScalars.append(scalar)
            default:
                let digits = String(scalar.value, radix: 16)
                let (letter, count) = scalar.value < 0x100 ? ("x", 2) : scalar.value < 0x10000 ? ("u", 4) : ("U", 8)
                result += "\\\(letter)\(String(repeating: "0", count: count - digits.count))\(digits)"
            }
        }
        return [escaped, escaped.replacingOccurrences(of: "'", with: "\\'")]
    }
}

extension Conversation {
    enum TextKind: Sendable { case content, thought, call, argument }

    /// Returns the conversation with changed texts. The texts are the contents of messages except the tags around thoughts, the names in tool calls,
    /// and the strings in their arguments. `change` receives the index of the message, the kind and the text.
    func mapTexts(_ change: (Int, TextKind, String) throws -> String) throws -> Conversation {
        var changed = self
        for (index, message) in messages.enumerated() {
            changed.messages[index].images = message.images.map { _ in .any }
            let parts = message.isAnswer ? Self.parts(message.content) : [message.content]
            changed.messages[index].content = try parts.enumerated().map { at, part in
                guard at % 2 == 0 else { return part }
                let before = at > 0 ? parts[at - 1] : "<think>"
                let isThought = before == "<think>" && at + 1 < parts.count && parts[at + 1] == "</think>"
                return try change(index, isThought ? .thought : .content, part)
            }.joined()
            for (number, call) in message.toolCalls.enumerated() {
                let name = try change(index, .call, call.name)
                let arguments = try JSONValue.object(JSONValue.object(text: call.arguments))
                    .mapStrings { try change(index, .argument, $0) }
                changed.messages[index].toolCalls[number] = Conversation.ToolCall(
                    name: name, arguments: arguments.json, id: call.id)
            }
        }
        return changed
    }

    /// Splits an answer at the tags around thoughts. Texts and tags alternate.
    private static func parts(_ content: String) -> [String] {
        var (parts, rest) = ([String](), content[...])
        while let tag = ["<think>", "</think>"].compactMap({ rest.range(of: $0) }).min(by: {
            $0.lowerBound < $1.lowerBound
        }) {
            parts += [String(rest[..<tag.lowerBound]), String(rest[tag])]
            rest = rest[tag.upperBound...]
        }
        return parts + [String(rest)]
    }

    /// The strings that are not among the marked texts: tools, options, names, identifiers, and the JSON text of tool calls' arguments.
    var besideTexts: [String] {
        let calls = messages.flatMap(\.toolCalls)
        return tools + [JSONValue.object(options).json] + messages.compactMap(\.name)
            + messages.compactMap(\.toolCallID) + calls.map(\.arguments)
            + calls.compactMap(\.id)
    }

    /// The values in tool calls that no mark replaces: nulls, numbers, Booleans and blank strings. Each comes with a copy of the conversation in which only
    /// this value is changed.
    var otherValues: [(message: Int, value: JSONValue, conversation: Conversation)] {
        get throws {
            try messages.enumerated().flatMap { index, message in
                try message.toolCalls.enumerated().flatMap { number, call in
                    try JSONValue.object(JSONValue.object(text: call.arguments)).changes.map { value, arguments in
                        var changed = self
                        changed.messages[index].toolCalls[number].arguments = arguments.json
                        return (index, value, changed)
                    }
                }
            }
        }
    }
}

extension JSONValue {
    fileprivate var changes: [(value: JSONValue, changed: JSONValue)] {
        switch self {
        case .object(let fields):
            fields.sorted { $0.key < $1.key }.flatMap { key, each in
                each.changes.map { ($0, .object(fields.merging([key: $1]) { $1 })) }
            }
        case .array(let values):
            values.indices.flatMap { index in
                values[index].changes.map { value, changed in
                    var others = values
                    others[index] = changed
                    return (value, .array(others))
                }
            }
        case .bool(let truth): [(self, .bool(!truth))]
        case .integer(let number): [(self, .integer(number == .max ? 0 : number + 1))]
        case .number(let number): [(self, .number(number + 1))]
        case .null: [(self, .string("MeSP"))]
        case .string(let text) where text.isBlank: [(self, .string("\(text)MeSP"))]
        case .string, .deep: []
        }
    }
}
