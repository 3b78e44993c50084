import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

struct AdapterConfig {
    let format: AdapterFormat
    let rank: Int
    /// The factor s in s (x A) B.
    let scale: Float
    /// Whether a layer that concatenates n modules has n times the rank.
    private(set) var joins = false
    let isDoRA: Bool
    private let alpha: Float
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
        let rankPattern: [String: Float]?
        let alphaPattern: [String: Float]?
        let targetModules: OneOrMore<String>?
        let excludeModules: OneOrMore<String>?
        let targetParameters: [String]?
        let layersToTransform: OneOrMore<Int>?
    }

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
        let url = folder.appendingPathComponent(file)
        guard let json = shortFile(url, longest: Bounds.jsonBytes, followsLinks: true) else {
            throw FileManager.default.fileExists(atPath: url.path)
                ? MeSPError("its \(file) is not a regular file of at most \(Bounds.jsonBytes >> 20) MiB")
                : MeSPError("it has no \(file)")
        }
        var config = [String: JSONValue]()
        do {
            config = try JSONDecoder().decode([String: JSONValue].self, from: json)
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
        isDoRA = fields.peftType == nil ? fields.fineTuneType == "dora" : fields.useDora == true
        if fields.peftType == nil {
            guard let parameters = fields.loraParameters else { throw MeSPError("\(file) lacks lora_parameters") }
            (format, rank, alpha, scale) = (.mlx, parameters.rank, 0, parameters.scale)
        } else {
            // PEFT's defaults are 8.
            guard let r = config["r"] == nil ? 8 : fields.r,
                let its = config["lora_alpha"] == nil ? 8 : fields.loraAlpha
            else { throw MeSPError("\(file) lacks r or lora_alpha") }
            (format, rank, alpha) = (.peft, r, its)
            scale = Float(Double(alpha) / (fields.useRslora == true ? Double(r).squareRoot() : Double(r)))
        }
        guard rank >= 1, (.leastNormalMagnitude..<0x1p63).contains(scale) else {
            throw MeSPError("\(file) has a rank or scale that is not a positive number")
        }
        if format == .peft { joins = try findsJoins(architecture) }
    }

    /// Returns whether the configuration gives a layer adapters.
    ///
    /// As in PEFT, a string in `target_modules` or `exclude_modules` is a regular expression of whole names, except `all-linear`.
    ///
    /// - Parameter prefix: the part of the layers' full names before `.layers`.
    func adapts(_ layer: AdaptedLayer, _ block: Int, prefix: String) throws -> Bool {
        let name = "\(prefix).layers.\(block).\(layer.name)"
        func ends(_ names: [String]) -> Bool { Self.ends(name, names) }
        if format == .mlx {
            let last = fields.numLayers ?? 0
            let keys = fields.loraParameters?.keys
            return (last <= 0 || block >= blocks - last) && keys?.contains { $0 == name || $0 == layer.name } ?? true
        }
        if layer.isStacked { return adaptsParameter(name) }
        switch fields.excludeModules {
        case .one(let pattern) where !pattern.isEmpty: if try Self.matches(pattern, name) { return false }
        case .list(let names): if ends(names) { return false }
        default: break
        }
        switch fields.targetModules {
        case .one("all-linear"): return true
        case .one(let pattern): return try !pattern.isEmpty && Self.matches(pattern, name)
        case .list(let names):
            let among = fields.layersToTransform?.all ?? []
            return names.contains(name) || (ends(names) && (among.isEmpty || among.contains(block)))
        case nil: return false
        }
    }

    func adaptsParameter(_ name: String) -> Bool { Self.ends(name, fields.targetParameters ?? []) }

    private static func ends(_ name: String, _ names: [String]) -> Bool {
        names.contains { name == $0 || name.hasSuffix(".\($0)") }
    }

    /// Returns whether `rank_pattern` and `alpha_pattern` give each layer that concatenates n modules n times the rank and α. Returns false if
    /// neither changes a layer.
    ///
    /// As in PEFT, a pattern is a regular expression of the end of a layer's name.
    ///
    /// - Throws: `MeSPError` if the patterns set anything else, or if rsLoRA is used with them.
    private func findsJoins(_ architecture: Architecture) throws -> Bool {
        let prefix = architecture.hfPrefix
        let names = try (0..<blocks).flatMap { block in
            try AdapterFormat.peft.layers(of: architecture.block(block)).filter {
                try $0.modules.count > 1 || adapts($0, block, prefix: prefix)
            }.map { "\(prefix).layers.\(block).\($0.name)" }
        }
        func factors(_ pattern: [String: Float]?, of usual: Float) throws -> [String: Float] {
            try (pattern ?? [:]).filter { key, value in
                try value != usual && names.contains { try Self.matches("(.*\\.)?(\(key))", $0) }
            }.mapValues { $0 / usual }
        }
        let ranks = try factors(fields.rankPattern, of: Float(rank))
        let alphas = try factors(fields.alphaPattern, of: alpha)
        guard !ranks.isEmpty || !alphas.isEmpty else { return false }
        let joined = AdapterFormat.peft.layers(of: architecture, architecture.trainable).filter { $0.modules.count > 1 }
        let several = Dictionary(joined.map { ($0.name, Float($0.modules.count)) }) { one, _ in one }
        try AdapterFormat.checkRanks(ranks == several && alphas == several && fields.useRslora != true)
        return true
    }

    /// Returns whether a regular expression matches a whole name.
    ///
    /// - Throws: `MeSPError` if the expression is not valid, or repeats a repetition, which may take unlimited time.
    private static func matches(_ pattern: String, _ name: String) throws -> Bool {
        guard pattern.firstMatch(of: /[*+}][^()]*\)+[*+{]/) == nil else {
            throw AdapterFormat.unsupported("the expression \"\(pattern)\"")
        }
        guard let expression = try? Regex(pattern) else {
            throw MeSPError(
                "\(AdapterFormat.configFile) is not valid: \"\(pattern)\" is no regular expression")
        }
        return try expression.wholeMatch(in: name) != nil
    }
}
