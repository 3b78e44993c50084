import Foundation
import MeSPBundle
import MeSPFiles
import MeSPImport
import MeSPSentences

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// A download of a bundle, or of a model in MLX's format that `MeSPImport` can convert, from the Hugging Face Hub.
///
/// A repository with a manifest.json holds a bundle. Of other repositories, the files that an import needs are downloaded. A file is refused if its
/// size or a known SHA-256 differs from the bundle's manifest or the repository's file list. `fetch` resumes an interrupted download.
public struct HubDownload: Sendable {
    package let repository: String
    private let hub: URL
    private let patience: Double
    private let transfer: any Transfer
    /// The maximum number of attempts without progress.
    private let attempts = 3

    /// - Parameters:
    ///   - repository: the repository, as `owner/name` or as its address on the Hub.
    ///   - patience: the timeout of a connection without data, in seconds.
    ///   - background: a transfer that receives files even while the app is suspended; nil to receive files only while the process runs.
    public init(
        repository: String, hub: URL = URL(string: "https://huggingface.co") ?? URL(fileURLWithPath: "/"),
        patience: Double = 30, background: BackgroundTransfer? = nil
    ) throws {
        let prefix = "https://huggingface.co/"
        let name = repository.hasPrefix(prefix) ? String(repository.dropFirst(prefix.count)) : repository
        let isWord = { (part: Substring) in
            !part.isEmpty && part.first != "."
                && part.allSatisfy { $0.isASCII && ($0.isLetter || $0.isNumber || "-_.".contains($0)) }
        }
        let parts = name.split(separator: "/", omittingEmptySubsequences: false)
        guard parts.count == 2, parts.allSatisfy(isWord) else {
            throw MeSPError("\(repository) is not a repository; write it as owner/name.")
        }
        (self.repository, self.hub, self.patience) = (name, hub, patience)
        transfer = background ?? ForegroundTransfer()
    }

    package var name: String { String(repository.split(separator: "/")[1]).replacing(/[-_.]mesp$/, with: "") }

    // MARK: - Fetching

    package func fetchOffer() async throws -> Offer {
        do {
            do {
                let (json, answer) = try await read(
                    "manifest.json", at: url("manifest.json", of: "main"), limit: Manifest.largestSize)
                let commit = answer.value(forHTTPHeaderField: "X-Repo-Commit").flatMap { Offer.isCommit($0) ? $0 : nil }
                return try Offer(repository: repository, json: json, commit: commit)
            } catch is FileNotFound {
                return try await fetchModelOffer()
            }
        } catch let error as RetryableFailure {
            throw MeSPError(error.sentence)
        }
    }

    private func fetchModelOffer() async throws -> Offer {
        let list = try await fetchFileList()
        let names = ModelImport.neededFiles(list.files.map(\.path))
        guard names.contains("config.json"), names.contains(where: { $0.hasSuffix(".safetensors") }) else {
            throw MeSPError(
                "\(repository) has neither a bundle nor a model in MLX's format, with config.json and safetensors; take another repository."
            )
        }
        let files = list.files.filter { names.contains($0.path) }
        func small(_ path: String) async throws -> Data? {
            guard let file = files.first(where: { $0.path == path }) else { return nil }
            guard file.size <= Self.largestText else {
                throw MeSPError("\(path) of \(repository) is longer than it may be.")
            }
            let data = try await read(path, at: url(path, of: list.commit), limit: file.size).data
            guard data.count == file.size else { throw isTooShort(path) }
            return data
        }
        guard let config = try await small("config.json") else { throw isTooShort("config.json") }
        let card = try await small("README.md")
        return try Offer(
            repository: repository,
            model: .init(commit: list.commit, config: config, card: card, files: files))
    }

    /// The maximum size of a config.json or a README.md, in bytes.
    private static let largestText = 1 << 20
    private static let mostFiles = 1000

    private func fetchFileList() async throws -> (commit: String, files: [Offer.File]) {
        struct List: Decodable {
            struct File: Decodable {
                struct LargeFile: Decodable {
                    let sha256: String
                    let size: Int
                }
                let rfilename: String
                let size: Int?
                let lfs: LargeFile?
            }
            let sha: String
            let siblings: [File]
        }
        let url = hub.appendingPathComponent("api/models/\(repository)/revision/main")
            .appending(queryItems: [URLQueryItem(name: "blobs", value: "true")])
        let json: Data
        do {
            json = try await read("file list", at: url, limit: Manifest.largestSize).data
        } catch is FileNotFound {
            throw MeSPError("There is no \(repository) on the Hub; write the repository as owner/name.")
        }
        guard let list = try? JSONDecoder().decode(List.self, from: json) else {
            throw MeSPError("The file list of \(repository) is not one; check the network and try again.")
        }
        let files = list.siblings.map { file in
            Offer.File(path: file.rfilename, size: file.lfs?.size ?? file.size ?? -1, sha256: file.lfs?.sha256)
        }
        guard files.count <= Self.mostFiles else {
            throw MeSPError("\(repository) has more files than a model needs; take another repository.")
        }
        try Offer.check(files, commit: list.sha, of: repository)
        return (list.sha, files)
    }

    private func read(_ path: String, at url: URL, limit: Int) async throws -> (data: Data, answer: HTTPURLResponse) {
        let file = FileManager.default.temporaryDirectory.appendingPathComponent("hub-\(UUID().uuidString)")
        defer { try? FileManager.default.removeItem(at: file) }
        let answer = try await ForegroundTransfer().receive(requested(path, at: url, into: file, limit: limit)) { _ in }
        return (try Data(contentsOf: file), answer)
    }

    /// Downloads the files that are missing in `folder`, and removes files that the offer does not list. Cancelling the task stops the download, and
    /// the next call resumes it.
    ///
    /// - Parameters:
    ///   - usesAnyNetwork: whether to use networks that cost extra or are in Low Data Mode. If not, a background transfer waits for another network,
    ///     and other transfers fail.
    ///   - progress: receives the number of bytes that this and earlier calls have downloaded so far.
    package func fetch(
        _ offer: Offer, to folder: URL, usesAnyNetwork: Bool = true,
        progress: @escaping @Sendable (_ bytes: Int) -> Void = { _ in }
    ) async throws {
        try attempt("written") {
            try makeFolder(folder)
            // A symbolic link could lead out of an existing folder.
            try removeFiles(in: folder) { $0 == .typeSymbolicLink }
        }
        let count = ByteCount(offer.json?.count ?? 0, progress)
        try await withThrowingTaskGroup(of: Void.self) { group in
            var begun = 0
            for file in offer.files {
                let target = folder.appendingPathComponent(file.path)
                try attempt("written") {
                    try FileManager.default.createDirectory(
                        at: target.deletingLastPathComponent(), withIntermediateDirectories: true)
                }
                if begun == transfer.filesAtOnce {
                    try await group.next()
                    begun -= 1
                }
                begun += 1
                group.addTask {
                    try Task.checkCancellation()
                    if try await !Self.isThere(target, file) {
                        try await fetch(
                            file, of: offer.commit ?? "main", to: target, usesAnyNetwork: usesAnyNetwork
                        ) { count[file.path] = $0 }
                    }
                    count[file.path] = file.size
                }
            }
            try await group.waitForAll()
        }
        try attempt("written") {
            // Files that the offer does not list, such as files of another commit, are removed.
            try removeFiles(in: folder, but: Set(offer.files.map(\.path))) { $0 != .typeDirectory }
            // The manifest is written last, because a folder with a manifest counts as a complete bundle.
            if let json = offer.json {
                try writeWhole(folder.appendingPathComponent("manifest.json")) { try $0.write(contentsOf: json) }
            }
        }
    }

    private func removeFiles(
        in folder: URL, but kept: Set<String> = [], where isRemoved: (FileAttributeType?) -> Bool
    ) throws {
        for path in try FileManager.default.subpathsOfDirectory(atPath: folder.path) where !kept.contains(path) {
            let file = folder.appendingPathComponent(path)
            let attributes = try FileManager.default.attributesOfItem(atPath: file.path)
            if isRemoved(attributes[.type] as? FileAttributeType) { try FileManager.default.removeItem(at: file) }
        }
    }

    private func url(_ path: String, of commit: String) -> URL {
        hub.appendingPathComponent("\(repository)/resolve/\(commit)/\(path)")
    }

    private func requested(_ path: String, at url: URL, into file: URL, limit: Int, usesAnyNetwork: Bool = true)
        -> RequestedFile
    {
        var request = URLRequest(url: url, cachePolicy: .reloadIgnoringLocalCacheData, timeoutInterval: patience)
        // Ranges must refer to the uncompressed file.
        request.setValue("identity", forHTTPHeaderField: "Accept-Encoding")
        request.usesAnyNetwork = usesAnyNetwork
        return RequestedFile(request: request, file: file, limit: limit, path: path, repository: repository)
    }

    private func isTooShort(_ path: String) -> MeSPError {
        MeSPError("\(path) of \(repository) is shorter than its repository says.")
    }

    private static func isThere(_ url: URL, _ file: Offer.File) async throws -> Bool {
        let attributes = try? FileManager.default.attributesOfItem(atPath: url.path)
        guard let attributes, attributes[.type] as? FileAttributeType == .typeRegular,
            attributes[.size] as? Int == file.size
        else { return false }
        return try await isSound(url, file)
    }

    private static func isSound(_ url: URL, _ file: Offer.File) async throws -> Bool {
        guard let digest = file.sha256 else { return true }
        return try await Task.detached { try sha256(of: url) }.value == digest
    }

    /// Downloads a file, first as a `.part` file, which is renamed when it is complete.
    private func fetch(
        _ file: Offer.File, of commit: String, to target: URL, usesAnyNetwork: Bool,
        progress: @escaping @Sendable (Int) -> Void
    ) async throws {
        let partial = target.appendingPathExtension("part")
        // After a power failure a file can have the right length and wrong contents. Only a SHA-256 would detect that.
        if file.sha256 == nil { try? FileManager.default.removeItem(at: partial) }
        try attempt("written") { close(try openRegularFile(partial, O_WRONLY | O_CREAT)) }
        let requested = requested(
            file.path, at: url(file.path, of: commit), into: partial, limit: file.size, usesAnyNetwork: usesAnyNetwork)
        var (failures, damaged) = (0, false)
        while true {
            let had = Self.size(partial)
            if had < file.size || had == 0 && file.size == 0 && failures == 0 {
                do {
                    _ = try await transfer.receive(requested, progress: progress)
                } catch let error as RetryableFailure {
                    failures = Self.size(partial) > had ? 0 : failures + 1
                    guard failures < attempts else { throw MeSPError(error.sentence) }
                    try await Task.sleep(for: .milliseconds(min(patience, 1) * 500 * Double(failures)))
                    continue
                }
                if Self.size(partial) < file.size {  // the server considers this the whole file
                    failures = Self.size(partial) > had ? 0 : failures + 1
                    guard failures < attempts else { throw isTooShort(file.path) }
                    continue
                }
            }
            if try await Self.isSound(partial, file) { break }
            try? FileManager.default.removeItem(at: partial)
            if damaged { throw MeSPError("\(file.path) of \(repository) is damaged: its SHA-256 differs.") }
            // The file may have been damaged in transit, so it is downloaded once more.
            damaged = true
            try attempt("written") { close(try openNewFile(partial)) }
        }
        try attempt("written") {
            let file = try openRegularFile(partial, O_WRONLY)
            defer { close(file) }
            guard synchronize(file) == 0 else { throw MeSPError("\(lastError())") }
            try replace(target, with: partial)
        }
    }

    private static func size(_ url: URL) -> Int {
        (try? FileManager.default.attributesOfItem(atPath: url.path))?[.size] as? Int ?? 0
    }

    private func attempt(_ done: Sentence, _ body: () throws -> Void) throws {
        do { try body() } catch { throw MeSPError("\(repository) cannot be \(done): \(error.plainSentence).") }
    }
}

private final class ByteCount: Sendable {
    private let lock = NSLock()
    private nonisolated(unsafe) var bytes = [String: Int]()  // guarded by the lock
    private nonisolated(unsafe) var sum: Int
    private let progress: @Sendable (Int) -> Void

    init(_ start: Int, _ progress: @escaping @Sendable (Int) -> Void) { (sum, self.progress) = (start, progress) }

    subscript(path: String) -> Int {
        get { lock.withLock { bytes[path] ?? 0 } }
        set {
            progress(
                lock.withLock {
                    sum += newValue - (bytes.updateValue(newValue, forKey: path) ?? 0)
                    return sum
                })
        }
    }
}
