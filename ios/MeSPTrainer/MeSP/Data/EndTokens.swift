import Foundation
import MeSPBundle
import MeSPFiles

/// Returns the tokens at which generation stops, without duplicates. They come from `generation_config.json` or `config.json`, the bundle's manifest,
/// the tokenizer, and the chat template.
package func endTokens(of bundle: URL, _ tokenizer: any TextTokenizer) -> [Int] {
    struct Config: Decodable {
        let tokens: [Int]

        init(from decoder: any Decoder) throws {
            enum Key: CodingKey { case eosTokenId }
            let container = try decoder.container(keyedBy: Key.self)
            let several = try? container.decode([Int].self, forKey: .eosTokenId)
            tokens = try several ?? [container.decode(Int.self, forKey: .eosTokenId)]
        }
    }
    struct Ends: Decodable {
        let endTokens: [Int]
    }
    func read<Contents: Decodable>(_ name: String) -> Contents? {
        regularFile(bundle.appendingPathComponent(name)).flatMap {
            try? JSONDecoder.snakeCase.decode(Contents.self, from: $0)
        }
    }
    let config: Config? = read("generation_config.json") ?? read("config.json")
    let manifest: Ends? = read("manifest.json")
    var ends = [Int]()
    for token in (config?.tokens ?? []) + (manifest?.endTokens ?? []) + tokenizer.trainedEnds
    where token >= 0 && !ends.contains(token) {
        ends.append(token)
    }
    return ends
}
