import Foundation
import MeSPFiles
import MeSPSentences

/// The contents of `manifest.json`, which describes a bundle. See `docs/formats.md`.
public struct Manifest: Decodable, Sendable {
    package struct Model: Decodable, Sendable {
        package let id: String
        package let revision: String?
        package let license: String?
        /// The licence's name in the model card, for a licence without a standard identifier.
        package let licenseName: String?
        package let licenseLink: String?
    }
    /// The quantization of most matrices. Other matrices have other formats, which follow from the shapes of their arrays.
    public struct Quantization: Decodable, Sendable, Equatable {
        public let bits: Int
        package let groupSize: Int
        package let mode: String
    }
    /// The place of an array in a weight file. `offset` counts 32-bit words.
    package struct PackedArray: Decodable, Sendable {
        package let name: String
        package let offset: Int
        package let shape: [Int]
        package let dtype: ElementType
        /// The distance in words between consecutive matrices of a stack `[experts, rows, columns]`, or nil for other arrays.
        package let stride: Int?
    }
    package struct Blocks: Decodable, Sendable {
        package let layers: [Int]
        /// The function files, by sequence length. A GPU's forward pass calls `functions`, whose activations are bfloat16. `plainFunctions` consist of
        /// plain operations in float32 on the CPU, and MeBP differentiates them.
        package let functions: [String: String]
        package let plainFunctions: [String: String]
        package let packedFunctions: [String: String]?
        package var packed: [String: String] { packedFunctions ?? [:] }
        /// Whether the bundle has functions for these blocks. It has none for blocks with experts, and if it was made on a device.
        package var hasFunctions: Bool { !functions.isEmpty }
        package let words: Int
        package let arrays: [PackedArray]
        package func file(_ index: Int) -> PackedFile {
            PackedFile(file: ModelBundle.blockFile(index), words: words, arrays: arrays)
        }
    }
    package struct PackedFile: Decodable, Sendable {
        package let file: String
        package let words: Int
        package let arrays: [PackedArray]
    }
    package struct Tokens: Codable, Sendable {
        package let file: String
        package let tokens: Int
        package let examples: Examples?
        package let mask: String?
        package let labels: String?
        package let begin: Int?
        package let pack: Bool?
        package let images: Images?

        package struct Examples: Codable, Sendable {
            package let file: String
            package let count: Int
        }

        /// Rows `[count, hidden]` that take the place of tokens' embeddings. `places` has a little-endian `uint32` for each token: 0, or 1 + its row.
        package struct Images: Codable, Sendable {
            package let file: String
            package let count: Int
            package let dtype: ElementType
            package let places: String
        }

        /// The files by the name of their part.
        var parts: [(name: String, file: String)] {
            [
                ("tokens", file), ("examples", examples?.file), ("mask", mask), ("labels", labels),
                ("images", images?.file), ("places", images?.places),
            ].compactMap { part, file in file.map { (part, $0) } }
        }
    }
    package struct File: Decodable, Sendable {
        package let path: String
        package let size: Int
        package let sha256: String
    }

    public let name: String
    package let model: Model
    public let architecture: Architecture
    public let quantization: Quantization
    /// The sequence lengths and ranks for which the blocks' functions are. Shorter examples are padded to one of the lengths.
    public let seqLens: [Int]
    public let ranks: [Int]
    package let blocks: [Blocks]
    package let embedding: PackedFile
    package let head: PackedFile
    package let perLayerEmbedding: PackedFile?
    package let perLayerProjection: PackedFile?
    package let data: [String: Tokens]?
    package let endTokens: [Int]?
    package let source: String?
    package let files: [File]
}

extension Manifest {
    /// The weight files. If the head shares the embedding's file, that file appears twice.
    package var weightFiles: [PackedFile] {
        blocks.flatMap { kind in kind.layers.map(kind.file) }
            + [embedding, head, perLayerEmbedding, perLayerProjection].compactMap { $0 }
    }

    /// The files with the model's licence, notices and terms of use, which must accompany everything derived from the model.
    package var terms: [String] { files.map(\.path).filter(Self.isTerms) }

    package static func isTerms(_ name: String) -> Bool {
        let begins = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "USE_POLICY", "TERMS_OF_USE", "GEMMA_TERMS"]
        let contains = ["_LICENSE", "_LICENCE", "_NOTICE", "_USE_POLICY", "_TERMS_OF_USE"]
        let suffix = URL(fileURLWithPath: name).pathExtension.lowercased()
        guard !name.contains("/"), name.isPrintable, ["", "txt", "md", "pdf"].contains(suffix) else { return false }
        return begins.contains { name.uppercased().hasPrefix($0) }
            || contains.contains { name.uppercased().contains($0) }
    }

    package var mappedBytes: Int {
        Dictionary(weightFiles.map { ($0.file, $0.words) }) { words, _ in words }.values.reduce(0, +) * 4
    }

    /// Decodes and checks a manifest, without reading the bundle's other files.
    ///
    /// - Throws: `MeSPError` if this build cannot use the bundle.
    package static func read(_ json: Data, of bundle: String) throws -> Manifest {
        guard json.count <= largestSize else {
            throw MeSPError("\(bundle)/manifest.json is longer than any bundle's; do not use the bundle.")
        }
        struct Version: Decodable {
            let format: Int
        }
        let decoder = JSONDecoder.snakeCase
        guard let version = try? decoder.decode(Version.self, from: json) else {
            throw MeSPError("\(bundle)/manifest.json is damaged; export the bundle again.")
        }
        guard version.format == Manifest.format else {
            throw MeSPError(
                "\(bundle) has bundle format \(version.format), and this build reads format \(Manifest.format); write it again with mesp-export --from BUNDLE --overwrite."
            )
        }
        let manifest = try explaining {
            try decoder.decode(Manifest.self, from: json)
        } as: {
            "\(bundle)/manifest.json is damaged (\($0)); export the bundle again."
        }
        guard hasFunctionLayout(mlx: MLXSupport.version) || !manifest.blocks.contains(where: \.hasFunctions) else {
            throw MeSPError(
                "The layout of the functions of MLX \(MLXSupport.version) is not known; use MLX \(AllowedPrimitives.firstMLX) or later, below 0.33."
            )
        }
        try manifest.check(bundle)
        return manifest
    }

    var kindOfBlock: [Int] {
        blocks.enumerated().reduce(into: Array(repeating: 0, count: architecture.numHiddenLayers)) { kinds, kind in
            for block in kind.element.layers { kinds[block] = kind.offset }
        }
    }

    /// The largest quantization group size of a down projection. The number of intermediate features in a tile must be a multiple of it.
    package var featureGroup: Int {
        blocks.compactMap { blocks in
            let block = architecture.block(blocks.layers[0])
            let mlp = block.mlp
            let dense = mlp.modules.isEmpty ? [] : [(block.place(.down).module.name, mlp.intermediateSize)]
            let downs = dense + (mlp.experts.map { [($0.down, $0.intermediateSize)] } ?? [])
            return downs.compactMap { name, width in
                blocks.arrays.first { $0.name == name + ".scales" }?.shape.last.map { width / $0 }
            }.max()
        }.max() ?? 1
    }
}

extension Manifest.PackedArray {
    /// The length in 32-bit words of the array, or of one matrix of a stack.
    var words: Int { (shape.dropFirst(stride == nil ? 0 : 1).reduce(1, *) * dtype.dtype.size + 3) / 4 }

    func range(_ number: Int? = nil) -> Range<Int> {
        let start = offset + (number ?? 0) * (stride ?? 0)
        return start..<start + words
    }

    func isWithin(_ total: Int) -> Bool {
        guard (0...total).contains(offset), words <= total - offset else { return false }
        guard let stride else { return true }
        return (words...(1 << 31)).contains(stride) && stride * (shape[0] - 1) <= total - offset - words
    }
}
