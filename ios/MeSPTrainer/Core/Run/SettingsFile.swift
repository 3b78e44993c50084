import Foundation
import MeSPFiles
import MeSPSentences

extension RunSettings {
    /// Reads a settings file: snake-case JSON with `bundle` and `output`. A missing key has its default. A missing optimizer or learning rate is the
    /// MeSP paper's.
    package init(contentsOf url: URL) throws {
        guard let json = shortFile(url, longest: Bounds.jsonBytes, followsLinks: true) else {
            throw MeSPError("Cannot read the settings file \(url.path).")
        }
        try self.init(
            json: try? JSONSerialization.jsonObject(with: json) as? [String: Any],
            from: "The settings file \(url.path) is")
    }

    package init(json given: [String: Any]?, from source: Sentence) throws {
        do {
            guard let given, given["bundle"] != nil, given["output"] != nil else {
                throw MeSPError("it is not a JSON object with a bundle and an output")
            }
            let json = try JSONSerialization.data(withJSONObject: Self.completed(given))
            self = try JSONDecoder.snakeCase.decode(RunSettings.self, from: json)
        } catch {
            throw MeSPError("\(source) not valid: \(error.plainSentence).")
        }
    }

    static func completed(_ given: [String: Any]) throws -> [String: Any] {
        var defaults = RunSettings(bundle: "", output: "")
        defaults.usePaperUpdate()
        let json = try JSONEncoder.snakeCase.encode(defaults)
        let keys = try JSONSerialization.jsonObject(with: json) as? [String: Any] ?? [:]
        return keys.merging(given) { $1 }
    }

    /// Returns a JSON object whose `settings` are completed by defaults, so that files of earlier versions can be read.
    static func completed(in json: Data) throws -> Data {
        guard var keys = try JSONSerialization.jsonObject(with: json) as? [String: Any],
            let settings = keys["settings"] as? [String: Any]
        else { return json }
        keys["settings"] = try completed(settings)
        return try JSONSerialization.data(withJSONObject: keys)
    }
}
