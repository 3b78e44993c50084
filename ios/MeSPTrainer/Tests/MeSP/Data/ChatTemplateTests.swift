import Foundation
import MLX
import MeSPFiles
import MeSPSentences
import Testing

@testable import MeSP
@testable import MeSPBundle
@testable import MeSPCore

@Suite(.enabled(if: PythonTemplates.python != nil, "it takes MESP_PYTHON, which make sets")) struct ChatTemplateTests {
    private static let preference = "a preference, which the app does not train of files"
    private typealias Answer = PythonTemplates.Case.Answer

    private let folder = newFolder()
    private var file: URL { folder.appendingPathComponent("a.jsonl") }

    private func read(
        _ source: @autoclosure () throws -> TextData.Source, _ python: PythonTemplates, _ each: PythonTemplates.Case
    ) -> Result<[Answer], MeSPError> {
        do {
            let source = try source()
            let data = TextData(tokenizer: python, length: 1 << 14, answersOnly: each.lossOn == "answers")
            guard each.kind == "a pair of answers" else {
                let example = try data.first(of: source).example
                var found = answer(example.tokens.map { Int($0) }, example.counted)
                if let images = example.images {
                    var places = [Int](repeating: 0, count: found.ids.count)
                    for (position, row) in zip(images.positions, images.rows) { places[position] = row + 1 }
                    found = Answer(ids: found.ids, counted: found.counted, places: places)
                }
                return .success([found])
            }
            let target = folder.appendingPathComponent("tokens")
            try data.write(source, to: target)
            let ids = try ["train", "valid"].map { split in
                try Data(contentsOf: target.appendingPathComponent("\(split).bin")).withUnsafeBytes { bytes in
                    (0..<bytes.count / 4).map { Int(bytes.loadUnaligned(fromByteOffset: $0 * 4, as: UInt32.self)) }
                }
            }
            let mask = try Data(contentsOf: target.appendingPathComponent("train.mask.bin")).map { $0 == 1 }
            let bounds = try Data(contentsOf: target.appendingPathComponent("train.examples.bin")).withUnsafeBytes {
                $0.loadUnaligned(fromByteOffset: 8, as: UInt32.self)
            }
            let border = Int(bounds)
            let marked = mask.indices.filter { mask[$0] }
            return .success([
                answer(Array(ids[0][..<border]), marked.filter { $0 < border }.map { $0 - 1 }),
                answer(Array(ids[0][border...]), marked.filter { $0 >= border }.map { $0 - border - 1 }),
            ])
        } catch {
            return .failure(error as? MeSPError ?? MeSPError("\(error.plainSentence)"))
        }
    }

    private func answer(_ ids: [Int], _ counted: [Int]) -> Answer {
        let those = Set(counted.map { $0 + 1 })
        return Answer(ids: ids, counted: ids.indices.map { $0 > 0 && those.contains($0) }, places: nil)
    }

    private func source(_ each: PythonTemplates.Case) throws -> TextData.Source {
        try file.write("\(each.record)\n")
        if let images = each.images {
            var conversation = try JSONDecoder().decode(Conversation.self, from: Data(each.record.utf8))
            for (index, names) in images.enumerated() {
                conversation.messages[index].images = try names.map { name in
                    let text = name == "a" ? "<|end|>##\n#" : "# tile #"
                    return try ImageFeatures(
                        text: text.replacing("#", with: "<|image|>"),
                        rows: MLXArray.zeros([text.count { $0 == "#" }, 2]), token: "<|image|>")
                }
            }
            return .conversations([conversation])
        }
        guard each.kind == "a pair of answers" else { return .file(file) }
        var fields = try JSONValue(json: each.record.utf8).fields ?? [:]
        fields["id"] = .string(UUID().uuidString)
        fields["date"] = .number(0)
        let choice = try JSONDecoder().decode(Choice.self, from: Data(JSONValue.object(fields).json.utf8))
        return .choices([choice, choice])
    }

    @Test func tokensAndLossAreThoseOfTheExporter() throws {
        let python = try PythonTemplates()
        var counts = [String: Int]()
        var withCalls = 0
        while let each = try python.next() {
            let comment = Comment(rawValue: "\(each.template): \(each.record)")
            let outcome: String
            switch (read(try source(each), python, each), each.answers) {
            case (.success(let found), let expected?):
                // The first token is never in the loss.
                let expected = expected.map {
                    Answer(ids: $0.ids, counted: [false] + $0.counted.dropFirst(), places: $0.places)
                }
                outcome = found == expected ? "equal" : "differ"
                if each.record.contains("tool_calls") { withCalls += 1 }
                #expect(found.map(\.ids) == expected.map(\.ids), comment)
                #expect(found.map(\.counted) == expected.map(\.counted), comment)
                #expect(found.map(\.places) == expected.map(\.places), comment)
                if found.contains(where: { $0.places != nil }) { counts["with images", default: 0] += 1 }
                guard each.kind == "a conversation", each.images == nil else { break }
                // Conversations that were encoded and decoded as JSON give the same tokens.
                let typed = try Conversation.read(contentsOf: file)
                let reread = try JSONDecoder().decode([Conversation].self, from: JSONEncoder().encode(typed))
                #expect(try read(.conversations(reread), python, each).get() == found, comment)
            case (.failure(let error), nil):
                outcome = each.unread?.isEmpty == false ? "unread" : "refused"
                let said = error.sentence.english
                if said.contains(Self.preference) { break }
                let names = said.split(separator: "\"").enumerated().filter { $0.offset % 2 == 1 }
                let unread = said.contains("which nothing reads") ? Set(names.map { String($0.element) }) : []
                if each.refused?.contains("which nothing reads") == true {
                    #expect(unread == Set(each.unread ?? []), "\(said): \(comment)")
                }
            case (.failure(let error), let expected?):
                let said = error.sentence.english
                let isKnown =
                    !expected.contains { $0.counted.contains(true) } || each.record.contains("reasoning_content")
                    || said.contains(Self.preference)
                outcome = isKnown ? "not read" : "refused here"
                #expect(isKnown, "\(said): \(comment)")
            case (.success, nil) where each.refused?.contains("which the chat template does not read") == true:
                // The app cannot see the template. It takes only the variables of the bundle, which the exporter has checked.
                outcome = "taken with a variable"
            case (.success, nil):
                outcome = "taken here"
                Issue.record("\(each.refused ?? ""): \(comment)")
            }
            counts["\(each.kind ?? "") \(outcome)", default: 0] += 1
        }
        print("Records, \(withCalls) of those taken with tool calls: \(counts.sorted { $0.key < $1.key })")
        #expect(
            counts["a conversation equal", default: 0] > 300 && counts[" unread", default: 0] > 50 && withCalls > 50)
        #expect(counts["with images", default: 0] > 10)
        #expect(counts["a text equal", default: 0] > 5 && counts["a pair of answers equal", default: 0] > 5)
    }
}
