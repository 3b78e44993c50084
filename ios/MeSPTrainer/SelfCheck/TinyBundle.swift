import Foundation
import MLX
import MeSPBundle
import MeSPFiles

/// A bundle of one block with random weights, for a check of one mixer.
struct TinyBundle {
    let mixer: [String: any Sendable]
    static let hidden = 128
    static let vocabulary = 256

    func write(to folder: URL, like model: ModelBundle) throws -> ModelBundle {
        let mlp: [String: any Sendable] = [
            "modules": [["mlp.gate_proj", ["gate"]], ["mlp.up_proj", ["up"]], ["mlp.down_proj", ["down"]]]
                as [[any Sendable]],
            "intermediate_size": 2 * Self.hidden,
        ]
        let architecture: [String: any Sendable] = [
            "model_type": "tiny", "hidden_size": Self.hidden, "vocab_size": Self.vocabulary, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": true, "hidden_act": "silu",
            "post_norms": false, "embedding_scale": 1, "mlx_prefix": "model", "hf_prefix": "model",
            "biases": [String](), "mixers": [mixer], "layers": [0], "mlps": [mlp], "mlp_layers": [0],
        ]
        let block = try JSONDecoder.snakeCase.decode(
            Architecture.self, from: JSONSerialization.data(withJSONObject: architecture)
        ).block(0)

        let fileManager = FileManager.default
        try fileManager.createDirectory(
            at: folder.appendingPathComponent("blocks"), withIntermediateDirectories: true)
        var (weights, table) = (Words(model), Words(model))
        // The CPU generates the same numbers on each machine.
        try Device.withDefaultDevice(.cpu) {
            for array in block.plainArrays { try weights.add(array) }
            for matrix in block.matrices { try weights.add(matrix: matrix.name + ".", matrix.shape) }
            try table.add(matrix: "", [Self.vocabulary, Self.hidden])
            try table.add(Weight(name: "norm", shape: [Self.hidden]))
        }
        let words = try weights.write(to: folder.appendingPathComponent(ModelBundle.blockFile(0)))
        let tableWords = try table.write(to: folder.appendingPathComponent("head.bin"))
        let quantization = model.manifest.quantization
        let head: [String: any Sendable] = ["file": "head.bin", "words": tableWords, "arrays": table.arrays]
        let manifest: [String: any Sendable] = [
            "format": Manifest.format, "name": "tiny", "model": ["id": "tiny"],
            "architecture": architecture,
            "quantization": [
                "bits": quantization.bits, "group_size": quantization.groupSize, "mode": quantization.mode,
            ] as [String: any Sendable],
            "seq_lens": [64], "ranks": [8],
            "blocks": [
                [
                    "layers": [0], "functions": [String: String](), "plain_functions": [String: String](),
                    "words": words, "arrays": weights.arrays,
                ] as [String: any Sendable]
            ],
            "embedding": head, "head": head,
            "files": try [ModelBundle.blockFile(0), "head.bin"].map { path -> [String: any Sendable] in
                let file = folder.appendingPathComponent(path)
                let size = try Data(contentsOf: file).count
                return ["path": path, "size": size, "sha256": try sha256(of: file)]
            },
        ]
        try JSONSerialization.data(withJSONObject: manifest).write(to: folder.appendingPathComponent("manifest.json"))
        var bundle = try ModelBundle(url: folder, device: model.device)
        (bundle.backend, bundle.dtype) = (model.backend, model.dtype)
        return bundle
    }

    private struct Words {
        private let dtype = ElementType.bfloat16
        private let quantization: Manifest.Quantization
        private var data = Data()
        private(set) var arrays = [[String: any Sendable]]()

        init(_ model: ModelBundle) {
            quantization = model.manifest.quantization
        }

        /// Adds random numbers: around 1 for a norm, otherwise around 0.
        mutating func add(_ array: Weight) throws {
            let noise = random(array.shape, scale: 0.3)
            let isNorm = array.name == "norm" || array.name.hasSuffix("norm.weight")
            try add(array.name, isNorm ? 1 + noise : noise, array.isFloat32 ? .float32 : dtype)
        }

        /// Adds a random quantized matrix. Its products with a normalized vector have a variance of 1.
        mutating func add(matrix prefix: String, _ shape: [Int]) throws {
            let (weight, scales, biases) = quantized(
                random(shape, scale: 1 / Float(shape[1]).squareRoot()).asType(dtype.dtype),
                groupSize: quantization.groupSize, bits: quantization.bits,
                mode: QuantizationMode(rawValue: quantization.mode) ?? .affine)
            try add(prefix + "weight", weight, .uint32)
            try add(prefix + "scales", scales, biases == nil ? .uint8 : dtype)
            if let biases { try add(prefix + "biases", biases, dtype) }
        }

        private func random(_ shape: [Int], scale: Float) -> MLXArray {
            MLXRandom.normal(shape, scale: scale, key: MLXRandom.key(UInt64(data.count)))
        }

        private mutating func add(_ name: String, _ array: MLXArray, _ dtype: ElementType) throws {
            arrays.append(["name": name, "offset": data.count / 4, "shape": array.shape, "dtype": dtype.rawValue])
            try array.asType(dtype.dtype).withBytes { data += $0 }
            data += Data(count: (4 - data.count % 4) % 4)
        }

        func write(to file: URL) throws -> Int {
            let count = (data.count + mappingUnit - 1) / mappingUnit * mappingUnit
            try (data + Data(count: count - data.count)).write(to: file)
            return count / 4
        }
    }
}
