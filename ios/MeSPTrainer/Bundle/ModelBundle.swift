import Foundation
import MLX
import MeSPFiles
import MeSPSentences

/// An object that keeps arrays that view a bundle's maps. A map is unmapped when the last array that views it is freed.
package protocol MapHolder: AnyObject {
    func releaseArrays()
}

/// An exported model, opened and checked. Weights are mapped on request and never copied.
package struct ModelBundle {
    package let url: URL
    package let manifest: Manifest
    /// The token streams by split. Their files are in `dataFolder`.
    private let splits: [String: Manifest.Tokens]
    private let dataFolder: URL
    /// The modification times of the checked files of weights.
    private var modified = [String: Duration]()
    /// The manifest's device. Tests set `gpu` to compute on a CPU as on a GPU.
    package var backend: Backend
    /// For each block, the index of its kind in the manifest's `blocks`.
    package let kinds: [Int]
    package let maps = Maps()

    /// The mapped files of weights. Nested uses of a file share its map. With `areKept`, files stay mapped after their use. Mapping a file again
    /// costs time, because a GPU needs a new buffer and the system must find the pages again.
    package final class Maps {
        package var areKept = false { didSet { if !areKept { release() } } }
        /// The objects that keep arrays that view maps, as weak references.
        private var holders = [() -> (any MapHolder)?]()
        fileprivate var words = [String: MLXArray]()
        /// The number of times that each file was mapped.
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
    package var dtype: DType { manifest.dtype.dtype }

    /// Opens the bundle at `url`. Checks its manifest, as `Manifest.read` does, and the size and SHA-256 of every file. Opening a bundle does not use
    /// MLX, so bundles that cannot run here can be listed and copied.
    ///
    /// - Parameters:
    ///   - url: the bundle's folder.
    ///   - text: a folder that `TextData` wrote, to train on in place of the bundle's own text.
    ///   - checksums: whether to check the files' sizes and SHA-256, which takes seconds for gigabytes. If false, only the manifest may be used.
    package init(url: URL, text: URL? = nil, checksums: Bool = true) throws {
        self.url = url
        let path = url.appendingPathComponent("manifest.json")
        guard let json = regularFile(path) else {
            throw MeSPError("\(url.path) is not a bundle: it has no manifest.json. Make one with mesp-export.")
        }
        manifest = try Manifest.read(json, of: url.path)
        backend = manifest.device
        kinds = manifest.kindOfBlock
        (splits, dataFolder) = try text.map { (try TokenFolder.entries(in: $0), $0) } ?? (manifest.data ?? [:], url)
        modified = try checkFiles()
        if checksums { try checkSums(of: manifest.files) }
    }

    // MARK: - Functions and weights

    /// Imports the functions for sequences of `length` tokens. Each block gets the function of its kind, or nil if the kind has none.
    /// `Manifest.check` has checked that each kind with functions has one for this length.
    package func importFunctions(
        _ files: KeyPath<Manifest.Blocks, [String: String]>, length: Int
    ) throws -> [ImportedFunction?] {
        var imported = [String: ImportedFunction]()
        let functions = try manifest.blocks.enumerated().map { kind, blocks -> ImportedFunction? in
            guard blocks.hasFunctions else { return nil }
            guard let file = blocks[keyPath: files]["\(length)"] else {
                preconditionFailure("no function for \(length) tokens")
            }
            // MLX trusts the contents of the file, and the bundle may have been opened without comparing checksums.
            try checkSums(of: manifest.files.filter { $0.path == file })
            try checkFunctions(file, kind: kind, length: length, packed: files == \.packed)
            let function = try imported[file] ?? importFunction(from: url.appendingPathComponent(file))
            imported[file] = function
            return function
        }
        return kinds.map { functions[$0] }
    }

    /// Calls `body` with the weights of a file, which stays mapped at least while `body` runs. `body` must evaluate the arrays that it returns.
    package func withWeights<R>(_ file: Manifest.PackedFile, _ body: (PackedWeights) throws -> R) throws -> R {
        let known = maps.words[file.file]
        let words = try map(file, known)
        if known == nil {
            maps.words[file.file] = words
            maps.mapped[file.file, default: 0] += 1
        }
        defer { if known == nil, !maps.areKept { maps.words[file.file] = nil } }
        // While this reference lives, MLX can't donate the mapped buffer and write a result into it.
        return try withExtendedLifetime(words) {
            let result = try body(PackedWeights(words: words, arrays: file.arrays, backend: backend))
            try MLXErrors.check()
            return result
        }
    }

    /// - Parameter known: the existing map of the file, if any.
    private func map(_ file: Manifest.PackedFile, _ known: MLXArray?) throws -> MLXArray {
        func map() throws -> MLXArray {
            try mappedWords(
                url.appendingPathComponent(file.file), size: file.words * 4, modified: modified[file.file], known: known
            )
        }
        do {
            return try map()
        } catch  where maps.areKept {
            // iOS gives a process without an entitlement few addresses. These may suffice for one mapped file at a time.
            maps.areKept = false
            return try map()
        }
    }

    package func withEmbedding<R>(_ body: (PackedWeights) throws -> R) throws -> R {
        try withWeights(manifest.embedding, body)
    }

    package func withHead<R>(_ body: (PackedWeights) throws -> R) throws -> R { try withWeights(manifest.head, body) }

    /// Returns the file of block `index`.
    package func file(ofBlock index: Int) -> Manifest.PackedFile { manifest.blocks[kinds[index]].file(index) }

    package static func blockFile(_ index: Int) -> String { String(format: "blocks/%02d.bin", index) }

    // MARK: - Positions

    private struct Config: Decodable {
        struct RoPE: Decodable {
            var type: String?
            var factor: Double?
            var originalMaxPositionEmbeddings: Double?
        }
        var maxPositionEmbeddings: Double?
        var ropeScaling: RoPE?
    }

    /// The number of positions that the model was trained for, according to its config.json. With YaRN, this is at least the original number times
    /// YaRN's factor. nil if config.json does not state the number.
    private var positions: Int? {
        guard let json = regularFile(url.appendingPathComponent("config.json")),
            let config = try? JSONDecoder.snakeCase.decode(Config.self, from: json),
            let most = config.maxPositionEmbeddings
        else { return nil }
        guard let rope = config.ropeScaling, rope.type == "yarn", let factor = rope.factor else {
            return Int(exactly: most.rounded())
        }
        return Int(exactly: max(most, factor * (rope.originalMaxPositionEmbeddings ?? most)).rounded())
    }

    /// Throws if sequences of `length` tokens have more positions than the model was trained for.
    package func checkPositions(_ length: Int) throws {
        guard let positions, length > positions else { return }
        throw MeSPError(
            "\(manifest.name) was trained for \(positions) positions, and sequences of \(length) tokens have more; take a --seq-len up to \(positions)."
        )
    }

    // MARK: - What a run depends on

    /// A digest of the files of weights. It does not depend on functions, data or the bundle's place.
    package var weightsDigest: String {
        let weights = Set(manifest.weightFiles.map(\.file))
        let sums = manifest.files.filter { weights.contains($0.path) }.map { "\($0.path) \($0.sha256)" }
        return digest(sums)
    }

    /// Returns a digest of the sequences of a split (`train`, `valid`, `test`), which does not depend on where their files are; nil if there is no
    /// such split.
    package func dataDigest(_ split: String) throws -> String? {
        guard let entry = splits[split] else { return nil }
        guard dataFolder == url else { return try digest(entry, in: dataFolder) }
        let sums = Dictionary(manifest.files.map { ($0.path, $0.sha256) }) { sum, _ in sum }
        return try digest(entry, in: url, sums: sums)
    }

    /// Returns a digest, as `dataDigest(_:)` does, of the tokens that `tokens(in:)` reads.
    package func dataDigest(in folder: URL) throws -> String? {
        try TokenFolder.entries(in: folder)["train"].map { try digest($0, in: folder) }
    }

    /// - Parameter sums: the known SHA-256 of files, which are then not read.
    private func digest(_ entry: Manifest.Tokens, in folder: URL, sums: [String: String] = [:]) throws -> String {
        let files = [
            ("tokens", entry.file), ("examples", entry.examples?.file), ("mask", entry.mask), ("labels", entry.labels),
        ]
        var parts = try files.compactMap { part, file in
            try file.map { "\(part) \(try sums[$0] ?? sha256(of: folder.appendingPathComponent($0)))" }
        }
        if let begin = entry.begin { parts.append("begin \(begin)") }
        if entry.pack == true { parts.append("pack") }
        return digest(parts)
    }

    private func digest(_ parts: [String]) -> String { sha256(Data(parts.sorted().joined(separator: "\n").utf8)) }

    // MARK: - Data

    /// Returns the mapped tokens of a split (`train`, `valid`, `test`), or nil if the bundle has none.
    package func tokens(_ split: String) throws -> TokenStream? {
        try splits[split].map { try tokens($0, split, in: dataFolder) }
    }

    /// Returns the mapped tokens of a folder that `TextData` or `mesp train` wrote, without the held-out part.
    package func tokens(in folder: URL) throws -> TokenStream {
        guard let entry = try TokenFolder.entries(in: folder)["train"] else {
            throw MeSPError("\(folder.path) holds no tokens; tokenize the text again.")
        }
        return try tokens(entry, "train", in: folder)
    }

    private func tokens(_ entry: Manifest.Tokens, _ split: String, in folder: URL) throws -> TokenStream {
        func data(_ file: String, _ count: Int, width: Int) throws -> Data {
            guard let data = regularFile(folder.appendingPathComponent(file)) else {
                throw MeSPError("\(file) is not a file of \(folder.path); export it again.")
            }
            guard data.count % width == 0, data.count / width == count else {
                throw MeSPError("\(file) in \(folder.path) does not have the length it should; export it again.")
            }
            return data
        }
        let stream = TokenStream(
            tokens: try data(entry.file, entry.tokens, width: 4),
            examples: try entry.examples.map { try data($0.file, $0.count, width: 8) },
            mask: try entry.mask.map { try data($0, entry.tokens, width: 1) },
            labels: try entry.labels.map { try data($0, entry.examples?.count ?? 0, width: 1) },
            begin: entry.begin, packsExamples: entry.pack ?? false)
        do {
            try stream.check(vocabulary: architecture.vocabSize)
        } catch {
            throw MeSPError("The \(split) data of \(folder.path) \(error.plainSentence); export it again.")
        }
        return stream
    }
}
