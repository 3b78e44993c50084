import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

#if canImport(CryptoKit)
    import CryptoKit
#endif

extension ModelImport {
    struct SourcedArray {
        let array: Manifest.PackedArray
        let tensor: SourceTensor
        let convert: ((UnsafeRawBufferPointer) -> [UInt8])?
    }

    /// Writes the bundle.
    ///
    /// The hidden folder `.importing-NAME` beside `bundle` holds the incomplete bundle. At the end it is renamed to `bundle`. If a call ends early,
    /// the next call keeps the weight files that equal what it would write.
    ///
    /// - Parameters:
    ///   - replaces: whether to replace an existing bundle that an import wrote. Its weight files that are the same are kept. Without this, `bundle`
    ///     must not exist yet.
    ///   - progress: receives the number of bytes written or kept so far, and how many of them were kept. The closure may throw an error to stop.
    /// - Throws: `MeSPError` if the bundle cannot be written, or the model has changed; also the errors of `progress`.
    package func write(
        to bundle: URL, replaces: Bool = false, progress: (_ bytes: Int, _ kept: Int) throws -> Void = { _, _ in }
    ) throws {
        let isThere = FileManager.default.fileExists(atPath: bundle.path)
        guard !isThere || replaces && Self.isImported(bundle) else {
            throw MeSPError("There is a bundle \(bundle.lastPathComponent) already; delete it first.")
        }
        let partial = Self.partial(of: bundle)
        // Anybody may have put a link in the place of the folder.
        if (try? FileManager.default.destinationOfSymbolicLink(atPath: partial.path)) != nil { unlink(partial.path) }
        let lock = try FolderLock(partial)
        defer { withExtendedLifetime(lock) { Self.removeEmpty(partial) } }
        StoragePolicy.bundle.apply(to: partial)
        try described(bundle) { try makeFolder(partial.appendingPathComponent("blocks")) }
        let sizes = Dictionary(manifest.weightFiles.map { ($0.file, 4 * $0.words) }) { size, _ in size }
        if isThere { try described(bundle) { try Self.take(sizes.keys, from: bundle, into: partial) } }
        let there = sizes.filter { Self.size(partial.appendingPathComponent($0.key)) == $0.value }
        try described(bundle) { try Self.removeFiles(in: partial, but: Set(there.keys)) }
        let most = there.values.reduce(0, +)
        if let free = bundle.deletingLastPathComponent().freeBytes, free < size - most {
            throw MeSPError(
                "\(bundle.lastPathComponent) takes \((size - most).megabytes(.up)), and its disk has \(free.megabytes(.down)) free; make room for it first.",
                .insufficientDisk(required: size - most))
        }
        var (bytes, kept, files) = (0, 0, [String: BundleFile]())
        for file in manifest.weightFiles where files[file.file] == nil {
            try checkIsUnchanged()
            let (entry, isKept) = try described(bundle) {
                try write(file, into: partial) {
                    bytes += $0
                    try progress(bytes, kept)
                }
            }
            files[file.file] = entry
            if isKept { kept += entry.size }
        }
        try progress(bytes, kept)
        try checkIsUnchanged()
        try described(bundle) {
            let files = try Array(files.values) + writeOthers(into: partial)
            var entry = entry
            entry["source"] = .string(identity)
            entry["files"] = .array(files.sorted { $0.path < $1.path }.map(\.entry))
            let json = Data(JSONValue.object(entry).json.utf8)
            _ = try Manifest.read(json, of: bundle.lastPathComponent)
            try writeWhole(partial.appendingPathComponent("manifest.json")) { try $0.write(contentsOf: json) }
            unlink(partial.appendingPathComponent(".lock").path)
            for folder in [partial.appendingPathComponent("blocks"), partial] {
                guard synchronize(folder: folder) == 0 else { throw MeSPError("\(lastError())") }
            }
            try replace(bundle, with: partial)
        }
    }

    /// Whether a folder is a bundle that an import wrote, perhaps that of another version.
    private static func isImported(_ folder: URL) -> Bool {
        (try? readObject(folder.appendingPathComponent("manifest.json")))?["source"] != nil
    }

    private static func take(_ files: some Sequence<String>, from bundle: URL, into partial: URL) throws {
        for file in files {
            rename(bundle.appendingPathComponent(file).path, partial.appendingPathComponent(file).path)
        }
        try replace(partial.appendingPathComponent("replaced"), with: bundle)
    }

    private static func size(_ url: URL) -> Int? {
        guard let file = try? openRegularFile(url, O_RDONLY) else { return nil }
        defer { close(file) }
        return status(of: file)?.size
    }

    package func hasWritten(_ bundle: URL) -> Bool {
        (try? ModelBundle(url: bundle, checksums: false))?.manifest.source == identity
    }

    package static func partial(of bundle: URL) -> URL {
        bundle.deletingLastPathComponent().appendingPathComponent(".importing-\(bundle.lastPathComponent)")
    }

    /// Calls `body`. Turns its errors, except cancellations, into `MeSPError`s that name the bundle.
    private func described<R>(_ bundle: URL, _ body: () throws -> R) throws -> R {
        do { return try body() } catch let error as CancellationError { throw error } catch {
            throw MeSPError("Cannot write \(bundle.path): \(error.plainSentence).")
        }
    }

    private func checkIsUnchanged() throws {
        for file in source.files {
            let opened = try? openRegularFile(file.url, O_RDONLY, followsLinks: true)
            defer { if let opened { close(opened) } }
            guard let opened, let now = status(of: opened), (now.size, now.modified) == (file.size, file.modified)
            else {
                throw MeSPError("\(file.url.path) has changed while it was read; begin again.")
            }
        }
    }

    // MARK: - Weights

    func arrays(of file: Manifest.PackedFile) throws -> [SourcedArray] {
        let module: String
        let block = manifest.architecture.numHiddenLayers
        if let index = (0..<block).first(where: { ModelBundle.blockFile($0) == file.file }) {
            module = "model.layers.\(index)."
        } else {
            module = file.file == "head.bin" ? "lm_head." : "model.embed_tokens."
        }
        return try file.arrays.sorted { $0.offset < $1.offset }.map { array in
            try self.array(array, array.name == "norm" ? "model.norm.weight" : module + array.name)
        }
    }

    private func array(_ array: Manifest.PackedArray, _ name: String) throws -> SourcedArray {
        if array.name.hasSuffix("scales") || array.name.hasSuffix("biases") || array.dtype == .uint32 {
            let stem = String(name[..<(name.lastIndex(of: ".") ?? name.endIndex)])
            guard source.tensors["\(stem).weight"] == nil || source.tensors["\(stem).scales"] != nil else {
                throw notQuantized(stem)
            }
            try source.checkBiases(of: stem, quantizations.inFiles(stem))
            if array.dtype == .uint32, try quantizations.inFiles(stem).isOneBit {
                let tensor = try source.tensor(name, [array.shape[0], array.shape[1] / 2])
                return SourcedArray(array: array, tensor: tensor, convert: packedIn2Bits)
            }
        }
        let tensor = try source.tensor(name, array.shape)
        let conversion = NumberConversion(
            from: tensor.type, offset: Self.isNorm(name) ? family.normOffset : 0,
            divisor: array.name == "norm" ? divisor : 1)
        guard array.dtype == .float32, !conversion.isIdentity else {
            return SourcedArray(array: array, tensor: tensor, convert: nil)
        }
        return SourcedArray(array: array, tensor: tensor, convert: { conversion.convert($0) })
    }

    static func isNorm(_ tensor: String) -> Bool { tensor.hasSuffix("norm.weight") }

    /// The divisor of the logits. The import divides the weights of the last norm by this number, which has the same effect.
    private var divisor: Float { Float(entry["architecture"]?.object?["logits_scaling"]?.double ?? 1) }

    /// Writes a weight file, unless the file is there already with the same contents.
    ///
    /// - Returns: the file, and whether an existing file was kept.
    private func write(
        _ file: Manifest.PackedFile, into folder: URL, progress: (Int) throws -> Void
    ) throws -> (BundleFile, isKept: Bool) {
        let (url, size) = (folder.appendingPathComponent(file.file), 4 * file.words)
        func described(_ hash: inout SHA256) -> BundleFile {
            BundleFile(path: file.file, size: size, sha256: hexadecimal(hash.finalize()))
        }
        if Self.size(url) == size, let old = regularFile(url) {
            struct Difference: Error {}
            var (hash, place) = (SHA256(), 0)
            do {
                try pieces(of: file) { piece in
                    guard old[place..<place + piece.count] == piece else { throw Difference() }
                    hash.update(data: piece)
                    place += piece.count
                    try progress(0)
                }
                try progress(size)
                return (described(&hash), true)
            } catch is Difference {}
        }
        var hash = SHA256()
        try withoutActuallyEscaping(progress) { progress in
            try writeWhole(url, isInBackup: false) { handle in
                try pieces(of: file) { piece in
                    try handle.write(contentsOf: piece)
                    hash.update(data: piece)
                    try progress(piece.count)
                }
            }
        }
        return (described(&hash), false)
    }

    private func pieces(of file: Manifest.PackedFile, _ body: (Data) throws -> Void) throws {
        var (buffer, place) = (Data(), 0)
        func flush() throws {
            try body(buffer)
            place += buffer.count
            buffer.removeAll(keepingCapacity: true)
        }
        func append(_ bytes: some Collection<UInt8>) throws {
            buffer.append(contentsOf: bytes)
            if buffer.count >= 1 << 20 { try flush() }
        }
        func pad(to end: Int) throws { try append(repeatElement(0, count: end - place - buffer.count)) }
        for each in try arrays(of: file) {
            try pad(to: 4 * each.array.offset)
            try each.tensor.read { bytes in
                try append(each.convert?(bytes) ?? Array(bytes))
            }
        }
        try pad(to: 4 * file.words)
        try flush()
    }

    // MARK: - Other files

    private func writeOthers(into partial: URL) throws -> [BundleFile] {
        func write(_ name: String, _ data: Data) throws -> BundleFile {
            try writeWhole(partial.appendingPathComponent(name)) { try $0.write(contentsOf: data) }
            return BundleFile(path: name, size: data.count, sha256: sha256(data))
        }
        let copies = try copied.map { try write($0, Self.contents($0, in: folder)) }
        return try [write("config.json", Data(config.json.utf8))] + copies
    }

    private static func removeFiles(in folder: URL, but kept: Set<String>) throws {
        for path in try FileManager.default.subpathsOfDirectory(atPath: folder.path)
        where !kept.contains(path) && ![".lock", "blocks"].contains(path) {
            try? FileManager.default.removeItem(at: folder.appendingPathComponent(path))
        }
    }

    private static func removeEmpty(_ folder: URL) {
        rmdir(folder.appendingPathComponent("blocks").path)
        guard (try? FileManager.default.contentsOfDirectory(atPath: folder.path)) == [".lock"] else { return }
        unlink(folder.appendingPathComponent(".lock").path)
        rmdir(folder.path)
    }
}
