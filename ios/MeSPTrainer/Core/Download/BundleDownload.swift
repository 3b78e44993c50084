import Foundation

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// A bundle in a repository of the Hugging Face Hub, brought to a folder.
///
///     let download = try BundleDownload(repository: "someone/Qwen2.5-0.5B-mesp")
///     let offer = try await download.offer()
///     try await download.fetch(offer, to: folder) { bytes in … }
///
/// The manifest comes first. Each other file has the size and the SHA-256 that it says, or is refused. What is there of a download that
/// ended early, `fetch` goes on from.
public struct BundleDownload: Sendable {
    /// What is at the Hub, before it is downloaded.
    public struct Offer: Sendable {
        public let manifest: Manifest
        /// As it came.
        let json: Data
        /// The commit that the files are taken of; nil where the server names none.
        let commit: String?

        /// In bytes, of all files.
        public var size: Int { manifest.files.reduce(json.count) { $0 + $1.size } }
    }

    /// As `owner/name`.
    public let repository: String
    private let hub: URL
    /// How long a connection may be silent, in seconds.
    private let patience: Double
    /// How often a file is asked for again without a byte more.
    private let attempts = 3

    /// - Parameters:
    ///   - repository: as `owner/name`, or its address at the Hub.
    ///   - hub: the Hub's address.
    ///   - patience: how long a connection may be silent, in seconds.
    public init(
        repository: String, hub: URL = URL(string: "https://huggingface.co") ?? URL(fileURLWithPath: "/"),
        patience: Double = 30
    ) throws {
        let prefix = "https://huggingface.co/"
        let name = repository.hasPrefix(prefix) ? String(repository.dropFirst(prefix.count)) : repository
        let isWord = { (part: Substring) in
            !part.isEmpty && part.first != "."
                && part.allSatisfy { $0.isASCII && ($0.isLetter || $0.isNumber || "-_.".contains($0)) }
        }
        let parts = name.split(separator: "/", omittingEmptySubsequences: false)
        guard parts.count == 2, parts.allSatisfy(isWord) else {
            throw MeSPError("\(repository) is no repository: write it as owner/name.")
        }
        (self.repository, self.hub, self.patience) = (name, hub, patience)
    }

    /// The bundle's name, as its folder gets it.
    public var name: String { String(repository.split(separator: "/")[1]).replacing(/[-_.]mesp$/, with: "") }

    // MARK: - Fetching

    /// Asks for the manifest, and checks that this build can use such a bundle.
    public func offer() async throws -> Offer {
        let file = FileManager.default.temporaryDirectory.appendingPathComponent("manifest-\(UUID().uuidString).json")
        defer { try? FileManager.default.removeItem(at: file) }
        let most = 1 << 26
        let reception = try await receive("manifest.json", of: "main", to: file, limit: most)
        let json = try Data(contentsOf: file)
        let manifest = try Manifest.read(json, of: URL(fileURLWithPath: repository))
        for file in manifest.files {
            let parts = file.path.split(separator: "/", omittingEmptySubsequences: false)
            guard !file.path.contains("\0"), !parts.contains(where: { $0.isEmpty || $0 == "." || $0 == ".." }),
                (0...(1 << 40)).contains(file.size), file.path != "manifest.json"
            else { throw MeSPError("The manifest of \(repository) names \(file.path), which no bundle has.") }
        }
        guard Set(manifest.files.map(\.path)).count == manifest.files.count else {
            throw MeSPError("The manifest of \(repository) names a file twice.")
        }
        return Offer(manifest: manifest, json: json, commit: reception.commit)
    }

    /// Downloads what `folder` lacks of the bundle. Cancelling the task ends it; the next call goes on from there.
    ///
    /// - Parameters:
    ///   - offer: what `offer()` gave.
    ///   - folder: gets the bundle; it need not be there yet.
    ///   - progress: gets the bytes that are there, from time to time.
    public func fetch(
        _ offer: Offer, to folder: URL, progress: @escaping @Sendable (_ bytes: Int) -> Void = { _ in }
    ) async throws {
        try attempt("written") {
            try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        }
        var done = offer.json.count
        for file in offer.manifest.files {
            try Task.checkCancellation()
            let target = folder.appendingPathComponent(file.path)
            let before = done
            if !Self.isThere(target, file) {
                try attempt("written") {
                    try FileManager.default.createDirectory(
                        at: target.deletingLastPathComponent(), withIntermediateDirectories: true)
                }
                try await fetch(file, of: offer.commit ?? "main", to: target) { progress(before + $0) }
            }
            done += file.size
            progress(done)
        }
        // Last: a folder with a manifest is a bundle that is whole.
        try attempt("written") { try offer.json.write(to: folder.appendingPathComponent("manifest.json")) }
    }

    /// A file has its name only when its SHA-256 was right, so the size tells.
    private static func isThere(_ url: URL, _ file: Manifest.File) -> Bool {
        (try? FileManager.default.attributesOfItem(atPath: url.path))?[.size] as? Int == file.size
    }

    /// Downloads a file by way of one beside it, which holds what has come so far.
    private func fetch(
        _ file: Manifest.File, of commit: String, to target: URL, progress: @escaping @Sendable (Int) -> Void
    ) async throws {
        let partial = target.appendingPathExtension("part")
        if !FileManager.default.fileExists(atPath: partial.path) {
            guard FileManager.default.createFile(atPath: partial.path, contents: nil) else {
                throw MeSPError("\(repository) cannot be written: \(partial.lastPathComponent) cannot be made.")
            }
        }
        var (failures, damaged) = (0, false)
        while true {
            let had = Self.size(partial)
            if had < file.size || had == 0 && file.size == 0 && failures == 0 {
                do {
                    _ = try await receive(file.path, of: commit, to: partial, limit: file.size, progress: progress)
                } catch let error as Retryable {
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
        try attempt("written") { try FileManager.default.moveItem(at: partial, to: target) }
    }

    private static func size(_ url: URL) -> Int {
        (try? FileManager.default.attributesOfItem(atPath: url.path))?[.size] as? Int ?? 0
    }

    private func attempt(_ done: String, _ body: () throws -> Void) throws {
        do { try body() } catch { throw MeSPError("\(repository) cannot be \(done): \(error.plainSentence).") }
    }

    // MARK: - One request

    /// Receives what `file` lacks of a path in the repository.
    ///
    /// - Throws: `Retryable` where another request may do better, `MeSPError` where none will.
    private func receive(
        _ path: String, of commit: String, to file: URL, limit: Int,
        progress: @escaping @Sendable (Int) -> Void = { _ in }
    ) async throws -> Reception {
        let url = hub.appendingPathComponent("\(repository)/resolve/\(commit)/\(path)")
        var request = URLRequest(url: url, cachePolicy: .reloadIgnoringLocalCacheData, timeoutInterval: patience)
        // Ranges are of the file as it is, and not of one that was compressed for the way.
        request.setValue("identity", forHTTPHeaderField: "Accept-Encoding")
        let reception = try Reception(
            file: file, limit: limit, what: "\(path) of \(repository)", repository: repository, progress: progress)
        if reception.offset > 0 { request.setValue("bytes=\(reception.offset)-", forHTTPHeaderField: "Range") }
        let configuration = URLSessionConfiguration.ephemeral
        configuration.timeoutIntervalForRequest = patience
        let session = URLSession(configuration: configuration, delegate: reception, delegateQueue: nil)
        defer { session.finishTasksAndInvalidate() }
        let task = session.dataTask(with: request)
        try await withTaskCancellationHandler {
            try await reception.end(of: task)
        } onCancel: {
            task.cancel()
        }
        return reception
    }
}

/// A failure that another request may not have.
private struct Retryable: Error {
    let sentence: String
}

/// Takes the answer to one request into a file, behind what that has.
private final class Reception: NSObject, URLSessionDataDelegate, @unchecked Sendable {
    /// What the file had before.
    let offset: Int
    private let what: String
    private let repository: String
    private let limit: Int
    private let file: FileHandle
    private let progress: @Sendable (Int) -> Void

    // Of the session's queue until the answer has ended.
    private var written: Int
    private var failure: (any Error)?
    private var continuation: CheckedContinuation<Void, any Error>?
    private(set) var commit: String?

    init(file url: URL, limit: Int, what: String, repository: String, progress: @escaping @Sendable (Int) -> Void)
        throws
    {
        if !FileManager.default.fileExists(atPath: url.path) {
            _ = FileManager.default.createFile(atPath: url.path, contents: nil)
        }
        do {
            file = try FileHandle(forWritingTo: url)
            offset = Int(try file.seekToEnd())
        } catch {
            throw MeSPError("\(what) cannot be written: \(error.plainSentence).")
        }
        (self.limit, self.what, self.repository, self.progress) = (limit, what, repository, progress)
        written = offset
    }

    /// Starts the task, and waits for its end.
    func end(of task: URLSessionDataTask) async throws {
        try await withCheckedThrowingContinuation {
            continuation = $0
            task.resume()
        }
    }

    func urlSession(
        _: URLSession, dataTask: URLSessionDataTask, didReceive response: URLResponse,
        completionHandler: @escaping (URLSession.ResponseDisposition) -> Void
    ) {
        do {
            try take(response)
            completionHandler(.allow)
        } catch {
            failure = error
            completionHandler(.cancel)
        }
    }

    private func take(_ response: URLResponse) throws {
        guard let response = response as? HTTPURLResponse else { throw Retryable(sentence: "\(what) gave no answer.") }
        let page = "https://huggingface.co/\(repository)"
        switch response.statusCode {
        case 200:
            // All of it, also where a part was asked for.
            try file.truncate(atOffset: 0)
            written = 0
        case 206:
            let range = response.value(forHTTPHeaderField: "Content-Range") ?? ""
            guard range.hasPrefix("bytes \(offset)-") else {
                throw Retryable(
                    sentence: "The server sent another part of \(what) than was asked for; try again later.")
            }
        case 401, 403:
            throw MeSPError("\(repository) is not open to everybody; see \(page), or take another repository.")
        case 404:
            throw MeSPError(
                "There is no \(what) at the Hub; write the repository as owner/name, of one that holds a bundle.")
        case 416:
            try file.truncate(atOffset: 0)
            throw Retryable(sentence: "\(what) is not as long as its manifest says.")
        case 429, 500...599:
            throw Retryable(sentence: "The Hub is busy (\(response.statusCode)); try again later.")
        default: throw MeSPError("The Hub answers \(response.statusCode) for \(what); see \(page).")
        }
        commit = response.value(forHTTPHeaderField: "X-Repo-Commit").flatMap { commit in
            commit.count >= 7 && commit.allSatisfy(\.isHexDigit) ? commit : nil
        }
    }

    func urlSession(_: URLSession, dataTask: URLSessionDataTask, didReceive data: Data) {
        guard failure == nil else { return }
        guard written + data.count <= limit else {
            failure = MeSPError("\(what) is longer than its manifest says.")
            return dataTask.cancel()
        }
        do {
            try file.write(contentsOf: data)
            written += data.count
            progress(written)
        } catch {
            failure = MeSPError("\(what) cannot be written: \(error.plainSentence).")
            dataTask.cancel()
        }
    }

    func urlSession(_: URLSession, task: URLSessionTask, didCompleteWithError error: (any Error)?) {
        try? file.close()
        if let failure {
            continuation?.resume(throwing: failure)
        } else if let error {
            let isCancelled = (error as? URLError)?.code == .cancelled
            let sentence = "\(what) stopped coming: \(error.plainSentence). Check the network and try again."
            continuation?.resume(throwing: isCancelled ? CancellationError() : Retryable(sentence: sentence))
        } else {
            continuation?.resume()
        }
        continuation = nil
    }
}
