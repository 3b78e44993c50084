import Foundation
import MLX

/// The shape of a model: dimensions and constants from its Hugging Face `config.json`.
public struct Architecture: Codable, Sendable, Equatable {
    public let modelType: String
    public let hiddenSize: Int
    public let numHiddenLayers: Int
    public let intermediateSize: Int
    public let numAttentionHeads: Int
    public let numKeyValueHeads: Int
    public let headDim: Int
    public let vocabSize: Int
    public let rmsNormEps: Float
    public let ropeTheta: Float
    public let tieWordEmbeddings: Bool
}

/// `manifest.json`: what a bundle holds. See `docs/architecture.md`.
public struct Manifest: Codable, Sendable {
    /// The bundle format and the MLX version this build reads. A `.mlxfn` of another MLX version can crash on import.
    public static let format = 1
    public static let mlxVersion = "0.31.1"

    public struct Model: Codable, Sendable {
        public let id: String
        public let revision: String?
        public let license: String?
    }
    public struct Quantization: Codable, Sendable, Equatable {
        public let bits: Int
        public let groupSize: Int
    }
    /// Where an array lies in a file of words. `offset` counts 32-bit words.
    public struct PackedArray: Codable, Sendable {
        public let name: String
        public let offset: Int
        public let shape: [Int]
        public let dtype: String
    }
    public struct Block: Codable, Sendable {
        /// Files by sequence length.
        public let functions: [String: String]
        public let plainFunctions: [String: String]
        public let words: Int
        public let arrays: [PackedArray]
    }
    public struct PackedFile: Codable, Sendable {
        public let file: String
        public let words: Int
        public let arrays: [PackedArray]
    }
    public struct Tokens: Codable, Sendable {
        public let file: String
        public let tokens: Int
        /// Where the data is one example a sequence.
        public let examples: Examples?

        public struct Examples: Codable, Sendable {
            public let file: String
            public let count: Int
        }
    }
    public struct File: Codable, Sendable {
        public let path: String
        public let size: Int
        public let sha256: String
    }

    public let name: String
    public let model: Model
    public let mlxVersion: String
    public let device: String
    public let dtype: String
    public let architecture: Architecture
    public let quantization: Quantization
    public let seqLens: [Int]
    public let ranks: [Int]
    public let block: Block
    public let embedding: PackedFile
    public let head: PackedFile
    public let data: [String: Tokens]?
    public let files: [File]
}

/// An exported model, opened and checked. Weights are mapped when they are asked for, never copied.
public struct ModelBundle {
    public let url: URL
    public let manifest: Manifest
    /// The dtype of activations, scales, biases and norms.
    let dtype: DType
    private let sizes: [String: Int]
    /// The token streams by split, and the folder that their files are in.
    private let splits: [String: Manifest.Tokens]
    private let dataFolder: URL
    /// The files of weights as they were when they were checked.
    private var versions = [String: FileVersion]()

    public var architecture: Architecture { manifest.architecture }

    /// Opens the bundle at `url` and checks it: format and MLX version, a device that is there, every file's size and
    /// SHA-256, and that each packed array has the shape that the architecture asks for.
    ///
    /// - Parameters:
    ///   - text: a folder that `TextData` wrote, to train on in place of the bundle's own text.
    ///   - checksums: whether files are read and their SHA-256 compared, which takes seconds for gigabytes. Without, only the
    ///     manifest may be used.
    public init(url: URL, text: URL? = nil, checksums: Bool = true) throws {
        self.url = url
        let path = url.appendingPathComponent("manifest.json")
        guard let json = regularFile(path) else {
            throw MeSPError("\(url.path) is not a bundle: it has no manifest.json. Make one with mesp-export.")
        }
        struct Version: Decodable {
            let format: Int
            let mlxVersion: String
            let device: String
        }
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        guard let version = try? decoder.decode(Version.self, from: json) else {
            throw MeSPError("\(path.path) is damaged; export the bundle again.")
        }
        guard version.format == Manifest.format else {
            throw MeSPError(
                "\(url.path) has bundle format \(version.format), this build reads format \(Manifest.format); export it again with a matching mesp-export."
            )
        }
        guard version.mlxVersion == Manifest.mlxVersion else {
            throw MeSPError(
                "\(url.path) was exported with MLX \(version.mlxVersion), this build runs MLX \(Manifest.mlxVersion); export it again with mlx==\(Manifest.mlxVersion)."
            )
        }
        guard version.device == "cpu" || Device.defaultDevice().deviceType == .gpu else {
            throw MeSPError(
                "\(url.path) was exported for a GPU and this machine has none that MLX can use; export it again with --device cpu."
            )
        }
        do {
            manifest = try decoder.decode(Manifest.self, from: json)
        } catch {
            throw MeSPError("\(path.path) is damaged (\(error.plainSentence)); export the bundle again.")
        }
        switch manifest.dtype {
        case "float32": dtype = .float32
        case "bfloat16": dtype = .bfloat16
        default: throw MeSPError("\(path.path) names an unknown dtype, \(manifest.dtype); export the bundle again.")
        }
        sizes = Dictionary(manifest.files.map { ($0.path, $0.size) }, uniquingKeysWith: { first, _ in first })
        (splits, dataFolder) = try text.map { (try TextData.entries(in: $0), $0) } ?? (manifest.data ?? [:], url)
        try checkDimensions()
        try checkFiles()
        if checksums { try checkSums() }
        try checkLayout()
    }

    // MARK: - Weights

    /// Imports the function for sequences of `length` tokens. `Manifest.checkTrace` has found that there is one.
    func function(_ files: [String: String], length: Int) throws -> ImportedFunction {
        guard let file = files["\(length)"] else { preconditionFailure("no function for \(length) tokens") }
        return try importFunction(from: url.appendingPathComponent(file))
    }

    /// The device that the functions were exported for, and that everything runs on.
    var device: Device { manifest.device == "gpu" ? .gpu : .cpu }

    /// Calls `body` with the bundle's device as MLX's default. An error in MLX, which ends the process elsewhere, is thrown.
    func withDevice<R>(_ body: () throws -> R) throws -> R {
        try Device.withDefaultDevice(device) {
            do {
                return try withError { try body() }
            } catch let error as MLXError {
                throw MeSPError(error.plainSentence + ".")
            }
        }
    }

    /// Calls `body` with block `index`'s file as one flat `uint32` array, mapped for as long as `body` runs. What `body` returns
    /// must be evaluated.
    func withBlock<R>(_ index: Int, _ body: (PackedWeights) throws -> R) throws -> R {
        try withWeights(Self.blockFile(index), manifest.block.words, manifest.block.arrays, body)
    }

    func withEmbedding<R>(_ body: (PackedWeights) throws -> R) throws -> R {
        try withWeights(manifest.embedding.file, manifest.embedding.words, manifest.embedding.arrays, body)
    }

    func withHead<R>(_ body: (PackedWeights) throws -> R) throws -> R {
        try withWeights(manifest.head.file, manifest.head.words, manifest.head.arrays, body)
    }

    /// The size of all weight files, in bytes.
    var mappedBytes: Int {
        let table = manifest.head.file == manifest.embedding.file ? 0 : manifest.head.words
        return (architecture.numHiddenLayers * manifest.block.words + manifest.embedding.words + table) * 4
    }

    private func withWeights<R>(
        _ path: String, _ count: Int, _ arrays: [Manifest.PackedArray], _ body: (PackedWeights) throws -> R
    ) throws -> R {
        let words = try mappedWords(url.appendingPathComponent(path), size: count * 4, version: versions[path])
        // While this reference lives, MLX can't donate the mapped buffer and write a result into it.
        return try withExtendedLifetime(words) {
            try body(
                PackedWeights(
                    words: words, arrays: arrays, quantization: manifest.quantization, onCPU: manifest.device == "cpu"))
        }
    }

    static func blockFile(_ index: Int) -> String { String(format: "blocks/%02d.bin", index) }

    // MARK: - Data

    /// The tokens of a split (`train`, `valid`, `test`), mapped, or nil where the bundle has none.
    public func tokens(_ split: String) throws -> TokenStream? {
        guard let entry = splits[split] else { return nil }
        func data(_ file: String, _ count: Int, width: Int) throws -> Data {
            let data = try? Data(contentsOf: dataFolder.appendingPathComponent(file), options: .mappedIfSafe)
            guard let data, data.count % width == 0, data.count / width == count else {
                throw MeSPError("\(file) in \(dataFolder.path) does not have the length it should; export it again.")
            }
            return data
        }
        let stream = TokenStream(
            tokens: try data(entry.file, entry.tokens, width: 4),
            examples: try entry.examples.map { try data($0.file, $0.count, width: 12) })
        do {
            try stream.check(vocabulary: architecture.vocabSize)
        } catch {
            throw MeSPError("The \(split) data of \(dataFolder.path) \(error.plainSentence); export it again.")
        }
        return stream
    }

    // MARK: - Checks

    private mutating func checkFiles() throws {
        var needed = [manifest.embedding.file, manifest.head.file]
        for length in manifest.seqLens {
            guard let function = manifest.block.functions["\(length)"],
                let plain = manifest.block.plainFunctions["\(length)"]
            else {
                throw MeSPError(
                    "\(url.path): the manifest has no function for \(length) tokens; export the bundle again.")
            }
            needed += [function, plain]
        }
        let weights = Set([manifest.embedding.file, manifest.head.file] + blockFiles)
        needed += blockFiles
        needed += (manifest.data ?? [:]).values.flatMap { [$0.file, $0.examples?.file].compactMap { $0 } }
        for path in needed where sizes[path] == nil {
            throw MeSPError("\(url.path): the manifest does not list \(path); export the bundle again.")
        }
        let root = url.resolvingSymlinksInPath()
        var inside: Set<[Substring]> = [[]]  // folders of the bundle that are no links, which could lead anywhere
        for file in manifest.files {
            let parts = file.path.split(separator: "/", omittingEmptySubsequences: false)
            let location = url.appendingPathComponent(file.path)
            let folder = parts.dropLast()
            guard !parts.contains(where: { $0.isEmpty || $0 == ".." || $0 == "." || $0.contains("\0") }),
                inside.contains(Array(folder))
                    || location.deletingLastPathComponent().resolvingSymlinksInPath().path
                        == root.appendingPathComponent(folder.joined(separator: "/")).path
            else {
                throw MeSPError("\(url.path): the manifest names a file outside the bundle, \(file.path).")
            }
            inside.insert(Array(folder))
            guard let attributes = try? FileManager.default.attributesOfItem(atPath: location.path) else {
                throw MeSPError("\(url.path) lacks \(file.path); export the bundle again.")
            }
            guard attributes[.type] as? FileAttributeType == .typeRegular, attributes[.size] as? Int == file.size else {
                throw MeSPError(
                    "\(file.path) in \(url.path) is not the \(file.size) bytes the manifest says; copy or export the bundle again."
                )
            }
            if weights.contains(file.path) { versions[file.path] = FileVersion(location) }
        }
    }

    private var blockFiles: [String] { (0..<architecture.numHiddenLayers).map(Self.blockFile) }

    private func checkSums() throws {
        for file in manifest.files {
            guard try sha256(of: url.appendingPathComponent(file.path)) == file.sha256 else {
                throw MeSPError(
                    "\(file.path) in \(url.path) is damaged (its SHA-256 differs); copy or export the bundle again.")
            }
        }
    }

    private func checkDimensions() throws {
        let a = architecture
        let q = manifest.quantization
        let lengths = [manifest.block.words, manifest.embedding.words, manifest.head.words]
        let widths = [a.hiddenSize, a.intermediateSize, a.vocabSize] + manifest.seqLens
        let counts = [a.numHiddenLayers, a.numAttentionHeads, a.numKeyValueHeads, a.headDim] + manifest.ranks
        // Far above any model's; with these no product, here or in a plan, can overflow.
        guard lengths.allSatisfy({ (1...(1 << 31)).contains($0) }), widths.allSatisfy({ (1...(1 << 20)).contains($0) }),
            counts.allSatisfy({ (1...(1 << 12)).contains($0) }), [2, 3, 4, 5, 6, 8].contains(q.bits),
            [32, 64, 128].contains(q.groupSize), !manifest.seqLens.isEmpty, !manifest.ranks.isEmpty,
            a.numAttentionHeads % a.numKeyValueHeads == 0,
            a.headDim % 2 == 0, a.hiddenSize % q.groupSize == 0, a.intermediateSize % q.groupSize == 0,
            (a.numAttentionHeads * a.headDim) % q.groupSize == 0
        else { throw MeSPError("\(url.path): the manifest's dimensions don't fit together; export the bundle again.") }
    }

    private func checkLayout() throws {
        let a = architecture
        let q = manifest.quantization
        for (file, words) in [
            (manifest.embedding.file, manifest.embedding.words), (manifest.head.file, manifest.head.words),
        ]
            + blockFiles.map({ ($0, manifest.block.words) })
        where sizes[file] != words * 4 {
            throw MeSPError("\(file) in \(url.path) doesn't have the length of its layout; export the bundle again.")
        }

        func quantizedMatrix(_ name: String, _ rows: Int, _ columns: Int) -> [(String, [Int], String)] {
            [
                (name + "weight", [rows, columns * q.bits / 32], "uint32"),
                (name + "scales", [rows, columns / q.groupSize], manifest.dtype),
                (name + "biases", [rows, columns / q.groupSize], manifest.dtype),
            ]
        }
        var block: [(String, [Int], String)] = [
            ("input_layernorm.weight", [a.hiddenSize], manifest.dtype),
            ("post_attention_layernorm.weight", [a.hiddenSize], manifest.dtype),
        ]
        for projection in Projection.allCases {
            let (columns, rows) = projection.dimensions(a)
            block += quantizedMatrix(projection.rawValue + ".", rows, columns)
            if projection.hasBias { block.append((projection.rawValue + ".bias", [rows], manifest.dtype)) }
        }
        let embedding = quantizedMatrix("", a.vocabSize, a.hiddenSize)
        let head = embedding + [("norm", [a.hiddenSize], manifest.dtype)]
        for (expected, arrays, words) in [
            (block, manifest.block.arrays, manifest.block.words),
            (embedding, manifest.embedding.arrays, manifest.embedding.words),
            (head, manifest.head.arrays, manifest.head.words),
        ] {
            for (name, shape, dtype) in expected {
                guard let array = arrays.first(where: { $0.name == name }), array.shape == shape, array.dtype == dtype,
                    (0...words).contains(array.offset), array.words <= words - array.offset
                else {
                    throw MeSPError(
                        "\(url.path): the manifest's entry for \(name) is missing or wrong; export the bundle again.")
                }
            }
        }
    }
}

extension Manifest {
    /// Throws where the block function has no trace for sequences of `length` tokens or for `rank`.
    func checkTrace(length: Int, rank: Int) throws {
        guard seqLens.contains(length) else {
            throw MeSPError(
                "\(name) has no trace for sequences of \(length) tokens, only for \(list(seqLens)); choose one of these or export it with --seq-len \(length)."
            )
        }
        guard ranks.contains(rank) else {
            throw MeSPError(
                "\(name) has no trace for rank \(rank), only for \(list(ranks)); choose one of these or export it with --rank \(rank)."
            )
        }
    }
}

private func list(_ numbers: [Int]) -> String { numbers.map(String.init).joined(separator: ", ") }

extension Manifest.PackedArray {
    /// The array's length in 32-bit words.
    var words: Int { (shape.reduce(1, *) * (dtype == "bfloat16" ? 2 : 4) + 3) / 4 }
}

/// Typed views into a file of words, by name. No view copies.
struct PackedWeights {
    let words: MLXArray
    let arrays: [Manifest.PackedArray]
    let quantization: Manifest.Quantization
    let onCPU: Bool

    /// The array called `name`, in its shape and dtype. `ModelBundle` has checked that it is there.
    subscript(name: String) -> MLXArray {
        guard let array = arrays.first(where: { $0.name == name }) else {
            preconditionFailure("no array \(name) in the layout")
        }
        let flat = words[array.offset..<(array.offset + array.words)]
        switch array.dtype {
        case "uint32": return flat.reshaped(array.shape)
        case "float32": return flat.view(dtype: .float32).reshaped(array.shape)
        default: return flat.view(dtype: .bfloat16)[0..<array.shape.reduce(1, *)].reshaped(array.shape)
        }
    }

    /// The quantized matrix whose three arrays start with `prefix`.
    func matrix(_ prefix: String) -> QuantizedMatrix {
        QuantizedMatrix(
            weight: self[prefix + "weight"], scales: self[prefix + "scales"], biases: self[prefix + "biases"],
            groupSize: quantization.groupSize, bits: quantization.bits, onCPU: onCPU)
    }
}

extension Error {
    /// The error in words, without a final full stop.
    var plainSentence: String {
        if let decoding = self as? DecodingError {
            switch decoding {
            case .keyNotFound(let key, _): return "\(key.stringValue) is missing"
            case .typeMismatch(_, let context), .valueNotFound(_, let context), .dataCorrupted(let context):
                let path = context.codingPath.map(\.stringValue).joined(separator: ".")
                return path.isEmpty ? "it is not JSON" : "\(path) is not what it should be"
            @unknown default: break
            }
        }
        let text = localizedDescription
        return text.hasSuffix(".") ? String(text.dropLast()) : text
    }
}
