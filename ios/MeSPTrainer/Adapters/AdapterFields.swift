import Foundation
import MeSPFiles
import MeSPSentences

/// The fields that an adapter_config.json may have. exporter/mesp/adapters/fields.json lists and explains them. `json` in AdapterFieldsTable.swift is
/// generated from it.
struct AdapterFields: Decodable {
    let used: Set<String>
    let ignored: Set<String>
    let required: [String: Set<JSONValue>]

    struct Tables: Decodable {
        let peft, mlx, loraParameters: AdapterFields
    }

    static func all() throws -> Tables { try JSONDecoder.snakeCase.decode(Tables.self, from: Data(json.utf8)) }

    func check(_ config: [String: JSONValue]) throws {
        let found = config.sorted { $0.key < $1.key }.first { key, value in
            !used.contains(key) && !ignored.contains(key) && !(required[key] ?? [.null]).contains(value)
        }
        guard let (key, value) = found else { return }
        throw AdapterFormat.unsupported(value.string.map { "\(key) \"\($0)\"" } ?? key)
    }
}
