import Foundation
import MLX

/// The seven projections of a block that LoRA adapts, in the order in which they lie in the flat parameter vector.
/// The raw value is the module's name in Hugging Face and mlx-lm checkpoints.
enum Projection: String, CaseIterable {
    case q = "self_attn.q_proj"
    case k = "self_attn.k_proj"
    case v = "self_attn.v_proj"
    case o = "self_attn.o_proj"
    case gate = "mlp.gate_proj"
    case up = "mlp.up_proj"
    case down = "mlp.down_proj"

    /// The short name: `q`, …, `down`.
    var name: String { String(rawValue.split(separator: ".")[1].dropLast("_proj".count)) }

    init?(name: String) {
        guard let projection = Self.allCases.first(where: { $0.name == name }) else { return nil }
        self = projection
    }

    var hasBias: Bool { self == .q || self == .k || self == .v }

    /// (input, output) features.
    func dimensions(_ a: Architecture) -> (Int, Int) {
        let (attention, keyValue) = (a.numAttentionHeads * a.headDim, a.numKeyValueHeads * a.headDim)
        switch self {
        case .q: return (a.hiddenSize, attention)
        case .k, .v: return (a.hiddenSize, keyValue)
        case .o: return (attention, a.hiddenSize)
        case .gate, .up: return (a.hiddenSize, a.intermediateSize)
        case .down: return (a.intermediateSize, a.hiddenSize)
        }
    }
}

/// How a block's LoRA matrices lie in one flat float32 vector `[count]`: for each projection A `[in, rank]`, then B
/// `[rank, out]`, row-major.
struct LoRALayout {
    let architecture: Architecture
    let rank: Int

    /// P, the number of LoRA parameters of a block.
    var count: Int { Projection.allCases.reduce(0) { $0 + size($1) } }

    private func size(_ projection: Projection) -> Int {
        let (inputs, outputs) = projection.dimensions(architecture)
        return (inputs + outputs) * rank
    }

    /// The matrices of one projection as views of `flat`, in `dtype`.
    func matrices(_ projection: Projection, in flat: MLXArray, dtype: DType = .float32) -> LoRAMatrices {
        let start = Projection.allCases.prefix { $0 != projection }.reduce(0) { $0 + size($1) }
        let (inputs, outputs) = projection.dimensions(architecture)
        let middle = start + inputs * rank
        return LoRAMatrices(
            a: flat[start..<middle].reshaped([inputs, rank]).asType(dtype),
            b: flat[middle..<start + size(projection)].reshaped([rank, outputs]).asType(dtype))
    }

    /// One flat vector from every projection's pair of matrices: the inverse of `matrices(_:in:)`.
    func packed(_ matrices: [Projection: LoRAMatrices]) -> MLXArray {
        concatenated(
            Projection.allCases.compactMap { matrices[$0] }
                .flatMap { [$0.a.flattened().asType(.float32), $0.b.flattened().asType(.float32)] })
    }

    /// Initial parameters of a block, float32 `[P]`: A uniform in ±1/√in, B zero, as in mlx-lm.
    func initial(seed: UInt64, block: Int) -> MLXArray {
        let key = MLXRandom.split(key: MLXRandom.key(seed), into: architecture.numHiddenLayers)[block]
        let keys = MLXRandom.split(key: key, into: Projection.allCases.count)
        var pairs = [Projection: LoRAMatrices]()
        for (projection, key) in zip(Projection.allCases, keys) {
            let (inputs, outputs) = projection.dimensions(architecture)
            let bound = 1 / Float(inputs).squareRoot()
            pairs[projection] = LoRAMatrices(
                a: MLXRandom.uniform(low: -bound, high: bound, [inputs, rank], key: key),
                b: MLXArray.zeros([rank, outputs]))
        }
        return packed(pairs)
    }

    /// 1 for each parameter of these projections, 0 for the others: `[P]`.
    func mask(_ projections: [Projection]) -> MLXArray {
        concatenated(
            Projection.allCases.map {
                MLXArray.full([size($0)], values: MLXArray(projections.contains($0) ? 1 : Float(0)))
            })
    }
}

/// A `[in, rank]` and B `[rank, out]` of one projection, or their gradients.
struct LoRAMatrices {
    let a: MLXArray
    let b: MLXArray
}

/// Writes `lora` (one flat vector a block) as an adapter folder that mlx-lm and mlx-swift-lm load: float32
/// `model.layers.N.….lora_a` `[in, rank]`, `.lora_b` `[rank, out]` of the last `trained` blocks and of `projections`, and
/// `adapter_config.json`. Each file is replaced at once or not at all.
func saveAdapters(
    _ lora: [MLXArray], layout: LoRALayout, trained: Range<Int>, projections: [Projection], scale: Float, to folder: URL
) throws {
    var arrays = [String: MLXArray]()
    for index in trained {
        for projection in projections {
            let pair = layout.matrices(projection, in: lora[index])
            arrays["model.layers.\(index).\(projection.rawValue).lora_a"] = pair.a
            arrays["model.layers.\(index).\(projection.rawValue).lora_b"] = pair.b
        }
    }
    let config: [String: Any] = [
        "fine_tune_type": "lora", "num_layers": trained.count,
        "lora_parameters": [
            "rank": layout.rank, "scale": scale, "dropout": 0.0, "keys": projections.map(\.rawValue),
        ] as [String: Any],
    ]
    do {
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        let json = try JSONSerialization.data(withJSONObject: config, options: [.prettyPrinted, .sortedKeys])
        try json.write(to: folder.appendingPathComponent("adapter_config.json"), options: .atomic)
        try replace(folder.appendingPathComponent("adapters.safetensors"), with: arrays)
    } catch let error as MeSPError {
        throw error
    } catch {
        throw MeSPError("Cannot save the adapters in \(folder.path): \(error.plainSentence).")
    }
}
