import Foundation
import MeSP
import MeSPBundle
import MeSPFiles
import MeSPSentences
import Testing

final class PythonTemplates: TextTokenizer, @unchecked Sendable {
    static let python = ProcessInfo.processInfo.environment["MESP_PYTHON"]

    struct Case: Decodable {
        struct Answer: Decodable, Equatable {
            let ids: [Int]
            let counted: [Bool]
            let places: [Int]?
        }

        let template: String
        let record: String
        let lossOn: String
        /// The images of the first messages, a letter each.
        let images: [String]?
        let refused: String?
        let unread: [String]?
        let kind: String?
        let answers: [Answer]?
        let begin: Int?
        let end: Int?
        let special: Set<Int>
    }

    private let process = Process()
    private let input = Pipe()
    private let output = Pipe()
    private let lock = NSLock()
    private var rest = Data()
    private var current: Case?
    private var decoded = [[Int]: String]()
    private var encoded = [String: [Int]]()

    init() throws {
        let tests = URL(fileURLWithPath: #filePath).appendingPathComponent("../../../../../tests").standardized
        process.executableURL = URL(fileURLWithPath: try #require(Self.python))
        process.arguments = [tests.appendingPathComponent("helpers/chat_template_server.py").path]
        var environment = ProcessInfo.processInfo.environment
        environment["PYTHONPATH"] = [tests.path, environment["PYTHONPATH"]].compactMap { $0 }.joined(separator: ":")
        process.environment = environment
        (process.standardInput, process.standardOutput) = (input, output)
        try process.run()
    }

    deinit { try? input.fileHandleForWriting.close() }

    func next() throws -> Case? {
        let line = try ask(["do": "next"])
        let decoder = JSONDecoder()
        guard line.count > 3 else { return nil }
        let next = try decoder.decode(Case.self, from: line)
        lock.withLock {
            if next.template != current?.template { (decoded, encoded) = ([:], [:]) }
            current = next
        }
        return next
    }

    private func ask(_ question: [String: Any]) throws -> Data {
        try lock.withLock {
            try input.fileHandleForWriting.write(contentsOf: Data("\(try JSONValue(template: question).json)\n".utf8))
            while true {
                if let end = rest.firstIndex(of: UInt8(ascii: "\n")) {
                    defer { rest = Data(rest[(end + 1)...]) }
                    return Data(rest[..<end])
                }
                let more = output.fileHandleForReading.availableData
                guard !more.isEmpty else { throw MeSPError("Python has ended.") }
                rest += more
            }
        }
    }

    private struct Answer<Value: Decodable>: Decodable {
        let value: Value?
        let error: String?
    }

    private struct Refused: Error, CustomStringConvertible { let description: String }

    private func value<Value: Decodable>(_ question: [String: Any]) throws -> Value {
        let answer = try JSONDecoder().decode(Answer<Value>.self, from: ask(question))
        guard let value = answer.value else { throw Refused(description: answer.error ?? "") }
        return value
    }

    var beginOfText: Int? { current?.begin }
    var endOfText: Int? { current?.end }
    let hasChatTemplate = true

    func isSpecial(_ token: Int) -> Bool { current?.special.contains(token) ?? false }

    func encode(_ text: String, addsSpecialTokens: Bool) -> [Int] {
        if let known = lock.withLock({ encoded[text] }), !addsSpecialTokens { return known }
        let ids: [Int]
        do {
            ids = try value(["do": "encode", "text": text, "addsSpecialTokens": addsSpecialTokens])
        } catch { preconditionFailure("\(error)") }
        if !addsSpecialTokens { lock.withLock { encoded[text] = ids } }
        return ids
    }

    func decode(_ tokens: [Int]) -> String {
        if let known = lock.withLock({ decoded[tokens] }) { return known }
        let text: String
        do { text = try value(["do": "decode", "ids": tokens]) } catch { preconditionFailure("\(error)") }
        lock.withLock { decoded[tokens] = text }
        return text
    }

    func applyChatTemplate(
        messages: [[String: any Sendable]], tools: [[String: any Sendable]]?, addsGenerationPrompt: Bool,
        options: [String: any Sendable]
    ) throws -> [Int] {
        var question: [String: Any] = [
            "do": "apply", "messages": messages, "addsGenerationPrompt": addsGenerationPrompt, "options": options,
        ]
        question["tools"] = tools
        return try value(question)
    }
}

extension JSONValue {
    init(template value: Any) throws {
        switch value {
        case let text as String: self = .string(text)
        case let truth as Bool: self = .bool(truth)
        case let number as Int: self = .integer(number)
        case let number as Double: self = .number(number)
        case let values as [Any]: self = .array(try values.map(JSONValue.init(template:)))
        case let fields as [String: Any]: self = .object(try fields.mapValues(JSONValue.init(template:)))
        default:
            guard Mirror(reflecting: value).displayStyle == .optional else {
                throw MeSPError("A template gets a value that JSON has not.")
            }
            self = .null
        }
    }
}
