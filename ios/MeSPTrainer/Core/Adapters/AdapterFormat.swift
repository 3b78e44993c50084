import Foundation
import MLX
import MeSPFiles

/// How two libraries name and lay out adapters in a folder.
enum AdapterFormat {
    /// mlx-lm and mlx-swift-lm: A `[in, rank]`, B `[rank, out]`, and the scale in the configuration.
    case mlx
    /// Hugging Face PEFT: A `[rank, in]`, B `[out, rank]`, and α in the configuration.
    case peft

    static let configFile = "adapter_config.json"

    var file: String { self == .mlx ? "adapters.safetensors" : "adapter_model.safetensors" }

    /// - Parameter matrix: A or B
    func name(_ matrix: String, _ module: Module, _ block: Int, of architecture: Architecture) -> String {
        let layer = "layers.\(block).\(module.name)"
        switch self {
        case .mlx: return "\(architecture.mlxPrefix).\(layer).lora_\(matrix.lowercased())"
        case .peft: return "base_model.model.\(architecture.hfPrefix).\(layer).lora_\(matrix).weight"
        }
    }

    /// A matrix as the trainer has it in this format, or the other way round.
    func turned(_ matrix: MLXArray) -> MLXArray { self == .mlx ? matrix : matrix.T }

    func turned(_ shape: [Int]) -> [Int] { self == .mlx ? shape : shape.reversed() }

    /// The folder's configuration for adapters on some `modules` of some `blocks`.
    func config(
        rank: Int, scale: Double, blocks: Range<Int>, of architecture: Architecture, modules: [Module], model: String
    ) -> [String: Any] {
        switch self {
        case .mlx:
            return [
                "fine_tune_type": "lora", "num_layers": blocks.count,
                "lora_parameters": [
                    "rank": rank, "scale": scale, "dropout": 0.0, "keys": modules.map(\.name),
                ] as [String: Any],
            ]
        case .peft:
            let allBlocks = blocks.count == architecture.numHiddenLayers
            // Beside a text there are other parts, with modules of the same last names: there a pattern says which are meant.
            let isAlone = architecture.hfPrefix == "model"
            return [
                "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "r": rank,
                "lora_alpha": scale * Double(rank), "use_rslora": false, "use_dora": false, "lora_dropout": 0.0,
                "bias": "none", "fan_in_fan_out": false, "inference_mode": true,
                "target_modules": isAlone
                    ? modules.compactMap { $0.name.split(separator: ".").last.map(String.init) }
                    : pattern(of: modules, blocks, prefix: architecture.hfPrefix) as Any,
                "layers_to_transform": allBlocks || !isAlone ? NSNull() : Array(blocks) as Any,
            ]
        }
    }

    /// A regular expression of the modules' whole names.
    private func pattern(of modules: [Module], _ blocks: Range<Int>, prefix: String) -> String {
        let names = modules.map(\.name).joined(separator: "|")
        return "\(prefix).layers.(\(blocks.map(String.init).joined(separator: "|"))).(\(names))"
            .replacingOccurrences(of: ".", with: "\\.")
    }

    /// The folder's format, and the adapters' rank and scale.
    static func read(_ folder: URL) throws -> (format: AdapterFormat, rank: Int, scale: Float) {
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
        guard let json = regularFile(folder.appendingPathComponent(configFile), followsLinks: true) else {
            throw MeSPError("it has no \(configFile)")
        }
        let config: Config
        do {
            config = try JSONDecoder.snakeCase.decode(Config.self, from: json)
        } catch {
            throw MeSPError("\(configFile) is not valid: \(error.plainSentence)")
        }
        func supported(_ condition: Bool, _ kind: Sentence) throws {
            guard condition else {
                throw MeSPError("they use \(kind), which is not supported; train plain LoRA adapters")
            }
        }
        let result: (format: AdapterFormat, rank: Int, scale: Float)
        if let type = config.peftType {
            try supported(type == "LORA", "\(type)")
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
}
