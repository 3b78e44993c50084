import MeSPFiles

/// The properties of a `model_type` of the plain families, from `mesp.models.families`. A block of a plain family is attention and one MLP, and
/// `config.json` describes the blocks completely.
struct PlainFamily: Sendable {
    /// The linear layers of attention, each the pair of its name and its projections, as in a manifest. `mlp` has the linear layers of the MLP in the
    /// same form.
    let attention: JSONValue
    let mlp: JSONValue
    /// The linear layers that always have a bias, regardless of the config.json.
    let biases: [String]
    let qkNorm: Bool
    let postNorms: Bool
    /// The offset that a norm adds to the weight in the checkpoint.
    let normOffset: Float
    /// The names that MeSP uses for norms and linear layers -> their names in checkpoints, where the two differ.
    let names: [String: String]
    /// The `model_type`s of the text model within a multimodal model.
    let texts: [String]
    /// The `model_type` in mlx-lm; nil if it is the same as in `config.json`.
    let mlxType: String?
    /// Whether mlx-lm ties the head to the embedding if the `config.json` says so.
    let mlxTies: Bool
    let mlxPrefix: String
    let hfPrefix: String
    let activation: String
    /// The period of layers with full attention, if `layer_types` is missing; nil if there is no such period.
    let fullEvery: Double?
    /// Whether a config.json may name blocks without RoPE.
    let hasNoRoPELayers: Bool
    /// The factor of the embedding: `one`; `root`, the square root of the width; or `rounded_root`, that root in bfloat16.
    let embeddingFactor: String
    /// The keys of `PlainFamilies.variants` that the family supports.
    let takes: Set<String>
    /// The default values of keys that may be missing.
    let defaults: [String: JSONValue]

    init?(_ entry: JSONValue) {
        guard case .object(let fields) = entry, let attention = fields["attention"], let mlp = fields["mlp"],
            let mlxPrefix = fields["mlx_prefix"]?.string, let hfPrefix = fields["hf_prefix"]?.string,
            let activation = fields["activation"]?.string, let factor = fields["embedding_factor"]?.string,
            let offset = fields["norm_offset"]?.double
        else { return nil }
        func flag(_ key: String) -> Bool { fields[key] == .bool(true) }
        func names(_ key: String) -> [String] { fields[key]?.array?.compactMap(\.string) ?? [] }
        (self.attention, self.mlp, biases) = (attention, mlp, names("biases"))
        (qkNorm, postNorms, normOffset) = (flag("qk_norm"), flag("post_norms"), Float(offset))
        self.names = fields["names"]?.fields?.compactMapValues(\.string) ?? [:]
        (texts, mlxType, mlxTies) = (names("texts"), fields["mlx_type"]?.string, flag("mlx_ties"))
        (self.mlxPrefix, self.hfPrefix, self.activation) = (mlxPrefix, hfPrefix, activation)
        (fullEvery, hasNoRoPELayers) = (fields["full_every"]?.double, flag("has_no_rope_layers"))
        (embeddingFactor, takes) = (factor, Set(names("takes")))
        if case .object(let values) = fields["defaults"] { defaults = values } else { defaults = [:] }
    }

    /// Returns the factor of the embedding in a model of width `hidden`.
    func embeddingScale(hidden: Int) -> Double {
        let root = Double(hidden).squareRoot()
        return switch embeddingFactor {
        case "root": root
        case "rounded_root": Double(Float(bitPattern: UInt32(bfloat16(Float(root))) << 16))
        default: 1
        }
    }

    /// Returns the names of the linear layers in a manifest's list.
    static func modules(_ entry: JSONValue) -> [String] {
        entry.array?.compactMap { $0.array?.first?.string } ?? []
    }
}

/// The tables of `mesp.models` about the plain families, and about any config.json and checkpoint.
enum PlainFamilies {
    static let families = object("families").compactMapValues(PlainFamily.init)
    /// The `model_type`s of all families that the exporter supports.
    static let names = strings("names")
    /// The parts that the trainer lacks, by the `model_type` of unsupported models.
    static let lacking = object("lacking").compactMapValues(\.string)
    /// The keys that only some families have, each with the value that has the same effect as a missing key.
    static let variants = object("variants")
    static let defaults = object("defaults")
    /// The largest allowed values of numbers that determine the lengths of lists.
    static let most = object("most").compactMapValues(\.double)
    /// The keys of each type of `rope_scaling`; `common` has the keys of all types.
    static let rope = object("rope").mapValues { Set($0.array?.compactMap(\.string) ?? []) }
    /// The prefixes of names in multimodal models, each with the prefix in the text model.
    static let text = object("text").compactMapValues(\.string).sorted { $0.key.count > $1.key.count }
    /// The prefixes of the names of parts other than the text model.
    static let unused = strings("unused")
    /// The suffixes of the names of tensors that are not used.
    static let limits = strings("limits")
    /// The prefixes of names in the checkpoint of a model without its head.
    static let headless = strings("headless")
    /// The suffixes of the names of tensors that change nothing.
    static let buffers = strings("buffers")
    /// The files of a tokenizer.
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
