import Foundation
import MeSPBundle
import MeSPFiles

/// Returns the tokens at which generation stops, without duplicates. They come from `generation_config.json` or `config.json`, the bundle's manifest,
/// the tokenizer, and the chat template.
package func endTokens(of bundle: URL, _ tokenizer: any TextTokenizer) -> [Int] {
    func tokens(_ key: String, in name: String) -> [Int]? {
        let value = readJSON(name, in: bundle)?[key]
        return (value?.array ?? value.map { [$0] })?.compactMap { if case .integer(let id) = $0 { id } else { nil } }
    }
    let config = tokens("eos_token_id", in: "generation_config.json") ?? tokens("eos_token_id", in: "config.json")
    return ((config ?? []) + (tokens("end_tokens", in: "manifest.json") ?? []) + tokenizer.trainedEnds)
        .reduce(into: []) { if $1 >= 0, !$0.contains($1) { $0.append($1) } }
}

func readJSON(_ name: String, in bundle: URL) -> [String: JSONValue]? {
    regularFile(bundle.appendingPathComponent(name)).flatMap { try? JSONValue(json: $0) }?.fields
}
