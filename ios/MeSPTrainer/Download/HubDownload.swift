import Foundation
import MeSPBundle
import MeSPFiles
import MeSPImport
import MeSPSentences

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// A download from a repository of the Hugging Face Hub: of a bundle, or of a model in MLX's format that `MeSPImport` can rewrite.
///
///     let download = try HubDownload(repository: "mlx-community/Qwen2.5-0.5B-Instruct-4bit")
///     let offer = try await download.fetchOffer()
///     try await download.fetch(offer, to: folder) { bytes in … }
///
/// A repository with a manifest.json holds a bundle: the files that the manifest lists are downloaded. Of another one the Hub's list of
/// files is read, and those that an import needs are downloaded. A file is refused that has not the size and, where it is known, the
/// SHA-256 that were named. `fetch` resumes a download that ended early.
public struct HubDownload: Sendable {
    /// As `owner/name`.
    package let repository: String
    private let hub: URL
    /// The timeout of a silent connection, in seconds.
    private let patience: Double
    /// The transfer of the bundle's files.
    private let transfer: any Transfer
    /// The number of retries without progress.
    private let attempts = 3

    /// - Parameters:
    ///   - repository: as `owner/name`, or its address on the Hub.
    ///   - hub: the Hub's address.
    ///   - patience: the timeout of a silent connection, in seconds.
    ///   - background: receives files while the app is suspended; without it only while the process runs.
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

    /// The bundle's name, as its folder gets it.
    package var name: String { String(repository.split(separator: "/")[1]).replacing(/[-_.]mesp$/, with: "") }

    // MARK: - Fetching

    /// Asks what the repository holds, and checks that this build can use it.
    ///
    /// - Parameter device: what a model is rewritten for; nil as `ModelImport` has it.
    package func fetchOffer(for device: Backend? = nil) async throws -> Offer {
        do {
            do {
                let (json, answer) = try await read("manifest.json", of: "main", limit: Manifest.largestSize)
                let commit = answer.value(forHTTPHeaderField: "X-Repo-Commit").flatMap { Offer.isCommit($0) ? $0 : nil }
                return try Offer(repository: repository, json: json, commit: commit)
            } catch is FileNotFound {
                return try await fetchModelOffer(for: device)
            }
        } catch let error as RetryableFailure {
            throw MeSPError(error.sentence)
        }
    }

    private func fetchModelOffer(for device: Backend?) async throws -> Offer {
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
            let data = try await read(path, of: list.commit, limit: file.size).data
            guard data.count == file.size else { throw isTooShort(path) }
            return data
        }
        guard let config = try await small("config.json") else { throw isTooShort("config.json") }
        let card = try await small("README.md")
        return try Offer(
            repository: repository,
            model: .init(commit: list.commit, config: config, card: card, device: device, files: files))
    }

    /// The most bytes of a config.json or a README.md.
    private static let largestText = 1 << 20
    /// The most files of a repository.
    private static let mostFiles = 1000

    /// Asks for the names and the sizes of a repository's files, and for the commit that has them.
    private func fetchFileList() async throws -> (commit: String, files: [Offer.File]) {
        struct List: Decodable {
            struct File: Decodable {
                struct LargeFile: Decodable {
                    let sha256: String
                    let size: Int
                }
                let rfilename: String
                let size: Int?
                /// nil of a file that Git has itself.
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

    /// Reads a small file.
    private func read(_ path: String, of commit: String, limit: Int) async throws -> (
        data: Data, answer: HTTPURLResponse
    ) {
        try await read(path, at: url(path, of: commit), limit: limit)
    }

    private func read(_ path: String, at url: URL, limit: Int) async throws -> (data: Data, answer: HTTPURLResponse) {
        let file = FileManager.default.temporaryDirectory.appendingPathComponent("hub-\(UUID().uuidString)")
        defer { try? FileManager.default.removeItem(at: file) }
        let answer = try await ForegroundTransfer().receive(requested(path, at: url, into: file, limit: limit)) { _ in }
        return (try Data(contentsOf: file), answer)
    }

    /// Downloads the files that `folder` lacks. Cancelling the task ends it; the next call resumes.
    ///
    /// - Parameters:
    ///   - offer: the result of `fetchOffer()`.
    ///   - folder: gets the files; it need not be there yet. Files of a model in it must be of the offer's commit.
    ///   - usesAnyNetwork: whether it may come over networks that cost extra or are in Low Data Mode. In the background files wait for
    ///     another, elsewhere they fail.
    ///   - progress: called with the number of received bytes.
    package func fetch(
        _ offer: Offer, to folder: URL, usesAnyNetwork: Bool = true,
        progress: @escaping @Sendable (_ bytes: Int) -> Void = { _ in }
    ) async throws {
        try attempt("written") {
            try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
            // In a folder that is not new, a link could lead out of it.
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
            // Of another commit, from which the download was begun.
            try removeFiles(in: folder, but: Set(offer.files.map(\.path))) { $0 != .typeDirectory }
            // Last: a folder with a manifest is a bundle that is whole.
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
        // Ranges are of the file as it is, and not of one that was compressed for the way.
        request.setValue("identity", forHTTPHeaderField: "Accept-Encoding")
        request.usesAnyNetwork = usesAnyNetwork
        return RequestedFile(request: request, file: file, limit: limit, path: path, repository: repository)
    }

    private func isTooShort(_ path: String) -> MeSPError {
        MeSPError("\(path) of \(repository) is shorter than its repository says.")
    }

    /// Whether a file is there already, and not of another commit.
    private static func isThere(_ url: URL, _ file: Offer.File) async throws -> Bool {
        let attributes = try? FileManager.default.attributesOfItem(atPath: url.path)
        guard let attributes, attributes[.type] as? FileAttributeType == .typeRegular,
            attributes[.size] as? Int == file.size
        else { return false }
        return try await isSound(url, file)
    }

    /// Whether the contents are the right ones, as far as their SHA-256 is known.
    private static func isSound(_ url: URL, _ file: Offer.File) async throws -> Bool {
        guard let digest = file.sha256 else { return true }
        return try await Task.detached { try sha256(of: url) }.value == digest
    }

    /// Downloads a file. What has arrived is in a file of the same name that ends in `.part`, which becomes the file when it is whole.
    private func fetch(
        _ file: Offer.File, of commit: String, to target: URL, usesAnyNetwork: Bool,
        progress: @escaping @Sendable (Int) -> Void
    ) async throws {
        let partial = target.appendingPathExtension("part")
        // What a power failure leaves has its length and may be anything; without a SHA-256 nothing would say so.
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
                if Self.size(partial) < file.size {  // the server takes this for all of it
                    failures = Self.size(partial) > had ? 0 : failures + 1
                    guard failures < attempts else { throw isTooShort(file.path) }
                    continue
                }
            }
            if try await Self.isSound(partial, file) { break }
            try? FileManager.default.removeItem(at: partial)
            if damaged { throw MeSPError("\(file.path) of \(repository) is damaged: its SHA-256 differs.") }
            // It may have been damaged on the way.
            damaged = true
            _ = FileManager.default.createFile(atPath: partial.path, contents: nil)
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

/// The number of received bytes, over all files.
private final class ByteCount: Sendable {
    private let lock = NSLock()
    private nonisolated(unsafe) var bytes = [String: Int]()  // under the lock
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
