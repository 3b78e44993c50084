import Foundation
import MLX

/// `manifest.json`: what a bundle holds. See `docs/architecture.md`.
public struct Manifest: Codable, Sendable {
    /// The bundle format and the MLX version this build reads. A `.mlxfn` of another MLX version can crash on import.
    public static let format = 2
    public static let mlxVersion = "0.31.1"

    public struct Model: Codable, Sendable {
        public let id: String
        public let revision: String?
        public let license: String?
    }
    /// Of most matrices. What each one has, its arrays tell.
    public struct Quantization: Codable, Sendable, Equatable {
        public let bits: Int
        public let groupSize: Int
        public let mode: String
    }
    /// Where an array lies in a file of words. `offset` counts 32-bit words.
    public struct PackedArray: Codable, Sendable {
        public let name: String
        public let offset: Int
        public let shape: [Int]
        public let dtype: String
    }
    /// Blocks whose files have one layout and whose attention is of one kind.
    public struct Blocks: Codable, Sendable {
        public let layers: [Int]
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
    public let blocks: [Blocks]
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
    /// For each block the index of its kind in the manifest's `blocks`.
    private var kinds = [Int]()

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

    /// Imports the functions for sequences of `length` tokens, for each block the one of its kind. `Manifest.check` has found that
    /// there are some.
    func functions(_ files: KeyPath<Manifest.Blocks, [String: String]>, length: Int) throws -> [ImportedFunction] {
        var imported = [String: ImportedFunction]()
        return try kinds.map { kind in
            guard let file = manifest.blocks[kind][keyPath: files]["\(length)"] else {
                preconditionFailure("no function for \(length) tokens")
            }
            if let function = imported[file] { return function }
            let function = try importFunction(from: url.appendingPathComponent(file))
            imported[file] = function
            return function
        }
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

    /// Calls `body` with the weights of block `index`, whose file is mapped for as long as `body` runs. What `body` returns must be
    /// evaluated.
    func withBlock<R>(_ index: Int, _ body: (BlockWeights) throws -> R) throws -> R {
        let kind = manifest.blocks[kinds[index]]
        return try withWeights(Self.blockFile(index), kind.words, kind.arrays) {
            try body(
                BlockWeights(
                    architecture: architecture, kind: architecture.attention[architecture.layers[index]], packed: $0))
        }
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
        let blocks = manifest.blocks.reduce(0) { $0 + $1.layers.count * $1.words }
        return (blocks + manifest.embedding.words + table) * 4
    }

    private func withWeights<R>(
        _ path: String, _ count: Int, _ arrays: [Manifest.PackedArray], _ body: (PackedWeights) throws -> R
    ) throws -> R {
        let words = try mappedWords(url.appendingPathComponent(path), size: count * 4, version: versions[path])
        // While this reference lives, MLX can't donate the mapped buffer and write a result into it.
        return try withExtendedLifetime(words) {
            try body(PackedWeights(words: words, arrays: arrays, onCPU: manifest.device == "cpu"))
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
            for blocks in manifest.blocks {
                guard let function = blocks.functions["\(length)"], let plain = blocks.plainFunctions["\(length)"]
                else {
                    throw MeSPError(
                        "\(url.path): the manifest has no function for \(length) tokens; export the bundle again.")
                }
                needed += [function, plain]
            }
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

    private mutating func checkDimensions() throws {
        let lengths = manifest.blocks.map(\.words) + [manifest.embedding.words, manifest.head.words]
        // Every block must be of one kind, and have that kind of attention.
        let places = manifest.blocks.enumerated().flatMap { kind, blocks in
            blocks.layers.map { (block: $0, kind: kind) }
        }
        .sorted { $0.block < $1.block }
        guard architecture.isConsistent, lengths.allSatisfy({ (1...(1 << 31)).contains($0) }),
            !manifest.seqLens.isEmpty, manifest.seqLens.allSatisfy({ (1...(1 << 20)).contains($0) }),
            !manifest.ranks.isEmpty, manifest.ranks.allSatisfy({ (1...(1 << 12)).contains($0) }),
            places.map(\.block) == Array(0..<architecture.numHiddenLayers),
            manifest.blocks.allSatisfy({ Set($0.layers.map { architecture.layers[$0] }).count == 1 })
        else { throw MeSPError("\(url.path): the manifest's dimensions don't fit together; export the bundle again.") }
        kinds = places.map(\.kind)
    }

    private func checkLayout() throws {
        let a = architecture
        let tables = [manifest.embedding, manifest.head].map { ($0.file, $0.words) }
        for (file, words) in tables + zip(blockFiles, kinds.map { manifest.blocks[$0].words })
        where sizes[file] != words * 4 {
            throw MeSPError("\(file) in \(url.path) doesn't have the length of its layout; export the bundle again.")
        }
        func check(
            _ arrays: [Manifest.PackedArray], _ words: Int, vectors: [(name: String, size: Int)],
            matrices: [(name: String, rows: Int, columns: Int)]
        ) throws {
            func array(_ name: String, _ rows: Int, dimensions: Int = 2, dtype: String) throws -> Manifest.PackedArray {
                guard let array = arrays.first(where: { $0.name == name }), array.dtype == dtype,
                    array.shape.count == dimensions, array.shape[0] == rows,
                    array.shape.allSatisfy({ (1...(1 << 24)).contains($0) }),
                    (0...words).contains(array.offset), array.words <= words - array.offset
                else { throw wrong(name) }
                return array
            }
            func wrong(_ name: String) -> MeSPError {
                MeSPError("\(url.path): the manifest's entry for \(name) is missing or wrong; export the bundle again.")
            }
            for (name, size) in vectors { _ = try array(name, size, dimensions: 1, dtype: manifest.dtype) }
            for (name, rows, columns) in matrices {
                let hasBiases = arrays.contains { $0.name == name + "biases" }
                let weight = try array(name + "weight", rows, dtype: "uint32")
                let scales = try array(name + "scales", rows, dtype: hasBiases ? manifest.dtype : "uint8")
                guard
                    QuantizationFormat(
                        inputs: columns, words: weight.shape[1], groups: scales.shape[1], hasBiases: hasBiases) != nil,
                    try !hasBiases || array(name + "biases", rows, dtype: manifest.dtype).shape == scales.shape
                else { throw wrong(name + "weight") }
            }
        }
        for blocks in manifest.blocks {
            try check(
                blocks.arrays, blocks.words,
                vectors: a.norms
                    + a.modules.filter { a.biases.contains($0.name) }.map { ($0.name + ".bias", a.dimensions($0).1) },
                matrices: a.modules.map { ($0.name + ".", a.dimensions($0).1, a.dimensions($0).0) })
        }
        let table = [("", a.vocabSize, a.hiddenSize)]
        try check(manifest.embedding.arrays, manifest.embedding.words, vectors: [], matrices: table)
        try check(manifest.head.arrays, manifest.head.words, vectors: [("norm", a.hiddenSize)], matrices: table)
    }
}

extension Manifest {
    /// The most weights that share a scale in a row of a down projection. Tiles of the intermediate features are multiples of it.
    var featureGroup: Int {
        let scales = architecture.place(.down).module.name + ".scales"
        return blocks.compactMap { $0.arrays.first { $0.name == scales }?.shape.last }
            .map { architecture.intermediateSize / $0 }.max() ?? 1
    }

    /// Throws where the block function has no trace for the settings' length or rank, or the blocks lack a projection to train.
    func check(_ settings: RunSettings) throws {
        let (length, rank) = (settings.seqLen, settings.rank)
        _ = try settings.modules(of: architecture)
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
    var words: Int { (shape.reduce(1, *) * (dtype == "bfloat16" ? 2 : dtype == "uint8" ? 1 : 4) + 3) / 4 }
}

/// Typed views into a file of words, by name. No view copies.
struct PackedWeights {
    let words: MLXArray
    let arrays: [Manifest.PackedArray]
    let onCPU: Bool

    /// The array called `name`, in its shape and dtype, or nil where there is none.
    func array(_ name: String) -> MLXArray? {
        guard let array = arrays.first(where: { $0.name == name }) else { return nil }
        let flat = words[array.offset..<(array.offset + array.words)]
        let count = array.shape.reduce(1, *)
        switch array.dtype {
        case "uint32": return flat.reshaped(array.shape)
        case "float32": return flat.view(dtype: .float32).reshaped(array.shape)
        case "uint8": return flat.view(dtype: .uint8)[0..<count].reshaped(array.shape)
        default: return flat.view(dtype: .bfloat16)[0..<count].reshaped(array.shape)
        }
    }

    /// The array called `name`. `ModelBundle` has checked that it is there.
    subscript(name: String) -> MLXArray {
        guard let array = array(name) else { preconditionFailure("no array \(name) in the layout") }
        return array
    }

    /// The quantized matrix `[rows, inputs]` whose arrays' names start with `prefix`.
    func matrix(_ prefix: String, inputs: Int) -> QuantizedMatrix {
        let (weight, scales, biases) = (self[prefix + "weight"], self[prefix + "scales"], array(prefix + "biases"))
        guard
            let format = QuantizationFormat(
                inputs: inputs, words: weight.dim(1), groups: scales.dim(1), hasBiases: biases != nil)
        else { preconditionFailure("no format for \(prefix)") }
        return QuantizedMatrix(weight: weight, scales: scales, biases: biases, format: format, onCPU: onCPU)
    }
}

/// A block's frozen weights, and the formulas that they are part of.
struct BlockWeights {
    let architecture: Architecture
    let kind: AttentionKind
    let packed: PackedWeights

    /// W `[out, in]`
    func matrix(_ projection: Projection) -> QuantizedMatrix {
        let (module, outputs) = architecture.place(projection)
        return packed.matrix(module.name + ".", inputs: architecture.inputs(projection)).rows(outputs)
    }

    /// `[out]`
    func bias(_ projection: Projection) -> MLXArray? {
        let (module, outputs) = architecture.place(projection)
        return architecture.biases.contains(module.name) ? packed[module.name + ".bias"][outputs] : nil
    }

    /// Of the block's input.
    var attentionNorm: RMSNorm { norm("input_layernorm") }
    /// Of x_mid. Llama names it after its place, behind attention, which in a block with norms of the outputs is one of these's.
    var mlpNorm: RMSNorm { norm(architecture.postNorms ? "pre_feedforward_layernorm" : "post_attention_layernorm") }
    /// Of attention's and of the MLP's output.
    var attentionPostNorm: RMSNorm? { architecture.postNorms ? norm("post_attention_layernorm") : nil }
    var mlpPostNorm: RMSNorm? { architecture.postNorms ? norm("post_feedforward_layernorm") : nil }

    var attention: Attention {
        Attention(
            scale: architecture.attentionScale, softcap: architecture.attnLogitSoftcapping.map(SoftCap.init),
            window: kind.slidingWindow,
            rope: RoPE(frequencies: kind.frequencies, scale: kind.ropeScale),
            qNorm: architecture.qkNorm ? norm("self_attn.q_norm") : nil,
            kNorm: architecture.qkNorm ? norm("self_attn.k_norm") : nil)
    }

    private func norm(_ name: String) -> RMSNorm {
        RMSNorm(weight: packed[name + ".weight"], eps: architecture.rmsNormEps)
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
