import Foundation
import MLX
import MeSPFiles
import MeSPSentences

/// An object that keeps arrays backed by memory-mapped files of a bundle. A file is unmapped when its last array is freed.
package protocol MapHolder: AnyObject {
    func releaseArrays()
}

/// An exported model that was opened and checked. Weight files are memory-mapped on demand.
package struct ModelBundle {
    package let url: URL
    package let manifest: Manifest
    private let splits: [String: Manifest.Tokens]
    private let dataFolder: URL
    private var modified = [String: Duration]()
    package let device: Backend
    /// The processor whose code path is taken: `device`. Tests replace it.
    package var backend: Backend
    /// The dtype of activations: that of `device`. Tests and self-checks replace it.
    package var dtype: DType
    package let kinds: [Int]
    /// The manifest's `featureGroup`, cached because computing it takes a search.
    package let featureGroup: Int
    package let maps = Maps()

    /// The memory-mapped weight files. Nested uses of a file share its map. With `areKept`, files stay mapped after use, which saves the time to map
    /// them again.
    package final class Maps {
        package var areKept = false { didSet { if !areKept { release() } } }
        private var holders = [() -> (any MapHolder)?]()
        fileprivate var words = [String: MLXArray]()
        fileprivate(set) var mapped = [String: Int]()

        package func add(_ holder: some MapHolder) {
            holders.removeAll { $0() == nil }
            holders.append { [weak holder] in holder }
        }

        private func release() {
            words = [:]
            for holder in holders { holder()?.releaseArrays() }
        }
    }

    package var architecture: Architecture { manifest.architecture }

    /// Opens a bundle, and checks its manifest and the size of every file. Does not use MLX.
    ///
    /// - Parameters:
    ///   - text: a folder of tokenized text, to train on in place of the bundle's own text (see `TokenFolder`).
    ///   - checksums: whether to check the SHA-256 of every file too, which takes seconds for gigabytes.
    package init(url: URL, text: URL? = nil, device: Backend? = nil, checksums: Bool = true) throws {
        self.url = url
        let path = url.appendingPathComponent("manifest.json")
        guard let json = regularFile(path) else {
            throw MeSPError("\(url.path) is not a bundle: it has no manifest.json. Make one with mesp-export.")
        }
        manifest = try Manifest.read(json, of: url.path)
        self.device = device ?? .standard
        (backend, dtype) = (self.device, self.device.dtype)
        (kinds, featureGroup) = (manifest.kindOfBlock, manifest.featureGroup)
        (splits, dataFolder) = try text.map { (try TokenFolder.entries(in: $0), $0) } ?? (manifest.data ?? [:], url)
        modified = try checkFiles()
        if checksums { try checkSums(of: manifest.files) }
    }

    // MARK: - Functions and weights

    /// Imports the functions for sequences of `length` tokens and adapters of `rank`. Returns one function for each block, or nil for blocks without
    /// such a function. Functions compute in bfloat16 on a GPU, and plain functions in float32 on a CPU.
    package func importFunctions(
        _ files: KeyPath<Manifest.Blocks, [String: String]>, length: Int, rank: Int
    ) throws -> [ImportedFunction?] {
        var imported = [String: ImportedFunction]()
        let isPossible =
            switch device {
            case .cpu: files != \.plainFunctions || dtype == .float32
            case .gpu: files != \.plainFunctions && dtype == .bfloat16
            }
        let functions = try manifest.blocks.enumerated().map { kind, blocks -> ImportedFunction? in
            guard isPossible, manifest.ranks.contains(rank), let file = blocks[keyPath: files]["\(length)"] else {
                return nil
            }
            // MLX trusts the file's contents, so the file's checksum and functions are checked first.
            try checkSums(of: manifest.files.filter { $0.path == file })
            try checkFunctions(file, kind: kind, files, length: length)
            let function = try imported[file] ?? importFunction(from: url.appendingPathComponent(file))
            imported[file] = function
            return function
        }
        return kinds.map { functions[$0] }
    }

    /// Maps the weights of a file, at least until they are closed.
    package func open(_ file: Manifest.PackedFile) throws -> PackedWeights {
        let known = maps.words[file.file]
        let words = try map(file, known)
        var weights = PackedWeights(words: words, arrays: file.arrays, backend: backend)
        if known == nil {
            maps.words[file.file] = words
            maps.mapped[file.file, default: 0] += 1
            weights.unmap = { [maps] in if !maps.areKept { maps.words[file.file] = nil } }
        }
        return weights
    }

    /// Calls `body` with the weights of a file, which stays mapped at least during the call. `body` must evaluate the arrays that it returns.
    package func withWeights<R>(_ file: Manifest.PackedFile, _ body: (PackedWeights) throws -> R) throws -> R {
        let weights = try open(file)
        defer { weights.close() }
        let result = try body(weights)
        try MLXErrors.check()
        return result
    }

    private func map(_ file: Manifest.PackedFile, _ known: MLXArray?) throws -> MLXArray {
        func map() throws -> MLXArray {
            try mappedWords(
                url.appendingPathComponent(file.file), size: file.words * 4, modified: modified[file.file], known: known
            )
        }
        do {
            return try map()
        } catch  where maps.areKept {
            // Without an entitlement, iOS limits a process's address space. It may suffice for one mapped file at a time.
            maps.areKept = false
            return try map()
        }
    }

    package func withEmbedding<R>(_ body: (PackedWeights) throws -> R) throws -> R {
        try withWeights(manifest.embedding, body)
    }

    package func withHead<R>(_ body: (PackedWeights) throws -> R) throws -> R { try withWeights(manifest.head, body) }

    package func file(ofBlock index: Int) -> Manifest.PackedFile { manifest.blocks[kinds[index]].file(index) }

    package static func blockFile(_ index: Int) -> String { String(format: "blocks/%02d.bin", index) }

    // MARK: - Positions

    private struct Config: Decodable {
        struct RoPE: Decodable {
            var type: String?
            var factor: Double?
            var originalMaxPositionEmbeddings: Double?
            var llama4ScalingBeta: Double?
        }
        var maxPositionEmbeddings: Double?
        var ropeScaling: RoPE?
    }

    private var config: Config? {
        regularFile(url.appendingPathComponent("config.json"))
            .flatMap { try? JSONDecoder.snakeCase.decode(Config.self, from: $0) }
    }

    /// Throws if `length` exceeds the model's context length, which YaRN's factor extends. Also throws if the model scales positions or queries
    /// otherwise beyond its original context length, and the architecture in the manifest does not.
    package func checkPositions(_ length: Int) throws {
        guard let config else { return }
        let (rope, stated) = (config.ropeScaling, config.maxPositionEmbeddings)
        let extended =
            rope?.type == "yarn" ? rope?.factor.map { $0 * (rope?.originalMaxPositionEmbeddings ?? stated ?? 0) } : nil
        if let stated, let positions = Int(exactly: max(stated, extended ?? 0).rounded()), length > positions {
            throw MeSPError(
                "\(manifest.name) was trained for \(positions) positions, and sequences of \(length) tokens have more; take sequences of up to \(positions).",
                .invalidOption("sequenceLength"))
        }
        guard let limit = rope?.originalMaxPositionEmbeddings.flatMap({ Int(exactly: $0.rounded()) }) else { return }
        let lengths = manifest.seqLens + [length]
        if rope?.llama4ScalingBeta ?? 0 != 0, length > limit {
            throw MeSPError(
                "From \(limit) tokens on the model scales its queries, which is not supported; take sequences of up to that length.",
                .invalidOption("sequenceLength"))
        }
        if rope?.type == "longrope", lengths.contains(where: { $0 <= limit }), lengths.contains(where: { $0 > limit }) {
            throw MeSPError(
                "Beyond \(limit) tokens the model scales positions differently; export shorter and longer sequences as two bundles."
            )
        }
    }

    // MARK: - What a run depends on

    /// Returns a digest of the data of a split (`train`, `valid`, `test`), or nil if there is no such split.
    package func dataDigest(_ split: String) throws -> String? {
        guard let entry = splits[split] else { return nil }
        guard dataFolder == url else { return try digest(entry, in: dataFolder) }
        let sums = Dictionary(manifest.files.map { ($0.path, $0.sha256) }) { sum, _ in sum }
        return try digest(entry, in: url, sums: sums)
    }

    package func dataDigest(in folder: URL) throws -> String? {
        try TokenFolder.entries(in: folder)["train"].map { try digest($0, in: folder) }
    }

    private func digest(_ entry: Manifest.Tokens, in folder: URL, sums: [String: String] = [:]) throws -> String {
        var parts = try entry.parts.map { part, file in
            "\(part) \(try sums[file] ?? sha256(of: folder.appendingPathComponent(file)))"
        }
        if let begin = entry.begin { parts.append("begin \(begin)") }
        if entry.pack == true { parts.append("pack") }
        return digestOfAll(parts)
    }

    // MARK: - Data

    package func tokens(_ split: String) throws -> TokenStream? {
        try splits[split].map { try tokens($0, split, in: dataFolder) }
    }

    package func tokens(in folder: URL) throws -> TokenStream {
        guard let entry = try TokenFolder.entries(in: folder)["train"] else {
            throw MeSPError("\(folder.path) holds no tokens; tokenize the text again.")
        }
        return try tokens(entry, "train", in: folder)
    }

    /// Returns rows of images for this model, `[n, hidden]`.
    package func rows(_ rows: Data, _ dtype: ElementType) throws -> ImageRows {
        guard architecture.embeddingScale == 1, architecture.perLayer == nil,
            [.float16, .bfloat16, .float32].contains(dtype)
        else { throw MeSPError("The embeddings of \(manifest.name) cannot take images; leave them out.") }
        return ImageRows(rows: rows, dtype: dtype, width: architecture.hiddenSize * dtype.dtype.size, places: Data())
    }

    private func tokens(_ entry: Manifest.Tokens, _ split: String, in folder: URL) throws -> TokenStream {
        func data(_ file: String, _ count: Int, width: Int, else fault: Sentence? = nil) throws -> Data {
            guard let data = regularFile(folder.appendingPathComponent(file)) else {
                throw MeSPError("\(file) is not a file of \(folder.path); export it again.")
            }
            guard data.count % width == 0, data.count / width == count else {
                throw MeSPError(
                    fault ?? "\(file) in \(folder.path) does not have the length it should; export it again.")
            }
            return data
        }
        let stream = TokenStream(
            tokens: try data(entry.file, entry.tokens, width: 4),
            examples: try entry.examples.map { try data($0.file, $0.count, width: 8) },
            mask: try entry.mask.map { try data($0, entry.tokens, width: 1) },
            labels: try entry.labels.map { try data($0, entry.examples?.count ?? 0, width: 1) },
            begin: entry.begin, packsExamples: entry.pack ?? false,
            images: try entry.images.map { images in
                let width = architecture.hiddenSize * images.dtype.dtype.size
                let fault: Sentence =
                    "The rows of images in \(folder.path) are not of \(architecture.hiddenSize) numbers each, as this model needs; take them from its own vision tower, or export the data again."
                var rows = try rows(
                    try data(images.file, images.count, width: width, else: fault), images.dtype)
                rows.places = try data(images.places, entry.tokens, width: 4)
                return rows
            })
        try explaining {
            try stream.check(vocabulary: architecture.vocabSize)
        } as: {
            "The \(split) data of \(folder.path) \($0); export it again."
        }
        return stream
    }
}

extension Manifest {
    package var weightsDigest: String {
        let weights = Set(weightFiles.map(\.file))
        return digestOfAll(files.filter { weights.contains($0.path) }.map { "\($0.path) \($0.sha256)" })
    }
}

private func digestOfAll(_ parts: [String]) -> String { sha256(Data(parts.sorted().joined(separator: "\n").utf8)) }
