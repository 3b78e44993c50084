import Foundation
import MLX
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// The format of a library's adapters: names and layouts. DoRA's m is `[out]` in both formats.
package enum AdapterFormat {
    /// The format of mlx-lm and mlx-swift-lm: A `[in, rank]`, B `[rank, out]`, and the scale in the configuration. Experts have A `[experts, rank,
    /// in]` and B `[experts, out, rank]`.
    case mlx
    /// The format of Hugging Face PEFT: A `[rank, in]`, B `[out, rank]`, and α in the configuration. Experts have A `[experts · rank, in]` and B
    /// `[out, rank · experts]`.
    case peft

    package static let configFile = "adapter_config.json"

    package var file: String { self == .mlx ? "adapters.safetensors" : "adapter_model.safetensors" }

    /// Returns a block's linear layers in this format, and the layers or parameters that stand for experts' matrices.
    func layers(of block: BlockShape) -> [AdaptedLayer] {
        let joined = self == .peft ? block.architecture.hfModules ?? [] : []
        return block.trainable.compactMap { module in
            guard let layer = joined.first(where: { $0.parts.contains(module.name) }) else {
                return AdaptedLayer(name: module.name, modules: [module])
            }
            guard layer.parts.first == module.name else { return nil }
            let parts = layer.parts.compactMap { part in block.trainable.first { $0.name == part } }
            return AdaptedLayer(name: layer.name, modules: parts)
        }
    }

    /// - Parameters:
    ///   - matrix: `A`, `B` or `m`.
    ///   - layer: a layer from `layers(of:)`.
    ///   - prefix: the prefix of the blocks' names; nil for the architecture's.
    ///   - isNested: whether both parameters of the experts have adapters. PEFT then nests their wrappers.
    package func name(
        _ matrix: String, _ layer: AdaptedLayer, _ block: Int, of architecture: Architecture, prefix: String? = nil,
        isNested: Bool = true
    ) -> String {
        let blocks = "\(prefix ?? self.prefix(of: architecture)).layers.\(block)."
        let place = "base_model.model.\(blocks)\(layer.wrapper(isNested: isNested))"
        switch (self, matrix) {
        case (.mlx, "m"): return "\(blocks)\(layer.name).m"
        case (.mlx, _): return "\(blocks)\(layer.name).lora_\(matrix.lowercased())"
        case (.peft, "m"): return "\(place).lora_magnitude_vector"
        case (.peft, _): return "\(place).lora_\(matrix).weight"
        }
    }

    /// Returns the prefix of the blocks' names.
    func prefix(of architecture: Architecture) -> String {
        self == .mlx ? architecture.mlxPrefix : architecture.hfPrefix
    }

    /// Returns the prefix of the blocks' names in a file whose tensors have these names. PEFT's prefix differs if only the text model of a multimodal
    /// model was loaded for training.
    func prefix(of architecture: Architecture, in names: Set<String>) -> String {
        let prefix = prefix(of: architecture)
        let isAlone = self == .peft && !names.contains { $0.hasPrefix("base_model.model.\(prefix).layers.") }
        return isAlone ? "model" : prefix
    }

    /// Returns the trainer's matrix A, B or m in this format.
    func turned(_ array: MLXArray, _ matrix: String) -> MLXArray {
        guard array.ndim == 3 else { return self == .mlx ? array : array.T }
        switch (self, matrix) {
        case (.mlx, _): return array.transposed(0, 2, 1)
        case (.peft, "A"): return array.transposed(0, 2, 1).flattened(end: 1)
        case (.peft, _): return array.transposed(2, 1, 0).flattened(start: 1)
        }
    }

    /// Returns the trainer's matrix, of this shape, from a matrix in this format. The function is the inverse of `turned`.
    func turnedBack(_ array: MLXArray, _ matrix: String, to shape: [Int]) -> MLXArray {
        guard shape.count == 3 else { return self == .mlx ? array : array.T }
        switch (self, matrix) {
        case (.mlx, _): return array.transposed(0, 2, 1)
        case (.peft, "A"): return array.reshaped([shape[0], shape[2], shape[1]]).transposed(0, 2, 1)
        case (.peft, _): return array.reshaped(shape.reversed()).transposed(2, 1, 0)
        }
    }

    /// Returns the shape in this format of a matrix with this shape in the trainer.
    package func turned(_ shape: [Int], _ matrix: String) -> [Int] {
        guard shape.count == 3 else { return self == .mlx ? shape : shape.reversed() }
        switch (self, matrix) {
        case (.mlx, _): return [shape[0], shape[2], shape[1]]
        case (.peft, "A"): return [shape[0] * shape[2], shape[1]]
        case (.peft, _): return [shape[2], shape[1] * shape[0]]
        }
    }

    /// Returns the configuration for adapters of some `modules` in some `blocks`.
    func config(
        rank: Int, scale: Double, dropout: Double, isDoRA: Bool, blocks: Range<Int>, of architecture: Architecture,
        modules: [Module], model: String
    ) -> [String: Any] {
        switch self {
        case .mlx:
            return [
                "fine_tune_type": isDoRA ? "dora" : "lora", "num_layers": blocks.count,
                "lora_parameters": [
                    "rank": rank, "scale": scale, "dropout": dropout, "keys": modules.map(\.name),
                ] as [String: Any],
            ]
        case .peft:
            let allBlocks = blocks.count == architecture.numHiddenLayers
            let layers = self.layers(of: architecture, modules)
            let joined = layers.filter { $0.modules.count > 1 }.map { ($0.name, rank * $0.modules.count) }
            // A multimodal model, and a block with experts, may have other modules with the same last names. Then a pattern of whole names is needed.
            let isAlone = architecture.hfPrefix == "model" && !architecture.hasExperts
            let linear = layers.filter { !$0.isStacked }
            let parameters = blocks.flatMap { block in
                self.layers(of: architecture.block(block))
                    .filter { $0.isStacked && $0.modules.contains(where: modules.contains) }
                    .map { "\(architecture.hfPrefix).layers.\(block).\($0.name)" }
            }
            return [
                "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "r": rank,
                "lora_alpha": scale * Double(rank), "use_rslora": false, "use_dora": isDoRA,
                // PEFT refuses dropout for parameters (experts). PEFT uses the value only in training.
                "lora_dropout": parameters.isEmpty ? dropout : 0,
                "bias": "none", "fan_in_fan_out": false, "inference_mode": true,
                "rank_pattern": Dictionary(uniqueKeysWithValues: joined),
                "alpha_pattern": Dictionary(uniqueKeysWithValues: joined).mapValues { scale * Double($0) },
                "target_modules": isAlone || linear.isEmpty
                    ? linear.compactMap { $0.name.split(separator: ".").last.map(String.init) }
                    : pattern(of: linear, blocks, prefix: architecture.hfPrefix) as Any,
                "target_parameters": parameters.isEmpty ? NSNull() : parameters as Any,
                "layers_to_transform": allBlocks || !isAlone ? NSNull() : Array(blocks) as Any,
            ]
        }
    }

    /// Returns the layers of all blocks that contain some of the modules, without duplicates.
    func layers(of architecture: Architecture, _ modules: [Module]) -> [AdaptedLayer] {
        architecture.kinds.flatMap(layers).reduce(into: []) { found, layer in
            guard layer.modules.contains(where: modules.contains) else { return }
            if !found.contains(where: { $0.name == layer.name }) { found.append(layer) }
        }
    }

    /// Returns a regular expression of the layers' whole names.
    private func pattern(of layers: [AdaptedLayer], _ blocks: Range<Int>, prefix: String) -> String {
        let names = layers.map(\.name).joined(separator: "|")
        return "\(prefix).layers.(\(blocks.map(String.init).joined(separator: "|"))).(\(names))"
            .replacingOccurrences(of: ".", with: "\\.")
    }

    static func unsupported(_ what: String) -> MeSPError {
        MeSPError("they use \(what), which is not supported; train plain LoRA adapters")
    }

    /// Throws unless `isSupported`: every layer must have the folder's rank and α, or n times both if the layer joins n modules.
    static func checkRanks(_ isSupported: Bool) throws {
        guard isSupported else { throw unsupported("rank_pattern or alpha_pattern") }
    }
}

/// A linear layer in the model of a library. The layer is one of a block's modules, or joins several modules by concatenating their outputs. In
/// PEFT's format the layer may also be a parameter of experts.
package struct AdaptedLayer {
    let name: String
    let modules: [Module]

    package init(name: String, modules: [Module]) { (self.name, self.modules) = (name, modules) }

    var isStacked: Bool { modules.allSatisfy(\.isStacked) }

    /// Returns the part of PEFT's names before `lora_A`. For a linear layer this part is the layer's name. For a parameter of experts it is the name
    /// of the module with the parameter, because PEFT wraps this module once for each parameter. The first wrapper, for the gate, is inside the
    /// second wrapper.
    fileprivate func wrapper(isNested: Bool) -> String {
        guard isStacked, let end = name.lastIndex(of: ".") else { return name }
        return name[..<end] + (isNested && modules.contains { $0.projections == [.expertGate] } ? ".base_layer" : "")
    }

    /// Returns A, B and m of the joined layer from the A, B and m of its modules. The joined layer has the same outputs as the modules together. The
    /// A are concatenated, and the B are on a block diagonal.
    func joined(_ parts: [LoRAMatrices]) -> LoRAMatrices {
        guard parts.count > 1 else { return parts[0] }
        let magnitudes = parts.compactMap(\.m)
        let rows = parts.indices.map { row in
            let blocks = parts.indices.map {
                $0 == row ? parts[row].b : MLXArray.zeros(parts[row].b.shape.dropLast() + [parts[$0].b.dim(-1)])
            }
            return concatenated(blocks, axis: -1)
        }
        return LoRAMatrices(
            a: concatenated(parts.map(\.a), axis: -1), b: concatenated(rows, axis: -2),
            m: magnitudes.isEmpty ? nil : concatenated(magnitudes))
    }

    /// Returns the matrices of each module from A, B or m of the layer. If `joins` is set, each module has its own `rank` columns of A and rows of B.
    /// Otherwise all modules share these columns and rows.
    func parts(
        a: MLXArray?, b: MLXArray?, m: MLXArray?, rank: Int, joins: Bool, in block: BlockShape
    ) -> [(a: MLXArray?, b: MLXArray?, m: MLXArray?)] {
        var start = 0
        return modules.enumerated().map { index, module in
            let first = joins ? index * rank : 0
            let outputs = start..<start + block.dimensions(module).outputs
            start = outputs.upperBound
            return (a?[.ellipsis, first..<first + rank], b?[.ellipsis, first..<first + rank, outputs], m?[outputs])
        }
    }
}
