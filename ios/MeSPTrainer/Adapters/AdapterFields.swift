import Foundation
import MeSPFiles
import MeSPSentences

/// The fields that an adapter_config.json may have, from exporter/mesp/adapters/fields.json. That file explains its parts, and says why some keys are
/// ignored. `json` in AdapterFieldsTable.swift is generated from it.
struct AdapterFields: Decodable {
    let used: Set<String>
    let ignored: Set<String>
    let required: [String: Set<JSONValue>]

    /// The fields of PEFT's configuration, of mlx-lm's configuration, and of mlx-lm's `lora_parameters`.
    struct Tables: Decodable {
        let peft, mlx, loraParameters: AdapterFields
    }

    static func all() throws -> Tables { try JSONDecoder.snakeCase.decode(Tables.self, from: Data(json.utf8)) }

    /// Throws a `MeSPError` that names a key with a value that the trainer does not support.
    func check(_ config: [String: JSONValue]) throws {
        let found = config.sorted { $0.key < $1.key }.first { key, value in
            !used.contains(key) && !ignored.contains(key) && !(required[key] ?? [.null]).contains(value)
        }
        guard let (key, value) = found else { return }
        throw AdapterFormat.unsupported(value.string.map { "\(key) \"\($0)\"" } ?? key)
    }
}
