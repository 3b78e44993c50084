import MeSPBundle
import MeSPFiles
import MeSPSentences

struct Quantization: Equatable {
    let bits: Int
    let groupSize: Int
    let mode: String

    /// The bits and the group size of modes in which both are fixed.
    private static let modes = ["mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)]

    var hasBiases: Bool { mode == "affine" }

    /// Whether the codes have 1 bit. MLX on phones does not support 1 bit.
    var isOneBit: Bool { bits == 1 }

    var inBundle: Self { isOneBit ? Self(bits: 2, groupSize: groupSize, mode: mode) : self }

    private var isSupported: Bool {
        if hasBiases { return [1, 2, 3, 4, 5, 6, 8].contains(bits) && [32, 64, 128].contains(groupSize) }
        return Self.modes[mode].map { $0 == (bits, groupSize) } ?? false
    }

    private init(bits: Int, groupSize: Int, mode: String) {
        (self.bits, self.groupSize, self.mode) = (bits, groupSize, mode)
    }

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
        guard isSupported else {
            let size: Sentence = isOneBit ? "1 bit" : "\(String(bits)) bits"
            throw MeSPError(
                "\(model) is quantized to \(mode == "affine" ? "" : "\(mode), ")\(size) in groups of \(String(groupSize)), which MLX does not have; take the model it was made from."
            )
        }
    }

    /// Returns the arrays of a matrix `[rows, columns]`. Affine scales and biases have the type `dtype`.
    ///
    /// - Parameters:
    ///   - name: the matrix's name in its file; empty for a table.
    func arrays(_ name: String, rows: Int, columns: Int, _ dtype: ElementType) -> [PlacedArray] {
        func named(_ part: String) -> String { name.isEmpty ? part : "\(name).\(part)" }
        let groups = [rows, columns / groupSize]
        let packed = PlacedArray(named("weight"), [rows, columns * bits / 32], .uint32)
        let scales = PlacedArray(named("scales"), groups, hasBiases ? dtype : .uint8)
        return [packed, scales] + (hasBiases ? [PlacedArray(named("biases"), groups, dtype)] : [])
    }

    var entry: JSONValue {
        .object(["bits": .integer(bits), "group_size": .integer(groupSize), "mode": .string(mode)])
    }
}

struct Quantizations {
    let main: Quantization
    /// The quantizations that config.json gives for single modules, by the module's name in MeSP; nil for a module without quantization.
    private let others: [String: Quantization?]
    let entry: JSONValue
    let hasOneBit: Bool

    private static let keys = ["bits", "group_size", "mode"]
    private static let modules = ["lm_head", "embed_tokens"]

    init(_ config: ConfigJSON, of model: String, source: String) throws {
        try Self.checkSections(config.original, of: model)
        guard let given = config.original["quantization"]?.object, !given.isEmpty else {
            throw MeSPError(
                "\(model) is not quantized; take one of mlx-community that is, or export it on a computer: mesp-export --model \(source)"
            )
        }
        let main = try Quantization(given, of: model)
        var others = [String: Quantization?]()
        for (name, entry) in given {
            // An entry is the module's own quantization, or a flag that says whether the module has the main quantization.
            let own: Quantization?
            switch entry {
            case .object(let fields): own = try Quantization(fields, of: model)
            case .bool(let isQuantized): own = isQuantized ? main : nil
            default: continue
            }
            if let here = TensorNames.here(name, config.family) { others[here] = .some(own) }
        }
        (self.main, self.others, entry) = (main, others, Self.in2Bits(.object(given)))
        hasOneBit = main.isOneBit || others.values.contains { $0?.isOneBit == true }
    }

    /// Throws if a section about quantization is not in MLX's format, or has a key that MeSP does not read.
    private static func checkSections(_ config: [String: JSONValue], of model: String) throws {
        let parts = [config] + (config["text_config"]?.object.map { [$0] } ?? [])
        for key in ["quantization_config", "quantization"] {
            for section in parts.compactMap({ $0[key] }) where section.isTruthy {
                guard let section = section.object else { throw unusable("\(key)") }
                if let method = section["quant_method"], method.isTruthy { throw notOfMLX(model, method) }
                for (name, value) in section.sorted(by: { $0.key < $1.key }) {
                    switch value {
                    case .object(let own) where name.contains(".") || modules.contains(name):
                        for (inner, its) in own.sorted(by: { $0.key < $1.key })
                        where !keys.contains(inner) && its.isTruthy {
                            throw unsupported("\(key)'s \(inner) of \(name)", its)
                        }
                    case .bool where name.contains(".") || modules.contains(name): break
                    default:
                        guard keys.contains(name) || !value.isTruthy else {
                            throw unsupported("\(key)'s \(name)", value)
                        }
                    }
                }
                // mlx-lm reads only the `quantization` at the top level.
                guard config["quantization"]?.isTruthy == true else { throw unsupported(key, .object(section)) }
            }
        }
    }

    private static func notOfMLX(_ model: String, _ method: JSONValue) -> MeSPError {
        if method == .string("bitnet") {
            return MeSPError(
                "\(model) is quantized by bitnet, which is not supported; take a GGUF file of it with blocks of TQ1_0 or TQ2_0, whose activations are not rounded here, or a model quantized by mlx-lm."
            )
        }
        return MeSPError(
            "\(model) is quantized by \(method.string ?? method.json), which is not supported; take the model it was made from, or one quantized by mlx-lm."
        )
    }

    static func in2Bits(_ section: JSONValue) -> JSONValue {
        guard case .object(var fields) = section else { return section }
        fields = fields.mapValues { if case .object = $0 { in2Bits($0) } else { $0 } }
        if fields["bits"] == .integer(1) { fields["bits"] = .integer(2) }
        return .object(fields)
    }

    /// Returns the quantization of a module in the model's files. Throws if the module is not quantized.
    func inFiles(_ module: String) throws -> Quantization {
        guard let own = others[module] else { return main }
        guard let own else { throw notQuantized(module) }
        return own
    }

    /// Returns the quantization of a module's matrix in the bundle. Throws if the module is not quantized, or if the group size does not divide the
    /// number of columns.
    func of(_ module: String, columns: Int) throws -> Quantization {
        let quantization = try inFiles(module).inBundle
        guard columns % quantization.groupSize == 0 else {
            throw MeSPError(
                "Groups of \(quantization.groupSize) weights do not divide the rows of \(columns) of \(module); take another --group-size, such as 32."
            )
        }
        return quantization
    }
}

func notQuantized(_ module: String) -> MeSPError {
    MeSPError(
        "\(module) is not quantized, unlike the rest of the model, which is not supported; take the model it was made from."
    )
}
