import MeSPBundle
import MeSPFiles
import MeSPSentences

/// How MLX has quantized a matrix.
struct Quantization: Equatable {
    let bits: Int
    let groupSize: Int
    let mode: String

    /// The bits and the group size of modes that leave no choice.
    private static let modes = ["mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)]

    var hasBiases: Bool { mode == "affine" }

    private var isOfMLX: Bool {
        if hasBiases { return [2, 3, 4, 5, 6, 8].contains(bits) && [32, 64, 128].contains(groupSize) }
        return Self.modes[mode].map { $0 == (bits, groupSize) } ?? false
    }

    /// Reads an entry of a config.json.
    init(_ entry: [String: JSONValue], of model: String) throws {
        func number(_ key: String) throws -> Int? {
            switch entry[key] ?? .null {
            case .null, .integer(0): nil
            case .integer(let number): number
            default: throw unusable("quantization")
            }
        }
        guard let mode = (entry["mode"] ?? .string("affine")).string else { throw unusable("quantization") }
        let usual = Self.modes[mode] ?? (4, 64)
        self.mode = mode
        (bits, groupSize) = (try number("bits") ?? usual.0, try number("group_size") ?? usual.1)
        guard isOfMLX else {
            throw MeSPError(
                "\(model) is quantized to \(mode == "affine" ? "" : "\(mode), ")\(String(bits)) bits in groups of \(String(groupSize)), which MLX does not have; take the model it was made from."
            )
        }
    }

    /// The arrays of a matrix `[rows, columns]`, with those of 16 or 32 bits in the bundle's type.
    func arrays(_ prefix: String, rows: Int, columns: Int, _ dtype: ElementType) -> [PlacedArray] {
        let groups = [rows, columns / groupSize]
        let packed = [
            PlacedArray(prefix + "weight", [rows, columns * bits / 32], .uint32),
            PlacedArray(prefix + "scales", groups, hasBiases ? dtype : .uint8),
        ]
        return hasBiases ? packed + [PlacedArray(prefix + "biases", groups, dtype)] : packed
    }

    var entry: JSONValue {
        .object(["bits": .integer(bits), "group_size": .integer(groupSize), "mode": .string(mode)])
    }
}

/// The quantizations of a model's matrices, by its config.json.
struct Quantizations {
    let main: Quantization
    /// Of modules that differ, by their names here; one with nil is not quantized.
    private let others: [String: Quantization?]
    /// The model's own `quantization`.
    let entry: JSONValue

    /// - Parameters:
    ///   - model: the model's name, for messages.
    ///   - source: what `mesp-export` takes it by.
    init(_ config: ConfigJSON, of model: String, source: String) throws {
        for key in ["quantization_config", "quantization"] where config.original[key]?.isTruthy == true {
            guard config.original[key]?.object != nil else { throw unusable("\(key)") }
        }
        if let method = config.original["quantization_config"]?.object?["quant_method"], method.isTruthy {
            throw MeSPError(
                "\(model) is quantized by \(method.string ?? method.json), which is not supported; take the model it was made from, or one quantized by mlx-lm."
            )
        }
        guard let given = config.original["quantization"]?.object, !given.isEmpty else {
            throw MeSPError(
                "\(model) is not quantized; take one of mlx-community that is, or export it on a computer: mesp-export --model \(source)"
            )
        }
        let main = try Quantization(given, of: model)
        var others = [String: Quantization?]()
        for (name, entry) in given {
            // As mlx-lm: a dictionary for a module's own, or whether it is quantized as the rest.
            let own: Quantization?
            switch entry {
            case .object(let fields): own = try Quantization(fields, of: model)
            case .bool(let isQuantized): own = isQuantized ? main : nil
            default: continue
            }
            if let here = TensorNames.here(name, config.family) { others[here] = .some(own) }
        }
        (self.main, self.others, self.entry) = (main, others, .object(given))
    }

    func of(_ module: String) throws -> Quantization {
        guard let own = others[module] else { return main }
        guard let own else { throw notQuantized(module) }
        return own
    }

    /// The quantization of a matrix with these columns, which whole groups must fill.
    func of(_ module: String, columns: Int) throws -> Quantization {
        let quantization = try of(module)
        guard columns % quantization.groupSize == 0 else {
            throw MeSPError(
                "Groups of \(quantization.groupSize) weights do not divide the rows of \(columns) of \(module); take another --group-size, such as 32."
            )
        }
        return quantization
    }
}

/// The error for a matrix that is not quantized in a model that is.
func notQuantized(_ module: String) -> MeSPError {
    MeSPError(
        "\(module) is not quantized, unlike the rest of the model, which is not supported; take the model it was made from."
    )
}
