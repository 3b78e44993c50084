import Foundation
import MeSPFiles
import MeSPSentences

/// What an adapter_config.json may hold: exporter/mesp/adapters/fields.json, whose text says what its parts are, and why keys are ignored.
/// `json` in AdapterFieldsTable.swift is generated of it.
struct AdapterFields: Decodable {
    let used: Set<String>
    let ignored: Set<String>
    let required: [String: Set<JSONValue>]

    /// Of PEFT's configuration, of mlx-lm's, and of the `lora_parameters` in that.
    struct Tables: Decodable {
        let peft, mlx, loraParameters: AdapterFields
    }

    static func all() throws -> Tables { try JSONDecoder.snakeCase.decode(Tables.self, from: Data(json.utf8)) }

    /// Throws `MeSPError` that names a key whose value means what the trainer does not do.
    func check(_ config: [String: JSONValue]) throws {
        let found = config.sorted { $0.key < $1.key }.first { key, value in
            !used.contains(key) && !ignored.contains(key) && !(required[key] ?? [.null]).contains(value)
        }
        guard let (key, value) = found else { return }
        throw AdapterFormat.unsupported(value.string.map { "\(key) \"\($0)\"" } ?? key)
    }
}
