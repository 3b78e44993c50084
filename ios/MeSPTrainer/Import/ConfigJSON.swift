import Foundation
import MeSPFiles
import MeSPSentences

/// A `config.json` of a supported model, with default values for missing keys.
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
    /// - Parameters:
    ///   - model: the model's name or folder, for messages.
    ///   - source: the argument of `mesp-export --model` for this model, for messages.
    /// - Throws: `MeSPError` if the model is not supported or a value is not valid.
    init(_ original: [String: JSONValue], of model: String, source: String) throws {
        self.original = original
        modelType = try Self.modelType(original, of: model, source: source)
        guard let family = PlainFamilies.families[modelType] else { preconditionFailure("no family \(modelType)") }
        (self.family, fields) = (family, try Self.ofText(original, modelType, family))
        fields = PlainFamilies.defaults.merging(family.defaults) { $1 }.merging(fields) { $1 }
        for (key, most) in PlainFamilies.most.sorted(by: { $0.key < $1.key }) {
            if let value = self[key].double, !(value > 0 && value <= most) { throw unsupported(key, self[key]) }
        }
        try completeRoPE()
        for (key, neutral) in PlainFamilies.variants.sorted(by: { $0.key < $1.key })
        where !family.takes.contains(key) && self[key] != .null && !self[key].isEqual(to: neutral) {
            throw unsupported(key, self[key])
        }
        let activation = self["hidden_activation"].isTruthy ? self["hidden_activation"] : self["hidden_act"]
        if activation != .null, activation != .string(family.activation) {
            throw unsupported("hidden_act", activation)
        }
    }

    // MARK: - Values

    func value(_ key: String) throws -> JSONValue { try value(key, of: fields) }

    func value(_ key: String, of fields: [String: JSONValue]) throws -> JSONValue {
        guard let value = fields[key] else {
            throw MeSPError("The model's config.json lacks '\(key)'.")
        }
        return value
    }

    /// Returns a count from 1 to 2²⁴.
    func count(_ key: String) throws -> Int {
        guard case .integer(let count) = try value(key), (1...(1 << 24)).contains(count) else {
            throw unusable("\(key)")
        }
        return count
    }

    func positive(_ key: String) throws -> Double { try positive(key, of: fields) }

    func positive(_ key: String, of fields: [String: JSONValue]) throws -> Double {
        guard let number = try value(key, of: fields).double, Bounds.numbers.contains(number) else {
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

    /// Returns the values of the text model of a multimodal model, including values of the whole model such as its quantization. Returns the values
    /// of another model unchanged.
    private static func ofText(
        _ config: [String: JSONValue], _ modelType: String, _ family: PlainFamily
    ) throws -> [String: JSONValue] {
        guard let usual = family.texts.first else { return config }
        let text: [String: JSONValue]
        switch config["text_config"] ?? .null {
        case .object(let fields): text = fields
        case let value where !value.isTruthy: text = [:]
        default: throw unusable("text_config")
        }
        let its = text["model_type"] ?? .string(usual)
        guard let name = its.string, family.texts.contains(name) else {
            throw unsupported("text_config's model_type", its)
        }
        let whole = config.filter { !["text_config", "vision_config"].contains($0.key) }
        var joined = whole.merging(text) { $1 }
        joined["model_type"] = .string(modelType)
        if let ties = whole["tie_word_embeddings"] { joined["tie_word_embeddings"] = ties }
        return joined
    }

    private mutating func completeRoPE() throws {
        var rope = try object("rope_parameters") ?? [:]
        fields["rope_parameters"] = nil
        if let full = rope["full_attention"] {
            let sliding = rope["sliding_attention"] ?? .null
            guard case .object(let its) = full else { throw unusable("rope_parameters") }
            rope = its
            if sliding.isTruthy {
                guard case .object(let local) = sliding else { throw unusable("rope_parameters") }
                try RoPEScaling.check(local, "rope_parameters")
                let share = local["partial_rotary_factor"] ?? .null
                guard RoPEScaling.type(of: local) == "default", share == .null || share.double == 1 else {
                    throw unsupported("rope_parameters", sliding)
                }
                fields["rope_local_base_freq"] = try value("rope_theta", of: local)
            }
        }
        for key in ["rope_theta", "partial_rotary_factor"] {
            if let value = rope[key] { fields[key] = value }
        }
        let given = try object("rope_scaling").flatMap { $0.isEmpty ? nil : $0 }
        let scaling = given ?? rope
        try RoPEScaling.check(scaling, given == nil ? "rope_parameters" : "rope_scaling")
        let type = RoPEScaling.type(of: scaling)
        let named = scaling.merging(["type": .string(type), "rope_type": .string(type)]) { $1 }
        fields["rope_scaling"] = type == "default" ? .null : .object(try RoPEScaling.complete(named, self))
        guard !rope.isEmpty || !family.texts.isEmpty, fields["rope_local_base_freq"] == nil else { return }
        let turning = fields.filter { ["rope_theta", "partial_rotary_factor"].contains($0.key) }
        fields["rope_parameters"] = .object(
            (self["rope_scaling"].object ?? ["rope_type": .string(type)]).merging(turning) { $1 })
    }

    /// Returns an object; nil if the value is missing, or false in Python.
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
