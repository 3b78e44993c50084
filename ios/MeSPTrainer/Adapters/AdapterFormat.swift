import Foundation
import MLX
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// A file format of adapters. m has the shape `[out]` in both formats.
package enum AdapterFormat {
    /// The format of mlx-lm and mlx-swift-lm: A `[in, rank]` and B `[rank, out]`. Experts have A `[experts, rank, in]` and B `[experts, out, rank]`.
    case mlx
    /// The format of Hugging Face PEFT: A `[rank, in]` and B `[out, rank]`. Experts have A `[experts · rank, in]` and B `[out, rank · experts]`.
    case peft

    package static let configFile = "adapter_config.json"

    package var file: String { self == .mlx ? "adapters.safetensors" : "adapter_model.safetensors" }

    /// Returns the layers of a block that can have adapters in this format, including parameters of experts.
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

    /// Returns the name of a tensor in this format.
    ///
    /// - Parameters:
    ///   - matrix: `A`, `B` or `m`.
    ///   - prefix: the part of the name before `.layers`. The default is the architecture's.
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

    func prefix(of architecture: Architecture) -> String {
        self == .mlx ? architecture.mlxPrefix : architecture.hfPrefix
    }

    /// Returns the part of tensor names before `.layers` in a file. PEFT writes `model` if only the text model of a multimodal model was trained.
    func prefix(of architecture: Architecture, in names: Set<String>) -> String {
        let prefix = prefix(of: architecture)
        let isAlone = self == .peft && !names.contains { $0.hasPrefix("base_model.model.\(prefix).layers.") }
        return isAlone ? "model" : prefix
    }

    func turned(_ array: MLXArray, _ matrix: String) -> MLXArray {
        guard array.ndim == 3 else { return self == .mlx ? array : array.T }
        switch (self, matrix) {
        case (.mlx, _): return array.transposed(0, 2, 1)
        case (.peft, "A"): return array.transposed(0, 2, 1).flattened(end: 1)
        case (.peft, _): return array.transposed(2, 1, 0).flattened(start: 1)
        }
    }

    func turnedBack(_ array: MLXArray, _ matrix: String, to shape: [Int]) -> MLXArray {
        guard shape.count == 3 else { return self == .mlx ? array : array.T }
        switch (self, matrix) {
        case (.mlx, _): return array.transposed(0, 2, 1)
        case (.peft, "A"): return array.reshaped([shape[0], shape[2], shape[1]]).transposed(0, 2, 1)
        case (.peft, _): return array.reshaped(shape.reversed()).transposed(2, 1, 0)
        }
    }

    package func turned(_ shape: [Int], _ matrix: String) -> [Int] {
        guard shape.count == 3 else { return self == .mlx ? shape : shape.reversed() }
        switch (self, matrix) {
        case (.mlx, _): return [shape[0], shape[2], shape[1]]
        case (.peft, "A"): return [shape[0] * shape[2], shape[1]]
        case (.peft, _): return [shape[2], shape[1] * shape[0]]
        }
    }

    func config(
        rank: Int, scale: Double, dropout: Double, isDoRA: Bool, blocks: Range<Int>, of architecture: Architecture,
        modules: [Module], model: String
    ) -> [String: Any] {
        switch self {
        case .mlx:
            var parameters: [String: Any] = ["rank": rank, "scale": scale, "dropout": dropout]
            // mlx-lm's keys are names within a block, mlx-vlm's are whole names. Without keys both adapt all matrices of a block, and B is 0 where the
            // file has none.
            if architecture.mlxPrefix == "model" || architecture.hasExperts { parameters["keys"] = modules.map(\.name) }
            return [
                "fine_tune_type": isDoRA ? "dora" : "lora", "num_layers": blocks.count, "lora_parameters": parameters,
            ]
        case .peft:
            let allBlocks = blocks.count == architecture.numHiddenLayers
            let layers = self.layers(of: architecture, modules)
            let joined = layers.filter { $0.modules.count > 1 }.map { ($0.name, rank * $0.modules.count) }
            // In a multimodal model or with experts, other modules may end with the same names. Then a pattern of full names is needed.
            let isAlone = architecture.hfPrefix == "model" && !architecture.hasExperts
            let linear = layers.filter { !$0.isStacked }
            let parameters = blocks.flatMap { block in
                self.layers(of: architecture.block(block))
                    .filter { $0.isStacked && $0.modules.contains(where: modules.contains) }
                    .map { "\(architecture.hfPrefix).layers.\(block).\($0.name)" }
            }
            let (numbers, names) = (blocks.map(String.init), linear.map(\.name))
            let pattern =
                "\(architecture.hfPrefix).layers.(\(numbers.joined(separator: "|"))).(\(names.joined(separator: "|")))"
                .replacingOccurrences(of: ".", with: "\\.")
            return [
                "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "r": rank,
                "lora_alpha": scale * Double(rank), "use_rslora": false, "use_dora": isDoRA,
                // PEFT does not allow dropout for experts' parameters.
                "lora_dropout": parameters.isEmpty ? dropout : 0,
                "bias": "none", "fan_in_fan_out": false, "inference_mode": true,
                "rank_pattern": Dictionary(uniqueKeysWithValues: joined),
                "alpha_pattern": Dictionary(uniqueKeysWithValues: joined).mapValues { scale * Double($0) },
                "target_modules": isAlone || linear.isEmpty
                    ? linear.compactMap { $0.name.split(separator: ".").last.map(String.init) }
                    : pattern as Any,
                "target_parameters": parameters.isEmpty ? NSNull() : parameters as Any,
                "layers_to_transform": allBlocks || !isAlone ? NSNull() : Array(blocks) as Any,
            ]
        }
    }

    func layers(of architecture: Architecture, _ modules: [Module]) -> [AdaptedLayer] {
        architecture.kinds.flatMap(layers).reduce(into: []) { found, layer in
            guard layer.modules.contains(where: modules.contains) else { return }
            if !found.contains(where: { $0.name == layer.name }) { found.append(layer) }
        }
    }

    static func unsupported(_ what: String) -> MeSPError {
        MeSPError("they use \(what), which is not supported; train plain LoRA adapters")
    }

    static func checkRanks(_ isSupported: Bool) throws {
        guard isSupported else { throw unsupported("rank_pattern or alpha_pattern") }
    }
}

/// A layer that can have adapters, as another library's code for the model defines it.
///
/// It is one module, or a linear layer that concatenates the outputs of several modules, or a parameter of experts.
package struct AdaptedLayer {
    let name: String
    let modules: [Module]

    package init(name: String, modules: [Module]) { (self.name, self.modules) = (name, modules) }

    var isStacked: Bool { modules.allSatisfy(\.isStacked) }

    /// Returns the layer's part of PEFT's tensor names.
    ///
    /// PEFT wraps the experts' module once for each parameter with adapters. The wrapper for the parameter with the experts' gates is inside the
    /// other one.
    fileprivate func wrapper(isNested: Bool) -> String {
        guard isStacked, let end = name.lastIndex(of: ".") else { return name }
        return name[..<end] + (isNested && modules.contains { $0.projections == [.expertGate] } ? ".base_layer" : "")
    }

    /// Returns the matrices of the layer from those of its modules. The A and the m are concatenated. The B form a block-diagonal matrix.
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

    /// Splits A, B and m of the layer among its modules. With `joins`, each module has its own `rank` columns of A and rows of B. Otherwise the
    /// modules share them.
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
