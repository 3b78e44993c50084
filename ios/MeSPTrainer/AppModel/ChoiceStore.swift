import Foundation
import MeSP
import MeSPBundle
import MeSPSentences

/// The choices of a person, in a JSONL file. `mesp data --data` and TRL read the file as preference data.
struct ChoiceStore: Sendable {
    let url: URL

    /// Returns all choices, in the order in which they were added. Skips the last line if it is not a choice, because it may be incomplete.
    ///
    /// - Throws: `MeSPError` if another line is not a choice, or the file cannot be read.
    func all() throws -> [Choice] {
        guard FileManager.default.fileExists(atPath: url.path) else { return [] }
        let lines = try attempt("read") { try Data(contentsOf: url) }.split(separator: Self.lineFeed)
        let decoder = JSONDecoder()
        decoder.dateDecodingStrategy = .iso8601
        return try lines.enumerated().compactMap { index, line in
            do {
                return try decoder.decode(Choice.self, from: line)
            } catch {
                guard index == lines.count - 1 else {
                    throw MeSPError("Line \(index + 1) of \(url.lastPathComponent) is not a choice; delete that line.")
                }
                return nil
            }
        }
    }

    func append(_ choice: Choice, replacing ids: Set<Choice.ID> = []) throws {
        try write(all().filter { !ids.contains($0.id) } + [choice])
    }

    func remove(_ ids: Set<Choice.ID>) throws { try write(all().filter { !ids.contains($0.id) }) }

    private static let lineFeed = UInt8(ascii: "\n")

    /// Replaces the file atomically. Removes the file if there are no choices.
    private func write(_ choices: [Choice]) throws {
        let encoder = JSONEncoder()
        encoder.dateEncodingStrategy = .iso8601
        encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
        try attempt("written") {
            if choices.isEmpty {
                try? FileManager.default.removeItem(at: url)
                return
            }
            let lines = try choices.map { try encoder.encode($0) + Data([Self.lineFeed]) }
            try Data(lines.joined()).write(to: url, options: .atomic)
        }
    }

    private func attempt<R>(_ what: Sentence, _ body: () throws -> R) throws -> R {
        do { return try body() } catch let error as MeSPError { throw error } catch {
            throw MeSPError("\(url.path) cannot be \(what): \(error.plainSentence).")
        }
    }
}
