import Foundation
import MeSPBundle
import MeSPFiles

/// Every token that ends a text of the model in a bundle's folder, as mlx-lm finds them: those of `generation_config.json`, or where it
/// names none, of `config.json`, or where that names none either, the tokenizer's. Chat models name several.
public func endTokens(of bundle: URL, _ tokenizer: any TextTokenizer) -> [Int] {
    struct Config: Decodable {
        let tokens: [Int]

        init(from decoder: any Decoder) throws {
            enum Key: String, CodingKey { case eosTokenID = "eos_token_id" }
            let container = try decoder.container(keyedBy: Key.self)
            let several = try? container.decode([Int].self, forKey: .eosTokenID)
            tokens = try several ?? [container.decode(Int.self, forKey: .eosTokenID)]
        }
    }
    for name in ["generation_config.json", "config.json"] {
        if let json = regularFile(bundle.appendingPathComponent(name)),
            let config = try? JSONDecoder().decode(Config.self, from: json)
        {
            return config.tokens
        }
    }
    return tokenizer.endOfText.map { [$0] } ?? []
}
