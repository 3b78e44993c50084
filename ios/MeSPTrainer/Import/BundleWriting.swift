import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

#if canImport(CryptoKit)
    import CryptoKit
#endif

extension ModelImport {
    /// An array of a weight file, and the tensor from which it is made.
    struct SourcedArray {
        let array: Manifest.PackedArray
        let tensor: SourceTensor
        /// The conversion of the tensor; nil if its bytes are copied unchanged.
        let conversion: Conversion?
    }

    /// Writes the bundle.
    ///
    /// The hidden folder `.importing-NAME` beside `bundle` holds the incomplete bundle. At the end it is renamed to `bundle`. If a call ends early,
    /// the next call with the same model and options keeps the complete files.
    ///
    /// - Parameters:
    ///   - bundle: the folder, which must not exist yet.
    ///   - progress: receives the number of bytes written so far, and how many of them an earlier call has written. The closure may throw an error to
    ///     stop.
    /// - Throws: `MeSPError` if the bundle cannot be written, or the model has changed; also the errors of `progress`.
    package func write(to bundle: URL, progress: (_ bytes: Int, _ kept: Int) throws -> Void = { _, _ in }) throws {
        guard !FileManager.default.fileExists(atPath: bundle.path) else {
            throw MeSPError("There is a bundle \(bundle.lastPathComponent) already; delete it first.")
        }
        let parent = bundle.deletingLastPathComponent()
        let partial = Self.partial(of: bundle)
        let lock = try FolderLock(partial)
        defer { withExtendedLifetime(lock) {} }
        Backups.leaveOut(partial)
        if hasWritten(partial) {  // the earlier call ended before the last rename
            try progress(size, size)
            return try described(bundle) { try finish(partial, bundle) }
        }
        let recordFile = partial.appendingPathComponent(Self.recordName)
        var record = Record.read(recordFile, identity) ?? Record(identity: identity)
        record.files = record.files.filter { Self.size(partial.appendingPathComponent($0.key)) == $0.value.size }
        try described(bundle) { try Self.removeFiles(in: partial, but: Set(record.files.keys)) }
        let kept = record.files.values.reduce(0) { $0 + $1.size }
        if let free = parent.freeBytes, free < size - kept {
            throw MeSPError(
                "\(bundle.lastPathComponent) takes \((size - kept).megabytes), and its disk has \(free.megabytes) free; make room for it first."
            )
        }
        try described(bundle) { try makeFolder(partial.appendingPathComponent("blocks")) }
        var bytes = kept
        try progress(bytes, kept)
        for file in manifest.weightFiles where record.files[file.file] == nil {
            try checkIsUnchanged()
            let written = try described(bundle) {
                try write(file, into: partial) {
                    bytes += $0
                    try progress(bytes, kept)
                }
            }
            record.files[file.file] = written
            try described(bundle) { try record.write(recordFile) }
        }
        try checkIsUnchanged()
        try described(bundle) {
            let files = try Array(record.files.values) + writeOthers(into: partial)
            var entry = entry
            entry["source"] = .string(identity)
            entry["files"] = .array(files.sorted { $0.path < $1.path }.map(\.entry))
            let json = Data(JSONValue.object(entry).json.utf8)
            _ = try Manifest.read(json, of: bundle.lastPathComponent)
            try writeWhole(partial.appendingPathComponent("manifest.json")) { try $0.write(contentsOf: json) }
            try finish(partial, bundle)
        }
    }

    /// Removes the import's own files, and renames the complete bundle.
    private func finish(_ partial: URL, _ bundle: URL) throws {
        for name in [Self.recordName, ".lock"] {
            let file = partial.appendingPathComponent(name)
            if FileManager.default.fileExists(atPath: file.path) { try FileManager.default.removeItem(at: file) }
        }
        for folder in [partial.appendingPathComponent("blocks"), partial] {
            guard synchronize(folder: folder) == 0 else { throw MeSPError("\(lastError())") }
        }
        try replace(bundle, with: partial)
    }

    private static let recordName = "import.json"

    /// Returns whether the folder is a bundle made from this model with these options.
    package func hasWritten(_ bundle: URL) -> Bool {
        (try? ModelBundle(url: bundle, checksums: false))?.manifest.source == identity
    }

    /// Returns the folder for an incomplete bundle.
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

    /// Returns the arrays of a weight file, in the order of their offsets.
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
            guard !source.isStoredUnquantized(stem) else { throw notQuantized(stem) }
            try source.checkBiases(of: stem, quantizations.inFiles(stem))
            if array.dtype == .uint32, try quantizations.inFiles(stem).isOneBit {
                let tensor = try source.tensor(name, [array.shape[0], array.shape[1] / 2])
                return SourcedArray(array: array, tensor: tensor, conversion: .to2Bits)
            }
        }
        let tensor = try source.tensor(name, array.shape)
        guard array.dtype == .float32 || array.dtype == .bfloat16 else {
            return SourcedArray(array: array, tensor: tensor, conversion: nil)
        }
        var conversion = NumberConversion(from: tensor.type, toBFloat16: array.dtype == .bfloat16)
        if array.shape.count == 1, !name.hasSuffix(".bias") {  // a norm
            conversion.offset = family.normOffset
            if array.name == "norm" { conversion.divisor = divisor }
        }
        return SourcedArray(
            array: array, tensor: tensor, conversion: conversion.isIdentity ? nil : .numbers(conversion))
    }

    /// The divisor of the logits. The import divides the weights of the last norm by this number, which has the same effect.
    private var divisor: Float { Float(entry["architecture"]?.object?["logits_scaling"]?.double ?? 1) }

    private func write(
        _ file: Manifest.PackedFile, into folder: URL, progress: (Int) throws -> Void
    ) throws -> BundleFile {
        var hash = SHA256()
        let url = folder.appendingPathComponent(file.file)
        try withoutActuallyEscaping(progress) { progress in
            try writeWhole(url, isInBackup: false) { handle in
                var (buffer, place) = (Data(), 0)
                func flush() throws {
                    try handle.write(contentsOf: buffer)
                    hash.update(data: buffer)
                    place += buffer.count
                    try progress(buffer.count)
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
                        try append(each.conversion.map { $0.convert(bytes) } ?? Array(bytes))
                    }
                }
                try pad(to: 4 * file.words)
                try flush()
            }
        }
        return BundleFile(path: file.file, size: 4 * file.words, sha256: hexadecimal(hash.finalize()))
    }

    // MARK: - Other files

    /// Writes config.json, and copies the files in `copied`.
    private func writeOthers(into partial: URL) throws -> [BundleFile] {
        func write(_ name: String, _ data: Data) throws -> BundleFile {
            try writeWhole(partial.appendingPathComponent(name)) { try $0.write(contentsOf: data) }
            return BundleFile(path: name, size: data.count, sha256: sha256(data))
        }
        return try [write("config.json", Data(config.json.utf8))] + copied.map { try write($0, contents($0)) }
    }

    /// Returns the contents of a file to copy. Configurations lose the keys that name Python code.
    func contents(_ name: String) throws -> Data {
        let (url, real) = (folder.appendingPathComponent(name), folder.resolvingSymlinksInPath())
        let parent = real.deletingLastPathComponent()
        // In the Hugging Face Hub's cache, a snapshot's files are links to files outside of the snapshot.
        let root = parent.lastPathComponent == "snapshots" ? parent.deletingLastPathComponent() : real
        guard url.resolvingSymlinksInPath().path.hasPrefix(root.path + "/") else {
            throw MeSPError("\(url.path) is a link that leads out of its folder; put the file there.")
        }
        guard let data = regularFile(url, followsLinks: true) else {
            throw MeSPError("\(url.path) is not a regular file; put one in its place.")
        }
        guard ["tokenizer_config.json", "generation_config.json"].contains(name) else { return data }
        guard let value = try? readObject(url) else {
            throw MeSPError("\(url.path) cannot be read as a JSON object.")
        }
        let clean = withoutCode(.object(value))
        return clean == .object(value) ? data : Data(clean.json.utf8)
    }

    // MARK: - The record

    /// The files that an import has written so far.
    private struct Record: Codable {
        let identity: String
        var files = [String: BundleFile]()

        static func read(_ url: URL, _ identity: String) -> Self? {
            guard let data = regularFile(url), let record = try? JSONDecoder().decode(Self.self, from: data) else {
                return nil
            }
            return record.identity == identity ? record : nil
        }

        func write(_ url: URL) throws {
            let json = try JSONEncoder().encode(self)
            try writeWhole(url) { try $0.write(contentsOf: json) }
        }
    }

    private static func size(_ url: URL) -> Int? {
        guard let file = try? openRegularFile(url, O_RDONLY) else { return nil }
        defer { close(file) }
        return status(of: file)?.size
    }

    /// Removes all files except the lock, the record and the files to keep.
    private static func removeFiles(in folder: URL, but kept: Set<String>) throws {
        for path in try FileManager.default.subpathsOfDirectory(atPath: folder.path)
        where !kept.contains(path) && ![".lock", recordName, "blocks"].contains(path) {
            try? FileManager.default.removeItem(at: folder.appendingPathComponent(path))
        }
    }
}
