import MeSPFiles

/// The properties that a `model_type` of the plain families implies. Their blocks are attention and one MLP, as the `config.json` alone says.
/// `mesp.models.families` declares them.
struct PlainFamily: Sendable {
    /// The linear layers, each the pair of its name and its projections, as a manifest has them.
    let attention: JSONValue
    let mlp: JSONValue
    /// The linear layers that have a bias whatever the config.json says.
    let biases: [String]
    let qkNorm: Bool
    let postNorms: Bool
    /// A norm multiplies by this plus the weight in the checkpoint.
    let normOffset: Float
    /// The names in checkpoints of norms and linear layers that are named otherwise here, by their names here.
    let names: [String: String]
    /// The `model_type`s of the text, where it is published in a model of several modalities.
    let texts: [String]
    /// mlx-lm's `model_type`, where it has another.
    let mlxType: String?
    /// Whether mlx-lm ties the head where the model does.
    let mlxTies: Bool
    let mlxPrefix: String
    let hfPrefix: String
    let activation: String
    /// Each how many-th layer has full attention where `layer_types` says nothing; nil: none.
    let fullEvery: Double?
    /// Whether a config.json may name blocks without RoPE.
    let hasNoRoPELayers: Bool
    /// The factor of the embedding: `one`, `root` of the width, or `rounded_root`, in bfloat16.
    let embeddingFactor: String
    /// The keys of `PlainFamilies.variants` that it takes.
    let takes: Set<String>
    /// The values of keys that may be missing.
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

    /// The factor of the embedding of a model of this width.
    func embeddingScale(hidden: Int) -> Double {
        let root = Double(hidden).squareRoot()
        return switch embeddingFactor {
        case "root": root
        case "rounded_root": Double(Float(bitPattern: UInt32(bfloat16(Float(root))) << 16))
        default: 1
        }
    }

    /// The names of the linear layers in a manifest's list of them.
    static func modules(_ entry: JSONValue) -> [String] {
        entry.array?.compactMap { $0.array?.first?.string } ?? []
    }
}

/// What `mesp.models` declares of the plain families, and of any config.json and checkpoint.
enum PlainFamilies {
    static let families = object("families").compactMapValues(PlainFamily.init)
    /// The `model_type`s of all families that the exporter takes.
    static let names = strings("names")
    /// The parts that the trainer lacks, by the `model_type` of other models.
    static let lacking = object("lacking").compactMapValues(\.string)
    /// The keys that some families have and others lack, with the value that means the same as none.
    static let variants = object("variants")
    static let defaults = object("defaults")
    /// The largest values of numbers by which lists are made.
    static let most = object("most").compactMapValues(\.double)
    /// The keys of each type of `rope_scaling`, and those of all types, by `common`.
    static let rope = object("rope").mapValues { Set($0.array?.compactMap(\.string) ?? []) }
    /// The beginnings of the names of a model of several modalities, and what is there in the text's own.
    static let text = object("text").compactMapValues(\.string).sorted { $0.key.count > $1.key.count }
    /// The beginnings of the names of other parts than the text.
    static let unused = strings("unused")
    /// The endings of the names of tensors that take no part.
    static let limits = strings("limits")
    /// The beginnings of names in the checkpoint of a model without its head.
    static let headless = strings("headless")
    /// The endings of the names of tensors that change nothing.
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
