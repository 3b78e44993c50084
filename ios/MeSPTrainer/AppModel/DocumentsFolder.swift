import Foundation
import MeSP
import MeSPBundle
import MeSPCore
import MeSPDownload
import MeSPFiles
import MeSPSentences

/// The app's files: bundles in its Documents folder, and runs in the folder `runs` there. `tools/collect.py` collects the runs.
public struct DocumentsFolder: Sendable {
    /// The folder that people see in the Files app.
    public let documents: URL
    /// The folder of the bundles that come with the app.
    let included: URL?
    /// Returns the free bytes of a folder's disk; nil if they are unknown.
    let freeBytes: @Sendable (URL) -> Int?
    /// The reason why no bundle for the GPU can be used here; nil if one can.
    let gpuRefusal: Sentence?
    /// Gives a file or a folder a storage policy.
    let applyPolicy: @Sendable (URL, StoragePolicy) -> Void
    let read: @Sendable (URL) throws -> Data
    private let list: @Sendable (URL) throws -> [URL]
    /// A part of the names of the hidden folders that this launch of the app makes.
    let launch = UUID().uuidString
    /// The queue for rewriting models, one at a time.
    let rewriting = SerialWork()

    /// The path extension of a benchmark's run.
    static let benchmark = "benchmark"

    /// - Parameters:
    ///   - documents: the folder that people see in the Files app.
    ///   - included: the folder of the bundles that come with the app.
    ///   - gpuRefusal: the reason why no bundle for the GPU can be used here; nil if one can.
    ///   - freeBytes: returns the free bytes of a folder's disk.
    ///   - applyPolicy: gives a file or a folder a storage policy.
    ///   - read: reads a file that cannot be read while the phone is locked.
    ///   - list: lists a folder, without hidden files.
    public init(
        documents: URL, included: URL? = nil, gpuRefusal: Sentence? = MLXSupport.gpuRefusal,
        freeBytes: @escaping @Sendable (URL) -> Int? = { $0.freeBytes },
        applyPolicy: @escaping @Sendable (URL, StoragePolicy) -> Void = { $1.apply(to: $0) },
        read: @escaping @Sendable (URL) throws -> Data = { try Data(contentsOf: $0) },
        list: @escaping @Sendable (URL) throws -> [URL] = {
            try FileManager.default.contentsOfDirectory(
                at: $0, includingPropertiesForKeys: nil, options: .skipsHiddenFiles)
        }
    ) {
        (self.documents, self.included, self.gpuRefusal) = (documents, included, gpuRefusal)
        (self.freeBytes, self.applyPolicy, self.read, self.list) = (freeBytes, applyPolicy, read, list)
    }

    package var runsFolder: URL { documents.appendingPathComponent("runs") }
    /// The folder in which `tools/collect.py` finds reports of self-checks.
    package var selfChecksFolder: URL { documents.appendingPathComponent("self-check") }

    /// Creates the folder of a federation's node if necessary, and returns its URL. The folder holds the node's key, the tokens of the text, and the
    /// message that the node has to answer.
    func makeFederationFolder() throws -> URL {
        let folder = documents.appendingPathComponent(".federation")
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        applyPolicy(folder, .state)
        return folder
    }

    // MARK: - Chat

    private var chatFile: URL { documents.appendingPathComponent("chat.json") }

    /// Reads the conversation that was saved last; nil if there is none.
    ///
    /// - Throws: an error if the conversation can't be read. While the phone is locked, the error is a `MeSPError`.
    func readChat() throws -> StoredChat? {
        let json: Data
        do {
            json = try read(chatFile)
        } catch CocoaError.fileReadNoSuchFile {
            return nil
        } catch {
            #if !os(macOS)
                if case CocoaError.fileReadNoPermission = error {
                    throw MeSPError(
                        "The last conversation cannot be read while the phone is locked; unlock it and try again.")
                }
            #endif
            throw error
        }
        return try? JSONDecoder().decode(StoredChat.self, from: json)
    }

    /// Saves a conversation in place of the last one; nil deletes it.
    func save(_ chat: StoredChat?) {
        guard let chat, let json = try? JSONEncoder().encode(chat) else {
            try? FileManager.default.removeItem(at: chatFile)
            return
        }
        try? json.write(to: chatFile, options: .atomic)
        applyPolicy(chatFile, .chat)
    }

    // MARK: - Choices

    /// The person's choices between two answers.
    var choices: ChoiceStore { ChoiceStore(url: documents.appendingPathComponent("choices.jsonl")) }

    /// Sets the storage policy of the file of choices. Each new choice replaces the file, and the new file has no policy.
    func applyPolicyToChoices() {
        if FileManager.default.fileExists(atPath: choices.url.path) { applyPolicy(choices.url, .chat) }
    }

    // MARK: - Files

    /// The bytes that must stay free after a copy, for runs and for the system.
    static let spareBytes = 200_000_000

    /// Returns the size of all files in a folder, in bytes.
    static func size(_ folder: URL) -> Int {
        let files = FileManager.default.enumerator(at: folder, includingPropertiesForKeys: [.fileSizeKey])
        return (files?.allObjects ?? []).reduce(0) { sum, file in
            sum + (((file as? URL)?.resourceSize) ?? 0)
        }
    }

    /// Returns the folders in a folder; none if it does not exist.
    func contents(_ folder: URL) throws -> [URL] {
        guard FileManager.default.fileExists(atPath: folder.path) else { return [] }
        do {
            return try list(folder).filter(\.hasDirectoryPath)
        } catch {
            throw MeSPError("\(folder.lastPathComponent) cannot be read: \(error.plainSentence).")
        }
    }

    func delete(_ url: URL) throws {
        do {
            try FileManager.default.removeItem(at: url)
        } catch {
            throw MeSPError("\(url.lastPathComponent) cannot be deleted: \(error.plainSentence).")
        }
    }
}

extension URL {
    var isBundle: Bool { pathExtension == "mesp" }

    /// The size of a file in bytes; nil for a folder.
    fileprivate var resourceSize: Int? {
        hasDirectoryPath ? nil : try? resourceValues(forKeys: [.fileSizeKey]).fileSize
    }
}
