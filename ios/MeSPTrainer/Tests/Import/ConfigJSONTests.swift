import Foundation
import MeSPFiles
import MeSPSentences
import Testing

@testable import MeSPImport

@Suite struct ConfigJSONTests {
    private struct Answers: Decodable {
        struct Answer: Decodable {
            let architecture: JSONValue
            let config: JSONValue
        }
        let config: JSONValue
        let answer: Answer?
    }

    private static let answers: [Answers] = {
        guard let path = ProcessInfo.processInfo.environment["MESP_FIXTURES"],
            let data = try? Data(contentsOf: URL(fileURLWithPath: "\(path)/tied-32/configurations.json"))
        else { return [] }
        return (try? JSONDecoder().decode([Answers].self, from: data)) ?? []
    }()

    private func read(_ config: [String: JSONValue]) throws -> ConfigJSON {
        try ConfigJSON(config, of: "model", source: "model")
    }

    @Test func aConfigurationIsReadAsTheExporterReadsIt() throws {
        #expect(Self.answers.count >= 400)
        for each in Self.answers {
            let given = try #require(each.config.object)
            do {
                let config = try read(given)
                let entry = try config.architecture(length: 24).entry
                let expected = try #require(each.answer, "the exporter refuses \(each.config.json)")
                #expect(isClose(entry, expected.architecture), "\(each.config.json)")
                #expect(isClose(.object(config.fields), expected.config), "\(each.config.json)")
            } catch let error as MeSPError {
                #expect(each.answer == nil, "\(error.sentence.english) \(each.config.json)")
            }
        }
    }

    @Test func noNumberStopsTheProcess() throws {
        let numbers: [JSONValue] = [
            .integer(0), .integer(-1), .integer(3), .integer(1 << 22), .integer(1 << 31), .integer(.max),
            .integer(.min), .number(0.5), .number(-1e308), .number(1e308), .number(1e-308),
        ]
        var tried = Set<JSONValue>()
        for each in Self.answers {
            let given = try #require(each.config.object)
            guard tried.insert(given["model_type"] ?? .null).inserted else { continue }
            let quantization = ["quantization": JSONValue.object(["bits": .integer(4), "group_size": .integer(32)])]
            for changed in changes(given, numbers) {
                let json = Data(JSONValue.object(changed.merging(quantization) { $1 }).json.utf8)
                _ = try? ModelImport.manifest(config: json, card: nil, of: "model", revision: nil)
            }
        }
    }

    private func changes(_ fields: [String: JSONValue], _ numbers: [JSONValue]) -> [[String: JSONValue]] {
        fields.flatMap { key, value -> [[String: JSONValue]] in
            switch value {
            case .integer, .number, .null: numbers.map { fields.merging([key: $0]) { $1 } }
            case .object(let inner): changes(inner, numbers).map { fields.merging([key: .object($0)]) { $1 } }
            default: []
            }
        }
    }

    private func isClose(_ one: JSONValue, _ other: JSONValue) -> Bool {
        if let a = one.double, let b = other.double { return abs(a - b) <= 1e-12 * max(abs(a), abs(b)) }
        switch (one, other) {
        case (.array(let a), .array(let b)): return a.count == b.count && zip(a, b).allSatisfy { isClose($0, $1) }
        case (.object(let a), .object(let b)):
            return a.keys == b.keys && a.allSatisfy { key, value in b[key].map { isClose(value, $0) } ?? false }
        default: return one == other
        }
    }
}
