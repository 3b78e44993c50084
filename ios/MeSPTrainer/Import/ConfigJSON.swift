import Foundation
import MeSPFiles
import MeSPSentences

struct ConfigJSON {
    let modelType: String
    let family: PlainFamily
    let original: [String: JSONValue]
    /// The values, with defaults for missing keys. RoPE's values have the keys that mlx-lm reads. If the model is multimodal, the values include
    /// those of its text model.
    private(set) var fields: [String: JSONValue]

    subscript(key: String) -> JSONValue { fields[key] ?? .null }

    /// Completes and checks a config.json.
    ///
    /// - Throws: `MeSPError` if the model is not supported or a value is not valid.
    init(_ original: [String: JSONValue], of model: String, source: String) throws {
        self.original = original
        modelType = try Self.modelType(original, of: model, source: source)
        guard let family = PlainFamilies.families[modelType] else { preconditionFailure("no family \(modelType)") }
        let (read, keys) = try Self.readKeys(original, modelType, family)
        (self.family, fields) = (family, read)
        for (key, most) in PlainFamilies.most.sorted(by: { $0.key < $1.key }) {
            if let value = self[key].double, !(value > 0 && value <= most) { throw unsupported(key, self[key]) }
        }
        for (key, value) in read.sorted(by: { $0.key < $1.key }) where value != .null {
            if let type = PlainFamilies.types[key], !value.hasType(type) { throw unusable("\(key)") }
        }
        fields.merge(family.fixed) { $1 }
        if let types = self["layer_types"].array, !types.isEmpty {
            for key in Self.periods where keys[key] != nil { fields[key] = Self.period(of: types) }
        }
        try completeRoPE(keys)
        for (key, neutral) in PlainFamilies.variants.sorted(by: { $0.key < $1.key })
        where !family.takes.contains(key) && fields[key] != nil {
            // Transformers takes null for false.
            if self[key] == .null ? neutral != .bool(true) : self[key].isEqual(to: neutral) { continue }
            throw unsupported(key, self[key])
        }
        for key in ["hidden_activation", "hidden_act"] {
            let value = fields[key] ?? .string(family.activation)
            guard let name = PlainFamilies.activations[value.string ?? ""], name == activation else {
                throw unsupported(key, value)
            }
        }
    }

    /// The keys of the distance between layers with full attention.
    static let periods = ["sliding_window_pattern", "full_attention_interval"]

    /// Returns n if each n-th layer has full attention and the others have none, or null. mlx-lm reads this number instead of `layer_types`.
    private static func period(of types: [JSONValue]) -> JSONValue {
        let full = types.indices.filter { types[$0] == .string("full_attention") }.map { $0 + 1 }
        let period = full.first ?? types.count + 1
        return full == Array(stride(from: period, through: types.count, by: period)) ? .integer(period) : .null
    }

    var activation: String { PlainFamilies.activations[family.activation] ?? "silu" }

    // MARK: - Values

    func value(_ key: String, of given: [String: JSONValue]? = nil) throws -> JSONValue {
        guard let value = (given ?? fields)[key] else { throw lacks(key) }
        return value
    }

    /// The largest count. The bytes of a model with these sizes are countable.
    static let mostCount = 1 << 22

    func count(_ key: String) throws -> Int {
        guard case .integer(let count) = try value(key), (1...Self.mostCount).contains(count) else {
            throw unusable("\(key)")
        }
        return count
    }

    func positive(_ key: String, of given: [String: JSONValue]? = nil) throws -> Double {
        guard let number = try value(key, of: given).double, Bounds.numbers.contains(number) else {
            throw unusable("\(key)")
        }
        return number
    }

    /// Returns a positive number; nil if the value is missing, or false in Python.
    func optional(_ key: String) throws -> Double? { self[key].isTruthy ? try positive(key) : nil }

    /// Returns a list with one entry per block; nil if the value is missing, or false in Python.
    func list(_ key: String) throws -> [JSONValue]? {
        guard self[key].isTruthy else { return nil }
        guard let values = self[key].array else { throw unusable("\(key)") }
        let count = try count("num_hidden_layers")
        guard values.count == count else {
            throw MeSPError(
                "The model's config.json is not valid: \(key) has \(values.count) entries for \(count) blocks; take an unchanged config.json."
            )
        }
        return values
    }

    // MARK: - Completion

    private static func modelType(
        _ config: [String: JSONValue], of model: String, source: String
    ) throws -> String {
        let modelType = config["model_type"]?.string ?? ""
        if PlainFamilies.families[modelType] != nil { return modelType }
        guard !PlainFamilies.names.contains(modelType) else {
            throw MeSPError(
                "\(model) is a \(modelType) model, which cannot be made into a bundle here; export it on a computer: mesp-export --model \(source)"
            )
        }
        let inText = config["text_config"]?.fields ?? [:]
        let lacking: Sentence =
            if let reason = PlainFamilies.lacking[modelType] {
                " (\(Sentence(english: reason)))"
            } else if (Array(config.keys) + Array(inText.keys)).contains(where: { $0.contains("expert") }) {
                " (its mixture of experts is of another kind)"
            } else if config["text_config"] != nil {
                " (it has several modalities, and the trainer takes only text)"
            } else { "" }
        throw MeSPError(
            "The architecture '\(modelType)' is not supported\(lacking); supported are \(PlainFamilies.names.joined(separator: ", "))."
        )
    }

    /// Returns the values that transformers reads, and the keys of the class with their defaults.
    ///
    /// The class of a multimodal model is that of its text model, with its keys in `text_config`. Keys that no class has, such as the quantization,
    /// are kept from both places.
    private static func readKeys(
        _ config: [String: JSONValue], _ modelType: String, _ family: PlainFamily
    ) throws -> (values: [String: JSONValue], keys: [String: JSONValue]) {
        var (text, name) = (config, modelType)
        if let usual = family.texts.first {
            name = usual
            switch config["text_config"] ?? .null {
            case .null:  // Qwen2.5-VL's text keys may be at the top
                guard config["hidden_size"] != nil else { throw lacks("text_config") }
            case .object(let fields):
                text = fields
                let its = text["model_type"] ?? .string(usual)
                guard let named = its.string, family.texts.contains(named) else {
                    throw unsupported("text_config's model_type", its)
                }
                name = named
            default: throw unusable("text_config")
            }
        }
        guard let keys = PlainFamilies.classes[name] else { preconditionFailure("no class \(name)") }
        func isKnown(_ key: String) -> Bool { PlainFamilies.known.contains(key) }
        var read = config.filter { !isKnown($0.key) }
        read.merge(text.filter { keys[$0.key] != nil || !isKnown($0.key) }) { $1 }
        read.merge(keys.filter { $0.value != .null }) { given, _ in given }
        if name != modelType {
            let usual = PlainFamilies.classes[modelType]?["tie_word_embeddings"] ?? .null
            let isTiedInText = modelType == "qwen2_5_vl" && text["tie_word_embeddings"]?.isTruthy == true
            read["tie_word_embeddings"] = isTiedInText ? .bool(true) : config["tie_word_embeddings"] ?? usual
        }
        for key in ["text_config", "vision_config"] { read[key] = nil }
        read["model_type"] = .string(modelType)
        return (read, keys)
    }

    /// Completes `rope_parameters`, for each layer type if the class has them so, and adds RoPE in mlx-lm's keys.
    ///
    /// `rope_scaling` replaces `rope_parameters`. A value in these objects comes before the same key outside of them.
    private mutating func completeRoPE(_ keys: [String: JSONValue]) throws {
        if self["rope_parameters"] == .null { fields["rope_parameters"] = keys["rope_parameters"] }
        let (rope, scaling) = (try object("rope_parameters") ?? [:], try object("rope_scaling") ?? [:])
        let source = scaling.isEmpty ? "rope_parameters" : "rope_scaling"
        let beside = fields.filter { RoPEScaling.keys.contains($0.key) }
        for key in RoPEScaling.keys + ["rope_parameters", "rope_scaling"] { fields[key] = nil }
        let full: [String: JSONValue]
        if keys["rope_local_base_freq"] != nil {  // Gemma 3
            func kind(_ name: String) throws -> [String: JSONValue] {
                guard let its = rope[name], its.isTruthy else { return ["rope_type": .string("default")] }
                guard let its = its.object else { throw unusable("rope_parameters") }
                return its
            }
            let (whole, local) = (try kind("full_attention"), try kind("sliding_attention"))
            full = try RoPEScaling.complete(whole.merging(scaling) { $1 }, beside, self, source, hasOriginal: false)
            let base = ["rope_theta": self["rope_local_base_freq"]]
            let sliding = try RoPEScaling.complete(local, base, self, source, hasOriginal: false)
            guard RoPEScaling.type(of: sliding) == "default" else { throw unsupported(source, .object(local)) }
            fields["rope_local_base_freq"] = sliding["rope_theta"]
            fields["rope_parameters"] = .object([
                "full_attention": .object(full), "sliding_attention": .object(sliding),
            ])
        } else {
            full = try RoPEScaling.complete(scaling.isEmpty ? rope : scaling, beside, self, source, hasOriginal: true)
            fields["rope_parameters"] = .object(full)
        }
        fields["rope_scaling"] = RoPEScaling.type(of: full) == "default" ? .null : .object(full)
        fields.merge(full.filter { RoPEScaling.keys.contains($0.key) }) { $1 }
    }

    private func object(_ key: String) throws -> [String: JSONValue]? {
        guard self[key].isTruthy else { return nil }
        guard let object = self[key].object else { throw unusable("\(key)") }
        return object
    }
}

func unsupported(_ key: String, _ value: JSONValue) -> MeSPError {
    MeSPError(
        "The model's config.json sets \(JSONValue.escaped(key)) to \(value.json), which is not supported; take a model without it."
    )
}

func lacks(_ key: String) -> MeSPError { MeSPError("The model's config.json lacks '\(key)'.") }

func unusable(_ key: Sentence) -> MeSPError {
    MeSPError("The model's config.json is not valid (its \(key) cannot be used); take an unchanged config.json.")
}

extension JSONValue {
    var double: Double? {
        switch self {
        case .integer(let number): Double(number)
        case .number(let number): number
        default: nil
        }
    }

    /// Returns whether the value has the type of a key's default: `bool`, `int`, or `float`, which includes integers.
    func hasType(_ type: String) -> Bool {
        switch self {
        case .bool: type == "bool"
        case .integer: type != "bool"
        case .number: type == "float"
        default: false
        }
    }

    /// The fields of an object, including null ones; nil for other values.
    var object: [String: JSONValue]? {
        if case .object(let fields) = self { fields } else { nil }
    }

    /// Whether the value is true in Python: not empty, null, false or 0.
    var isTruthy: Bool {
        switch self {
        case .bool(let truth): truth
        case .integer, .number: double != 0
        default: !isEmpty
        }
    }

    /// Returns whether two values are equal. The values 1, 1.0 and true are equal as in Python, also in arrays.
    func isEqual(to other: JSONValue) -> Bool {
        func number(_ value: JSONValue) -> Double? {
            if case .bool(let truth) = value { truth ? 1 : 0 } else { value.double }
        }
        if let (one, another) = number(self).flatMap({ one in number(other).map { (one, $0) } }) {
            return one == another
        }
        if case .array(let values) = self, case .array(let others) = other {
            return values.count == others.count && zip(values, others).allSatisfy { $0.isEqual(to: $1) }
        }
        return self == other
    }
}
