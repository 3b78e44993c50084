import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// The fields of adapter_config.json that affect the adapters' results.
struct AdapterConfig {
    let format: AdapterFormat
    let rank: Int
    /// The factor s in s (x A) B.
    let scale: Float
    /// Whether a layer that concatenates n modules has n times the rank.
    let joins: Bool
    let isDoRA: Bool
    private let fields: Fields
    private let blocks: Int

    fileprivate struct Fields: Decodable {
        struct Parameters: Decodable {
            let rank: Int
            let scale: Float
            let keys: [String]?
        }
        // Fields of mlx-lm:
        let fineTuneType: String?
        let loraParameters: Parameters?
        let numLayers: Int?
        // Fields of PEFT:
        let peftType: String?
        let r: Int?
        let loraAlpha: Float?
        let useRslora: Bool?
        let useDora: Bool?
        let rankPattern: [String: Int]?
        let alphaPattern: [String: Float]?
        let targetModules: OneOrMore<String>?
        let excludeModules: OneOrMore<String>?
        let targetParameters: [String]?
        let layersToTransform: OneOrMore<Int>?
    }

    /// A single value or a list of values.
    fileprivate enum OneOrMore<Value: Decodable>: Decodable {
        case one(Value)
        case list([Value])

        init(from decoder: any Decoder) throws {
            let container = try decoder.singleValueContainer()
            if let value = try? container.decode(Value.self) {
                self = .one(value)
            } else {
                self = .list(try container.decode([Value].self))
            }
        }

        var all: [Value] {
            switch self {
            case .one(let value): [value]
            case .list(let values): values
            }
        }
    }

    /// Reads the folder's adapter_config.json.
    ///
    /// - Throws: `MeSPError` if the file is missing, invalid or not supported. Its message continues “Cannot load the adapters in …: ”.
    init(_ folder: URL, of architecture: Architecture) throws {
        let file = AdapterFormat.configFile
        guard let json = regularFile(folder.appendingPathComponent(file), followsLinks: true) else {
            throw MeSPError("it has no \(file)")
        }
        do {
            let config = try JSONDecoder().decode([String: JSONValue].self, from: json)
            let tables = try AdapterFields.all()
            try ((config["peft_type"] ?? .null) == .null ? tables.mlx : tables.peft).check(config)
            if case .object(let parameters) = config["lora_parameters"] {
                try tables.loraParameters.check(parameters)
            }
            fields = try JSONDecoder.snakeCase.decode(Fields.self, from: json)
        } catch let error as DecodingError {
            throw MeSPError("\(file) is not valid: \(error.plainSentence)")
        }
        blocks = architecture.numHiddenLayers
        isDoRA = fields.fineTuneType == "dora" || fields.useDora == true
        if fields.peftType == nil {
            guard let parameters = fields.loraParameters else { throw MeSPError("\(file) lacks lora_parameters") }
            (format, joins, rank, scale) = (.mlx, false, parameters.rank, parameters.scale)
        } else {
            guard let r = fields.r, let alpha = fields.loraAlpha else {
                throw MeSPError("\(file) lacks r or lora_alpha")
            }
            (format, joins, rank) = (.peft, try fields.joins(r, alpha, of: architecture), r)
            scale = Float(Double(alpha) / (fields.useRslora == true ? Double(r).squareRoot() : Double(r)))
        }
        guard rank >= 1, (.leastNormalMagnitude..<0x1p63).contains(scale) else {
            throw MeSPError("\(file) has a rank or scale that is not a positive number")
        }
    }

    /// Returns whether the configuration gives a layer adapters.
    ///
    /// Regular expressions are not evaluated. A string in `target_modules`, instead of a list, counts as a match for every linear layer. A string in
    /// `exclude_modules` excludes no layer.
    ///
    /// - Parameter prefix: the part of the layers' full names before `.layers`.
    func adapts(_ layer: AdaptedLayer, _ block: Int, prefix: String) -> Bool {
        let name = "\(prefix).layers.\(block).\(layer.name)"
        func ends(_ names: [String]?) -> Bool { (names ?? []).contains { name == $0 || name.hasSuffix(".\($0)") } }
        if format == .mlx {
            let last = fields.numLayers ?? 0
            let keys = fields.loraParameters?.keys
            return (last <= 0 || block >= blocks - last) && keys?.contains { $0 == name || $0 == layer.name } ?? true
        }
        if layer.isStacked { return ends(fields.targetParameters) }
        if case .list(let names) = fields.excludeModules, ends(names) { return false }
        guard case .list(let names) = fields.targetModules else { return fields.targetModules != nil }
        let among = fields.layersToTransform?.all ?? []
        return names.contains(name) || (ends(names) && (among.isEmpty || among.contains(block)))
    }
}

extension AdapterConfig.Fields {
    /// Returns whether `rank_pattern` and `alpha_pattern` give each layer that concatenates n modules n times the rank and α. Returns false if both
    /// are empty.
    ///
    /// - Throws: `MeSPError` if the patterns set anything else, or if rsLoRA is used with them.
    fileprivate func joins(_ rank: Int, _ alpha: Float, of architecture: Architecture) throws -> Bool {
        let (ranks, alphas) = (rankPattern ?? [:], alphaPattern ?? [:])
        guard !ranks.isEmpty || !alphas.isEmpty else { return false }
        let joined = AdapterFormat.peft.layers(of: architecture, architecture.trainable).filter { $0.modules.count > 1 }
        try AdapterFormat.checkRanks(
            !joined.isEmpty && ranks.count == joined.count && alphas.count == joined.count && useRslora != true
                && joined.allSatisfy { layer in
                    let count = Float(layer.modules.count)
                    return ranks[layer.name].map(Float.init) == count * Float(rank)
                        && alphas[layer.name] == count * alpha
                })
        return true
    }
}
