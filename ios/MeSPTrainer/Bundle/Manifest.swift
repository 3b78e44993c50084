import Foundation
import MeSPFiles
import MeSPSentences

/// `manifest.json`: what a bundle holds. See `docs/formats.md`.
public struct Manifest: Decodable, Sendable {
    package struct Model: Decodable, Sendable {
        package let id: String
        package let revision: String?
        package let license: String?
        /// Of the model's card, where the licence is one of its own.
        package let licenseName: String?
        package let licenseLink: String?
    }
    /// The quantization of most matrices; each one's arrays say its own.
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
        /// Of stacked matrices `[number, rows, columns]` the words from one to the next: those of one expert lie together. nil of other
        /// arrays.
        package let stride: Int?
    }
    /// Blocks whose files have one layout and whose mixer and MLP are one.
    package struct Blocks: Decodable, Sendable {
        package let layers: [Int]
        /// Files by sequence length: the function that a GPU trains with, and the one in plain operations. On a CPU they are one. Either all
        /// kinds of functions are there for each length, or none.
        package let functions: [String: String]
        package let plainFunctions: [String: String]
        /// Those that a GPU trains packed records with; nil where the bundle was not exported for such data.
        package let packedFunctions: [String: String]?
        package var packed: [String: String] { packedFunctions ?? [:] }
        /// Whether a GPU calls functions of these blocks; it computes others by the formulas. Blocks with experts have none, as a function
        /// computes the same experts for any token, and blocks of a bundle that mesp-export did not write have none.
        package var hasFunctions: Bool { !functions.isEmpty }
        package let words: Int
        package let arrays: [PackedArray]
        /// The file of block `index`, one of `layers`.
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
        /// The examples, if the data is one example a sequence.
        package let examples: Examples?
        /// A file with a byte a token, 1 where its prediction is in the loss; nil where all are.
        package let mask: String?
        /// A file with a byte an example, its `TokenStream.Label`; nil where the data has no preferences.
        package let labels: String?
        /// The token that takes the place of the first one of each window of a packed stream; nil where it stays.
        package let begin: Int?
        /// Whether short examples are to share a sequence, as records that do not see each other.
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
    /// The table of embeddings for each layer, and the projection that is added to them; nil where the model has none.
    package let perLayerEmbedding: PackedFile?
    package let perLayerProjection: PackedFile?
    package let data: [String: Tokens]?
    /// The tokens at which answers of the model end, in addition to those of its config.json; nil where the bundle names none.
    package let endTokens: [Int]?
    /// The digest of the model and the options that a bundle was made of on a device; nil of other bundles.
    package let source: String?
    package let files: [File]
}

extension Manifest {
    /// The files of weights. Those of a model with tied embeddings name one twice.
    package var weightFiles: [PackedFile] {
        blocks.flatMap { kind in kind.layers.map(kind.file) }
            + [embedding, head, perLayerEmbedding, perLayerProjection].compactMap { $0 }
    }

    /// The files with the model's licence, notices and rules of use, which go with what is made of it.
    package var terms: [String] { files.map(\.path).filter(Self.isTerms) }

    /// Whether a file in a model's folder is to go with what is made of it.
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

    /// Reads a manifest that this build can use, and checks all of it that can be checked without the bundle's files and
    /// without MLX.
    ///
    /// - Parameter bundle: what the bundle is called in messages.
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

    /// Whether several records may share a sequence: the formulas need no functions for it.
    package var takesPacked: Bool {
        device == .cpu || blocks.allSatisfy { $0.packedFunctions != nil || !$0.hasFunctions }
    }

    /// For each block the index of its kind in `blocks`.
    var kindOfBlock: [Int] {
        blocks.enumerated().reduce(into: Array(repeating: 0, count: architecture.numHiddenLayers)) { kinds, kind in
            for block in kind.element.layers { kinds[block] = kind.offset }
        }
    }

    /// The most weights that share a scale in a row of a down projection. Tiles of the intermediate features are multiples of it.
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
    /// The array's length in 32-bit words, of stacked matrices that of one.
    var words: Int { (shape.dropFirst(stride == nil ? 0 : 1).reduce(1, *) * dtype.dtype.size + 3) / 4 }

    /// The array's place in its file, of stacked matrices that of one of them.
    func range(_ number: Int? = nil) -> Range<Int> {
        let start = offset + (number ?? 0) * (stride ?? 0)
        return start..<start + words
    }

    /// Whether the array, or every one of stacked matrices, lies within a file of so many words.
    func isWithin(_ total: Int) -> Bool {
        guard (0...total).contains(offset), words <= total - offset else { return false }
        guard let stride else { return true }
        return (words...(1 << 31)).contains(stride) && stride * (shape[0] - 1) <= total - offset - words
    }
}
