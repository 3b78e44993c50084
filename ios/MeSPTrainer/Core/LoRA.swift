import Foundation
import MLX

/// How a block's LoRA matrices lie in one flat float32 vector `[count]`: for each module A `[in, rank]`, then B `[rank, out]`, row-major.
/// The projections of a module share its A and have columns of its B each.
struct LoRALayout {
    let architecture: Architecture
    let rank: Int

    var modules: [Module] { architecture.modules }

    /// P, the number of LoRA parameters of a block.
    var count: Int { modules.reduce(0) { $0 + size($1) } }

    private func size(_ module: Module) -> Int {
        let (inputs, outputs) = architecture.dimensions(module)
        return (inputs + outputs) * rank
    }

    /// The matrices of one module as views of `flat`, in `dtype`.
    func matrices(_ module: Module, in flat: MLXArray, dtype: DType = .float32) -> LoRAMatrices {
        let start = modules.prefix { $0 != module }.reduce(0) { $0 + size($1) }
        let (inputs, outputs) = architecture.dimensions(module)
        let middle = start + inputs * rank
        return LoRAMatrices(
            a: flat[start..<middle].reshaped([inputs, rank]).asType(dtype),
            b: flat[middle..<start + size(module)].reshaped([rank, outputs]).asType(dtype))
    }

    /// The matrices of one projection, likewise.
    func matrices(_ projection: Projection, in flat: MLXArray, dtype: DType = .float32) -> LoRAMatrices {
        let (module, outputs) = architecture.place(projection)
        let whole = matrices(module, in: flat, dtype: dtype)
        return module.projections.count == 1 ? whole : LoRAMatrices(a: whole.a, b: whole.b[0..., outputs])
    }

    /// One flat vector from every module's pair of matrices: the inverse of `matrices(_:in:)`.
    func packed(_ matrices: [LoRAMatrices]) -> MLXArray {
        concatenated(
            matrices.flatMap { [$0.a.flattened().asType(.float32), $0.b.flattened().asType(.float32)] })
    }

    /// The flat gradient from every projection's: that of an A which several share is the sum.
    func packed(_ gradients: [Projection: LoRAMatrices]) -> MLXArray {
        packed(
            modules.map { module in
                let parts = module.projections.compactMap { gradients[$0] }
                guard parts.count > 1 else { return parts[0] }
                return LoRAMatrices(
                    a: parts.dropFirst().reduce(parts[0].a) { $0 + $1.a }, b: concatenated(parts.map(\.b), axis: 1))
            })
    }

    /// Initial parameters of a block, float32 `[P]`: A uniform in ±1/√in, B zero, as in mlx-lm.
    func initial(seed: UInt64, block: Int) -> MLXArray {
        let key = MLXRandom.split(key: MLXRandom.key(seed), into: architecture.numHiddenLayers)[block]
        return packed(
            zip(modules, MLXRandom.split(key: key, into: modules.count)).map { module, key in
                let (inputs, outputs) = architecture.dimensions(module)
                let bound = 1 / Float(inputs).squareRoot()
                return LoRAMatrices(
                    a: MLXRandom.uniform(low: -bound, high: bound, [inputs, rank], key: key),
                    b: MLXArray.zeros([rank, outputs]))
            })
    }

    /// 1 for each parameter of these modules, 0 for the others: `[P]`.
    func mask(_ trained: [Module]) -> MLXArray {
        concatenated(
            modules.map { MLXArray.full([size($0)], values: MLXArray(trained.contains($0) ? 1 : Float(0))) })
    }
}

/// A `[in, rank]` and B `[rank, out]` of one module or projection, or their gradients.
struct LoRAMatrices {
    let a: MLXArray
    let b: MLXArray
}

// MARK: - Adapter folders

/// How two libraries name and lay out adapters in a folder.
private enum AdapterFormat: CaseIterable {
    /// mlx-lm and mlx-swift-lm: A `[in, rank]`, B `[rank, out]`, and the scale in the configuration.
    case mlx
    /// Hugging Face PEFT: A `[rank, in]`, B `[out, rank]`, and α in the configuration.
    case peft

    var file: String { self == .mlx ? "adapters.safetensors" : "adapter_model.safetensors" }

    func name(_ matrix: String, _ module: Module, _ block: Int) -> String {
        let layer = "model.layers.\(block).\(module.name)"
        switch self {
        case .mlx: return "\(layer).lora_\(matrix.lowercased())"
        case .peft: return "base_model.model.\(layer).lora_\(matrix).weight"
        }
    }

    /// A matrix as the trainer has it in this format, or the other way round.
    func turned(_ matrix: MLXArray) -> MLXArray { self == .mlx ? matrix : matrix.T }

    func turned(_ shape: [Int]) -> [Int] { self == .mlx ? shape : shape.reversed() }
}

private let configFile = "adapter_config.json"

/// Adapters that were read.
struct Adapters {
    let layout: LoRALayout
    /// What a projection's adapter is multiplied by: α / rank.
    let scale: Float
    /// One flat vector `[P]` a block.
    let lora: [MLXArray]
}

/// Writes adapters as a folder that mlx-lm and mlx-swift-lm load, with a folder `peft` in it that PEFT loads. Each file is replaced at
/// once or not at all, and one matrix at a time is in memory.
///
/// - Parameters:
///   - blocks: those that were trained, up to the last of the model
///   - modules: those of them that were trained; only these are written
///   - model: the Hugging Face id of the base model
///   - lora: a block's parameters `[P]`
func saveAdapters(
    layout: LoRALayout, blocks: Range<Int>, modules: [Module], scale: Float, model: String, to folder: URL,
    lora: @escaping (_ block: Int) throws -> MLXArray
) throws {
    let rank = layout.rank
    func tensors(_ format: AdapterFormat) -> [NewTensor] {
        blocks.flatMap { block in
            modules.flatMap { module -> [NewTensor] in
                let (inputs, outputs) = layout.architecture.dimensions(module)
                return [("A", [inputs, rank], \LoRAMatrices.a), ("B", [rank, outputs], \.b)].map {
                    matrix, shape, path in
                    NewTensor(
                        name: format.name(matrix, module, block), shape: format.turned(shape), dtype: .float32
                    ) {
                        format.turned(layout.matrices(module, in: try lora(block))[keyPath: path])
                    }
                }
            }
        }
    }
    let mlxConfig: [String: Any] = [
        "fine_tune_type": "lora", "num_layers": blocks.count,
        "lora_parameters": [
            "rank": rank, "scale": Double(scale), "dropout": 0.0, "keys": modules.map(\.name),
        ] as [String: Any],
    ]
    let allBlocks = blocks.count == layout.architecture.numHiddenLayers
    let peftConfig: [String: Any] = [
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "r": rank,
        "lora_alpha": Double(scale) * Double(rank), "use_rslora": false, "use_dora": false, "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": false, "inference_mode": true,
        "target_modules": modules.compactMap { $0.name.split(separator: ".").last.map(String.init) },
        "layers_to_transform": allBlocks ? NSNull() : Array(blocks) as Any,
    ]
    func write(_ format: AdapterFormat, _ config: [String: Any], to folder: URL) throws {
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        try writeSafetensors(
            tensors(format), metadata: ["format": "pt"], to: folder.appendingPathComponent(format.file))
        let json = try JSONSerialization.data(withJSONObject: config, options: [.prettyPrinted, .sortedKeys])
        try json.write(to: folder.appendingPathComponent(configFile), options: .atomic)
    }
    do {
        try write(.mlx, mlxConfig, to: folder)
        try write(.peft, peftConfig, to: folder.appendingPathComponent("peft"))
    } catch {
        throw MeSPError("Cannot save the adapters in \(folder.path): \(error.plainSentence).")
    }
}

/// Reads an adapter folder as mlx-lm or PEFT writes it.
///
/// - Parameter absent: a block's parameters `[P]`, from which the matrices that the folder lacks are taken; zero by default
func loadAdapters(
    from folder: URL, architecture: Architecture,
    absent: (LoRALayout, _ block: Int) -> MLXArray = { layout, _ in MLXArray.zeros([layout.count]) }
) throws -> Adapters {
    do {
        let (format, rank, scale) = try readConfig(folder)
        guard rank <= architecture.hiddenSize else {
            throw MeSPError("their rank, \(rank), is above the model's width of \(architecture.hiddenSize)")
        }
        let layout = LoRALayout(architecture: architecture, rank: rank)
        let tensors = try Safetensors(folder.appendingPathComponent(format.file))
        var names = tensors.names
        guard !names.isEmpty else { throw MeSPError("\(format.file) is empty") }

        func take(_ matrix: String, _ module: Module, _ block: Int, _ shape: [Int]) throws -> MLXArray? {
            let name = format.name(matrix, module, block)
            guard names.remove(name) != nil, let found = tensors.shape(name) else { return nil }
            guard found == format.turned(shape), let array = tensors[name] else {
                throw MeSPError("\(name) has the shape \(found), where the model needs \(format.turned(shape))")
            }
            return format.turned(array)
        }
        let lora = try (0..<architecture.numHiddenLayers).map { block in
            let absent = absent(layout, block)
            let flat = layout.packed(
                try layout.modules.map { module in
                    let (inputs, outputs) = architecture.dimensions(module)
                    let a = try take("A", module, block, [inputs, rank])
                    let b = try take("B", module, block, [rank, outputs])
                    guard (a == nil) == (b == nil) else {
                        throw MeSPError("\(format.name(a == nil ? "A" : "B", module, block)) is missing")
                    }
                    let initial = layout.matrices(module, in: absent)
                    return LoRAMatrices(a: a ?? initial.a, b: b ?? initial.b)
                })
            eval(flat)
            return flat
        }
        if let name = names.min() {
            throw MeSPError("it holds \(name), which is not a LoRA matrix of one of this model's layers")
        }
        return Adapters(layout: layout, scale: scale, lora: lora)
    } catch {
        throw MeSPError("Cannot load the adapters in \(folder.path): \(error.plainSentence).")
    }
}

/// The folder's format, and the adapters' rank and scale.
private func readConfig(_ folder: URL) throws -> (format: AdapterFormat, rank: Int, scale: Float) {
    struct Config: Decodable {
        struct Parameters: Decodable {
            let rank: Int
            let scale: Float
        }
        // mlx-lm
        let fineTuneType: String?
        let loraParameters: Parameters?
        // PEFT
        let peftType: String?
        let r: Int?
        let loraAlpha: Float?
        let useRslora: Bool?
        let useDora: Bool?
        let bias: String?
        let rankPattern: [String: Int]?
        let alphaPattern: [String: Float]?
        let modulesToSave: [String]?
    }
    guard let json = regularFile(folder.appendingPathComponent(configFile)) else {
        throw MeSPError("it has no \(configFile)")
    }
    let decoder = JSONDecoder()
    decoder.keyDecodingStrategy = .convertFromSnakeCase
    let config: Config
    do {
        config = try decoder.decode(Config.self, from: json)
    } catch {
        throw MeSPError("\(configFile) is not valid: \(error.plainSentence)")
    }
    func supported(_ condition: Bool, _ kind: String) throws {
        guard condition else { throw MeSPError("they use \(kind), which is not supported; train plain LoRA adapters") }
    }
    let result: (format: AdapterFormat, rank: Int, scale: Float)
    if let type = config.peftType {
        try supported(type == "LORA", type)
        try supported(config.useDora != true, "DoRA")
        try supported(config.bias ?? "none" == "none", "trained biases")
        try supported(config.modulesToSave?.isEmpty ?? true, "modules_to_save")
        try supported(
            (config.rankPattern?.isEmpty ?? true) && (config.alphaPattern?.isEmpty ?? true),
            "ranks or alphas of their own"
        )
        guard let rank = config.r, let alpha = config.loraAlpha else {
            throw MeSPError("\(configFile) lacks r or lora_alpha")
        }
        result = (.peft, rank, config.useRslora == true ? alpha / Float(rank).squareRoot() : alpha / Float(rank))
    } else {
        let type = config.fineTuneType ?? "lora"
        try supported(type == "lora", type == "dora" ? "DoRA" : "fine_tune_type \(type)")
        guard let parameters = config.loraParameters else { throw MeSPError("\(configFile) lacks lora_parameters") }
        result = (.mlx, parameters.rank, parameters.scale)
    }
    guard result.rank >= 1, result.scale.isFinite else {
        throw MeSPError("\(configFile) has a rank or scale that is not a positive number")
    }
    return result
}
