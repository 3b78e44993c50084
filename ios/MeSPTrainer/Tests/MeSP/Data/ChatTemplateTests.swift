import Foundation
import MeSPSentences
import Testing

@testable import MeSP
@testable import MeSPBundle
@testable import MeSPCore

/// Compares the tokens of conversations, many of them with tools, with those of the exporter. Python renders the chat templates for both.
@Suite(.enabled(if: PythonTemplates.python != nil, "it takes MESP_PYTHON, which make sets")) struct ChatTemplateTests {
    private struct Found: Equatable {
        var ids: [Int]
        var counted: [Bool]

        /// The first token is never in the loss, so its flag is set to false.
        init(_ ids: [Int], _ counted: [Bool]) { (self.ids, self.counted) = (ids, [false] + counted.dropFirst()) }
    }

    private func first(
        _ source: TextData.Source, _ tokenizer: any TextTokenizer, answersOnly: Bool
    ) -> Result<Found, MeSPError> {
        do {
            let data = TextData(tokenizer: tokenizer, length: 1 << 14, answersOnly: answersOnly)
            let example = try data.first(of: source).example
            var counted = [Bool](repeating: false, count: example.tokens.count)
            for index in example.counted { counted[index + 1] = true }
            return .success(Found(example.tokens.map { Int($0) }, counted))
        } catch {
            return .failure(error as? MeSPError ?? MeSPError("\(error.plainSentence)"))
        }
    }

    @Test func tokensAndLossAreThoseOfTheExporter() throws {
        let folder = temporaryFolder()
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(at: folder) }
        let file = folder.appendingPathComponent("a.jsonl")
        let python = try PythonTemplates()
        // The number of records by outcome.
        var counts = [String: Int]()
        var withCalls = 0
        while let each = try python.next() {
            try Data("\(each.record)\n".utf8).write(to: file)
            let found = first(.file(file), python, answersOnly: each.lossOn == "answers")
            let expected = each.ids.map { Found($0, each.counted ?? []) }
            let outcome: String
            switch (found, expected) {
            case (.success(let found), let expected?):
                outcome = found == expected ? "equal" : "differ"
                if each.record.contains("tool_calls") { withCalls += 1 }
                #expect(found.ids == expected.ids, "\(each.template): \(each.record)")
                #expect(found.counted == expected.counted, "\(each.template): \(each.record)")
                // Conversations that were encoded and decoded as JSON give the same tokens.
                let typed = try Conversation.read(contentsOf: file)
                let reread = try JSONDecoder().decode([Conversation].self, from: JSONEncoder().encode(typed))
                let same = first(.conversations(reread), python, answersOnly: each.lossOn == "answers")
                #expect(try same.get() == found, "\(each.template): \(each.record)")
            case (.failure, nil): outcome = "refused"
            case (.failure(let error), let expected?):
                let isKnown = !expected.counted.contains(true) || each.record.contains("reasoning_content")
                outcome = isKnown ? "not read" : "refused here"
                #expect(isKnown, "\(each.template): \(error.sentence.english): \(each.record)")
            case (.success, nil):
                outcome = "taken here"
                Issue.record("\(each.template): \(each.refused ?? ""): \(each.record)")
            }
            counts[outcome, default: 0] += 1
        }
        print("Conversations, \(withCalls) of those taken with tool calls: \(counts)")
        #expect(counts["equal", default: 0] > 200 && counts["refused", default: 0] > 50 && withCalls > 50)
    }
}
