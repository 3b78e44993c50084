import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// A download of a bundle from a repository of the Hugging Face Hub.
///
///     let download = try BundleDownload(repository: "someone/Qwen2.5-0.5B-mesp")
///     let offer = try await download.fetchOffer()
///     try await download.fetch(offer, to: folder) { bytes in … }
///
/// The manifest is downloaded first, and then the files that it lists and no others. A file that has not the size and the SHA-256 of the
/// manifest is refused. `fetch` resumes a download that ended early.
public struct BundleDownload: Sendable {
    /// A bundle on the Hub, before it is downloaded. It can be stored, so that another process can resume the download.
    public struct Offer: Sendable, Codable {
        /// As `owner/name`.
        package let repository: String
        public let manifest: Manifest
        /// The manifest's bytes, unchanged.
        let json: Data
        /// The commit of the files; nil if the server names none.
        let commit: String?

        /// The size of all files, in bytes.
        public var size: Int { manifest.files.reduce(json.count) { $0 + $1.size } }

        /// Checks that this build can use such a bundle.
        init(repository: String, json: Data, commit: String?) throws {
            (self.repository, self.json, self.commit) = (repository, json, commit)
            manifest = try Manifest.read(json, of: repository)
        }

        private enum Key: String, CodingKey { case repository, json, commit }

        public init(from decoder: any Decoder) throws {
            let container = try decoder.container(keyedBy: Key.self)
            try self.init(
                repository: container.decode(String.self, forKey: .repository),
                json: container.decode(Data.self, forKey: .json),
                commit: container.decodeIfPresent(String.self, forKey: .commit))
        }

        public func encode(to encoder: any Encoder) throws {
            var container = encoder.container(keyedBy: Key.self)
            try container.encode(repository, forKey: .repository)
            try container.encode(json, forKey: .json)
            try container.encodeIfPresent(commit, forKey: .commit)
        }
    }

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

    /// Asks for the manifest, and checks that this build can use such a bundle.
    package func fetchOffer() async throws -> Offer {
        let file = FileManager.default.temporaryDirectory.appendingPathComponent("manifest-\(UUID().uuidString).json")
        defer { try? FileManager.default.removeItem(at: file) }
        let requested = requested("manifest.json", of: "main", into: file, limit: Manifest.largestSize)
        do {
            let answer = try await ForegroundTransfer().receive(requested) { _ in }
            let commit = answer.value(forHTTPHeaderField: "X-Repo-Commit").flatMap { commit in
                commit.count >= 7 && commit.allSatisfy(\.isHexDigit) ? commit : nil
            }
            return try Offer(repository: repository, json: try Data(contentsOf: file), commit: commit)
        } catch let error as RetryableFailure {
            throw MeSPError(error.sentence)
        }
    }

    /// Downloads the files that `folder` lacks. Cancelling the task ends it; the next call resumes.
    ///
    /// - Parameters:
    ///   - offer: the result of `fetchOffer()`.
    ///   - folder: gets the bundle; it need not be there yet.
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
        let count = ByteCount(offer.json.count, progress)
        try await withThrowingTaskGroup(of: Void.self) { group in
            var begun = 0
            for file in offer.manifest.files {
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
            try removeFiles(in: folder, but: Set(offer.manifest.files.map(\.path))) { $0 != .typeDirectory }
            // Last: a folder with a manifest is a bundle that is whole.
            try writeWhole(folder.appendingPathComponent("manifest.json")) { try $0.write(contentsOf: offer.json) }
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

    private func requested(
        _ path: String, of commit: String, into file: URL, limit: Int, usesAnyNetwork: Bool = true
    ) -> RequestedFile {
        let url = hub.appendingPathComponent("\(repository)/resolve/\(commit)/\(path)")
        var request = URLRequest(url: url, cachePolicy: .reloadIgnoringLocalCacheData, timeoutInterval: patience)
        // Ranges are of the file as it is, and not of one that was compressed for the way.
        request.setValue("identity", forHTTPHeaderField: "Accept-Encoding")
        request.usesAnyNetwork = usesAnyNetwork
        return RequestedFile(request: request, file: file, limit: limit, path: path, repository: repository)
    }

    /// Whether a file is there already, and not of another commit.
    private static func isThere(_ url: URL, _ file: Manifest.File) async throws -> Bool {
        let attributes = try? FileManager.default.attributesOfItem(atPath: url.path)
        guard let attributes, attributes[.type] as? FileAttributeType == .typeRegular,
            attributes[.size] as? Int == file.size
        else { return false }
        return try await Task.detached { try sha256(of: url) }.value == file.sha256
    }

    /// Downloads a file. What has arrived is in a file of the same name that ends in `.part`, which becomes the file when it is whole.
    private func fetch(
        _ file: Manifest.File, of commit: String, to target: URL, usesAnyNetwork: Bool,
        progress: @escaping @Sendable (Int) -> Void
    ) async throws {
        let partial = target.appendingPathExtension("part")
        try attempt("written") { close(try openRegularFile(partial, O_WRONLY | O_CREAT)) }
        let requested = requested(
            file.path, of: commit, into: partial, limit: file.size, usesAnyNetwork: usesAnyNetwork)
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
                    guard failures < attempts else {
                        throw MeSPError("\(file.path) of \(repository) is shorter than its manifest says.")
                    }
                    continue
                }
            }
            let digest = try await Task.detached { [partial] in try sha256(of: partial) }.value
            if digest == file.sha256 { break }
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
