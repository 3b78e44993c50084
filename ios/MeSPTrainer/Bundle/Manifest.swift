import Foundation
import MeSPFiles
import MeSPSentences

/// The contents of `manifest.json`, which describes a bundle. See `docs/formats.md`.
public struct Manifest: Decodable, Sendable {
    package struct Model: Decodable, Sendable {
        package let id: String
        package let revision: String?
        package let license: String?
        /// The licence's name in the model card, if it is not a standard licence.
        package let licenseName: String?
        package let licenseLink: String?
    }
    /// The quantization of most matrices. The quantization of one matrix follows from the shapes of its arrays.
    public struct Quantization: Decodable, Sendable, Equatable {
        public let bits: Int
        package let groupSize: Int
        package let mode: String
    }
    /// The place of an array in a file of words. `offset` counts 32-bit words.
    package struct PackedArray: Decodable, Sendable {
        package let name: String
        package let offset: Int
        package let shape: [Int]
        package let dtype: ElementType
        /// The distance in words between the beginnings of consecutive matrices in a stack `[number, rows, columns]`; nil for other arrays. The
        /// matrices of a stack are apart, because each expert's arrays lie together.
        package let stride: Int?
    }
    /// The blocks of one kind. They have the same mixer and MLP, and their files have the same layout.
    package struct Blocks: Decodable, Sendable {
        package let layers: [Int]
        /// The files of functions with which a GPU trains, by sequence length. `plainFunctions` has the files of functions made of plain operations.
        /// In a bundle for the CPU both properties name the same files. Either every sequence length has functions, or none has.
        package let functions: [String: String]
        package let plainFunctions: [String: String]
        /// The files of functions with which a GPU trains packed records; nil if the bundle was not exported for packed records.
        package let packedFunctions: [String: String]?
        package var packed: [String: String] { packedFunctions ?? [:] }
        /// Whether a GPU calls functions for these blocks; otherwise a GPU computes these blocks by the formulas. Blocks with experts have no
        /// functions, because a function would compute the same experts for every token. Blocks of a bundle that was made on a device have no
        /// functions either.
        package var hasFunctions: Bool { !functions.isEmpty }
        package let words: Int
        package let arrays: [PackedArray]
        /// Returns the file of block `index`, which is one of `layers`.
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
        /// The examples, if each sequence is one example.
        package let examples: Examples?
        /// A file with one byte per token: 1 if the token's prediction is in the loss, otherwise 0; nil if all predictions are in the loss.
        package let mask: String?
        /// A file with one byte per example, its `TokenStream.Label`; nil if the data is not preference data.
        package let labels: String?
        /// The token that replaces the first token of each window of a packed stream; nil for no replacement.
        package let begin: Int?
        /// Whether short examples share a sequence, as records that do not attend to each other.
        package let pack: Bool?

        package struct Examples: Codable, Sendable {
            package let file: String
            package let count: Int
        }

        var files: [String] { [file, examples?.file, mask, labels].compactMap { $0 } }
    }
    package struct File: Decodable, Sendable {
        package let path: String
        package let size: Int
        package let sha256: String
    }

    public let name: String
    package let model: Model
    public let device: Backend
    /// The type of activations, scales, biases and norms.
    package let dtype: ElementType
    public let architecture: Architecture
    public let quantization: Quantization
    public let seqLens: [Int]
    public let ranks: [Int]
    package let blocks: [Blocks]
    package let embedding: PackedFile
    package let head: PackedFile
    /// The file of the table of embeddings for each layer; nil if the model has none. `perLayerProjection` is the file of a projection whose outputs
    /// are added to these embeddings.
    package let perLayerEmbedding: PackedFile?
    package let perLayerProjection: PackedFile?
    package let data: [String: Tokens]?
    /// The tokens that end the model's answers, in addition to the end tokens in config.json; nil if the bundle names none.
    package let endTokens: [Int]?
    /// The digest of the model and the options of a bundle that was made on a device; nil for other bundles.
    package let source: String?
    package let files: [File]
}

extension Manifest {
    /// The files of weights. If the head is tied to the embedding, their common file appears twice.
    package var weightFiles: [PackedFile] {
        blocks.flatMap { kind in kind.layers.map(kind.file) }
            + [embedding, head, perLayerEmbedding, perLayerProjection].compactMap { $0 }
    }

    /// The files with the model's licence, notices and terms of use. They are copied to everything that is made of the model.
    package var terms: [String] { files.map(\.path).filter(Self.isTerms) }

    /// Returns whether a file with this name has a model's licence, notices or terms of use.
    package static func isTerms(_ name: String) -> Bool {
        let begins = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "USE_POLICY", "TERMS_OF_USE", "GEMMA_TERMS"]
        let contains = ["_LICENSE", "_LICENCE", "_NOTICE", "_USE_POLICY", "_TERMS_OF_USE"]
        let suffix = URL(fileURLWithPath: name).pathExtension.lowercased()
        guard !name.contains("/"), ["", "txt", "md", "pdf"].contains(suffix) else { return false }
        return begins.contains { name.uppercased().hasPrefix($0) }
            || contains.contains { name.uppercased().contains($0) }
    }

    /// The size of all weight files, in bytes.
    package var mappedBytes: Int {
        Dictionary(weightFiles.map { ($0.file, $0.words) }) { words, _ in words }.values.reduce(0, +) * 4
    }

    /// Reads a manifest. Makes all checks that need neither the bundle's files nor MLX, and throws if this build cannot use the bundle.
    ///
    /// - Parameter bundle: the bundle's name in messages.
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
                "\(bundle) has bundle format \(version.format), and this build reads format \(Manifest.format); write it again with mesp-export."
            )
        }
        let manifest: Manifest
        do {
            manifest = try decoder.decode(Manifest.self, from: json)
        } catch {
            throw MeSPError("\(bundle)/manifest.json is damaged (\(error.plainSentence)); export the bundle again.")
        }
        guard hasFunctionLayout(mlx: MLXSupport.version) || !manifest.blocks.contains(where: \.hasFunctions) else {
            throw MeSPError(
                "The layout of the functions of MLX \(MLXSupport.version) is not known; use MLX \(AllowedPrimitives.firstMLX) or later, below 0.33."
            )
        }
        try manifest.check(bundle)
        return manifest
    }

    /// Whether several records may share a sequence. Blocks with functions need special functions for packed records; other blocks do not.
    package var takesPacked: Bool {
        device == .cpu || blocks.allSatisfy { $0.packedFunctions != nil || !$0.hasFunctions }
    }

    /// For each block, the index of its kind in `blocks`.
    var kindOfBlock: [Int] {
        blocks.enumerated().reduce(into: Array(repeating: 0, count: architecture.numHiddenLayers)) { kinds, kind in
            for block in kind.element.layers { kinds[block] = kind.offset }
        }
    }

    /// The largest number of weights that share a scale in a row of a down projection. The number of intermediate features in a tile is a multiple of
    /// this number.
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
    /// The length of the array in 32-bit words; for a stack, the length of one of its matrices.
    var words: Int { (shape.dropFirst(stride == nil ? 0 : 1).reduce(1, *) * dtype.dtype.size + 3) / 4 }

    /// Returns the range of the array's words in its file; for a stack, the range of the matrix with this number.
    func range(_ number: Int? = nil) -> Range<Int> {
        let start = offset + (number ?? 0) * (stride ?? 0)
        return start..<start + words
    }

    /// Returns whether the array lies within a file of `total` words; for a stack, whether every matrix does.
    func isWithin(_ total: Int) -> Bool {
        guard (0...total).contains(offset), words <= total - offset else { return false }
        guard let stride else { return true }
        return (words...(1 << 31)).contains(stride) && stride * (shape[0] - 1) <= total - offset - words
    }
}
