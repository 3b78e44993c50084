import Foundation
import Testing

@testable import MeSPBundle

/// A model in MLX's format, made from the plain fixture's bundle. Its weights are in two files.
enum TinyModel {
    static func write(to folder: URL, card: String = "---\nlicense: apache-2.0\n---\n# A model\n") throws {
        let bundle = try ModelBundle(url: try tiedBundle())
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
            try Data(contentsOf: bundle.url.appendingPathComponent(name)).write(to: folder.appendingPathComponent(name))
        }
        try Data(card.utf8).write(to: folder.appendingPathComponent("README.md"))
        let manifest = bundle.manifest
        var files = [[String: (Manifest.PackedArray, Data)](), [:]]
        func take(_ file: Manifest.PackedFile, into index: Int, _ name: (String) -> String) throws {
            let data = try Data(contentsOf: bundle.url.appendingPathComponent(file.file))
            for array in file.arrays {
                files[index][name(array.name)] = (
                    array, data[array.range().lowerBound * 4..<array.range().upperBound * 4]
                )
            }
        }
        for kind in manifest.blocks {
            for layer in kind.layers { try take(kind.file(layer), into: layer % 2) { "model.layers.\(layer).\($0)" } }
        }
        try take(manifest.embedding, into: 0) { $0 == "norm" ? "model.norm.weight" : "model.embed_tokens.\($0)" }
        var map = [String: String]()
        for (index, tensors) in files.enumerated() {
            let file = "model-0000\(index + 1)-of-00002.safetensors"
            let types: [ElementType: String] = [.float32: "F32", .uint32: "U32"]
            var (header, body) = (["__metadata__": ["format": "mlx"]] as [String: Any], Data())
            for (name, (array, data)) in tensors.sorted(by: { $0.key < $1.key }) {
                header[name] = [
                    "dtype": try #require(types[array.dtype]), "shape": array.shape,
                    "data_offsets": [body.count, body.count + data.count],
                ]
                body += data
                map[name] = file
            }
            let json = try JSONSerialization.data(withJSONObject: header, options: .sortedKeys)
            let padded = json + Data(repeating: UInt8(ascii: " "), count: -json.count & 7)
            let length = withUnsafeBytes(of: UInt64(padded.count).littleEndian) { Data($0) }
            try (length + padded + body).write(to: folder.appendingPathComponent(file))
        }
        let bytes = files.flatMap { $0.values.map(\.1.count) }.reduce(0, +)
        let index = ["metadata": ["total_size": bytes], "weight_map": map] as [String: Any]
        try JSONSerialization.data(withJSONObject: index, options: .sortedKeys).write(
            to: folder.appendingPathComponent("model.safetensors.index.json"))
    }
}
