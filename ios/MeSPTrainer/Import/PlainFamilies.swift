import Foundation
import MeSPFiles

/// The properties of a supported `model_type`. Each block has attention and one MLP, and `config.json` describes the blocks completely.
struct PlainFamily: Decodable, Sendable {
    /// The linear layers of attention, in the manifest's format: pairs of a name and a list of projections. `mlp` has the same format.
    let attention: JSONValue
    let mlp: JSONValue
    /// The linear layers that always have a bias.
    let biases: [String]
    let qkNorm: Bool
    let postNorms: Bool
    /// The number that a norm adds to its stored weight.
    let normOffset: Float
    /// MeSP's names of modules -> their names in checkpoints, where the names differ.
    let names: [String: String]
    /// The `model_type`s of the text model within a multimodal model.
    let texts: [String]
    /// The `model_type` in mlx-lm; nil if mlx-lm uses the `model_type` of `config.json`.
    let mlxType: String?
    /// Whether mlx-lm supports `tie_word_embeddings`.
    let mlxTies: Bool
    let mlxPrefix: String
    let hfPrefix: String
    let activation: String
    /// The distance between layers with full attention, for a config.json that does not give it; nil if no layer has full attention.
    let fullEvery: Double?
    let hasNoRopeLayers: Bool
    /// The kind of the embedding's scale: `one`; `root`, the square root of the hidden size; or `rounded_root`, that root rounded to bfloat16.
    let embeddingFactor: String
    /// The keys of `PlainFamilies.variants` that the family supports, or `partial_rotary_factor` in every RoPE.
    let takes: Set<String>
    /// Values that the class sets, whatever config.json says.
    let fixed: [String: JSONValue]

    func embeddingScale(hidden: Int) -> Double {
        let root = Double(hidden).squareRoot()
        return switch embeddingFactor {
        case "root": root
        case "rounded_root": Double(Float(bitPattern: UInt32(bfloat16(Float(root))) << 16))
        default: 1
        }
    }

    static func modules(_ entry: JSONValue) -> [String] {
        entry.array?.compactMap { $0.array?.first?.string } ?? []
    }
}

/// Tables about model families, generated from `mesp.models`.
enum PlainFamilies {
    static let families = object("families").compactMapValues {
        try? JSONDecoder.snakeCase.decode(PlainFamily.self, from: Data($0.json.utf8))
    }
    /// The `model_type`s of all families that the exporter supports.
    static let names = strings("names")
    /// The unsupported `model_type`s -> the part of the model that the trainer lacks.
    static let lacking = object("lacking").compactMapValues(\.string)
    /// The keys that only some families support -> the value that has the same effect as a missing key.
    static let variants = object("variants")
    /// The classes of transformers -> the keys that each one reads, with their defaults.
    static let classes = object("classes").compactMapValues(\.object)
    /// The keys that some class reads.
    static let known = Set(strings("known"))
    /// Keys -> the type of their defaults. See `JSONValue.hasType`.
    static let types = object("types").compactMapValues(\.string)
    /// transformers' names of activations -> the manifest's.
    static let activations = object("activations").compactMapValues(\.string)
    /// The maximum values of some numbers in config.json.
    static let most = object("most").compactMapValues(\.double)
    /// The keys of each type of `rope_scaling`. The entry `common` has the keys that each type may have.
    static let rope = object("rope").mapValues { Set($0.array?.compactMap(\.string) ?? []) }
    /// The prefixes of tensor names in multimodal models -> the prefixes in the text model. The longest come first.
    static let text = object("text").compactMapValues(\.string).sorted { $0.key.count > $1.key.count }
    /// The prefixes of the names of tensors for other modalities or for multi-token prediction.
    static let unused = strings("unused")
    /// The suffixes of tensor names for the limits of a linear layer's input and output, in Gemma 4's checkpoints.
    static let limits = strings("limits")
    /// The prefixes of tensor names in checkpoints of models without a head.
    static let headless = strings("headless")
    /// The suffixes of the names of tensors that do not affect the result.
    static let buffers = strings("buffers")
    static let tokenizerFiles = strings("tokenizer_files")
    /// The keys that name Python code.
    static let code = Set(strings("code"))

    private static let table: [String: JSONValue] = {
        guard let table = try? JSONValue(json: json.utf8), case .object(let fields) = table else { return [:] }
        return fields
    }()

    private static func object(_ key: String) -> [String: JSONValue] {
        if case .object(let fields) = table[key] { fields } else { [:] }
    }

    private static func strings(_ key: String) -> [String] { table[key]?.array?.compactMap(\.string) ?? [] }
}
