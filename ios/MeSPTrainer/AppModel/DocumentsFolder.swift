import Foundation
import MeSP
import MeSPBundle
import MeSPCore
import MeSPDownload
import MeSPFiles
import MeSPSentences

/// The app's files. Imported bundles are in the Documents folder, and runs in its subfolder `runs`.
public struct DocumentsFolder: Sendable {
    public let documents: URL
    let included: URL?
    let freeBytes: @Sendable (URL) -> Int?
    let applyPolicy: @Sendable (URL, StoragePolicy) -> Void
    let read: @Sendable (URL) throws -> Data
    private let list: @Sendable (URL) throws -> [URL]
    /// An identifier of this launch. It is part of the names of unfinished imports' folders, to tell them from those of earlier launches.
    let launch = UUID().uuidString
    let rewriting = SerialWork()

    static let benchmark = "benchmark"

    public init(
        documents: URL, included: URL? = nil,
        freeBytes: @escaping @Sendable (URL) -> Int? = { $0.freeBytes },
        applyPolicy: @escaping @Sendable (URL, StoragePolicy) -> Void = { $1.apply(to: $0) },
        read: @escaping @Sendable (URL) throws -> Data = { try Data(contentsOf: $0) },
        list: @escaping @Sendable (URL) throws -> [URL] = {
            try FileManager.default.contentsOfDirectory(
                at: $0, includingPropertiesForKeys: nil, options: .skipsHiddenFiles)
        }
    ) {
        (self.documents, self.included) = (documents, included)
        (self.freeBytes, self.applyPolicy, self.read, self.list) = (freeBytes, applyPolicy, read, list)
    }

    package var runsFolder: URL { documents.appendingPathComponent("runs") }
    package var selfChecksFolder: URL { documents.appendingPathComponent("self-check") }

    func makeFederationFolder() throws -> URL {
        let folder = documents.appendingPathComponent(".federation")
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        applyPolicy(folder, .state)
        return folder
    }

    // MARK: - Chat

    private var chatFile: URL { documents.appendingPathComponent("chat.json") }

    /// Reads the saved conversation, or returns nil if there is none or its file is damaged.
    ///
    /// - Throws: an error if the file cannot be read, for example while the phone is locked.
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

    func save(_ chat: StoredChat?) {
        guard let chat, let json = try? JSONEncoder().encode(chat) else {
            try? FileManager.default.removeItem(at: chatFile)
            return
        }
        try? json.write(to: chatFile, options: .atomic)
        applyPolicy(chatFile, .chat)
    }

    // MARK: - Choices

    var choices: ChoiceStore { ChoiceStore(url: documents.appendingPathComponent("choices.jsonl")) }

    /// Applies the storage policy to the choices' file. This is needed after every change, which replaces the file.
    func applyPolicyToChoices() {
        if FileManager.default.fileExists(atPath: choices.url.path) { applyPolicy(choices.url, .chat) }
    }

    // MARK: - Files

    /// The bytes that must stay free after an import or a download, for runs and for the system.
    static let spareBytes = 200_000_000

    static func size(_ folder: URL) -> Int {
        let files = FileManager.default.enumerator(at: folder, includingPropertiesForKeys: [.fileSizeKey])
        return (files?.allObjects ?? []).reduce(0) { sum, file in
            guard let file = file as? URL, !file.hasDirectoryPath else { return sum }
            return sum + ((try? file.resourceValues(forKeys: [.fileSizeKey]).fileSize) ?? 0)
        }
    }

    func contents(_ folder: URL) throws -> [URL] {
        guard FileManager.default.fileExists(atPath: folder.path) else { return [] }
        return try explaining(
            { try list(folder).filter(\.hasDirectoryPath) },
            as: { "\(folder.lastPathComponent) cannot be read: \($0)." })
    }

    func delete(_ url: URL) throws {
        try explaining(
            { try FileManager.default.removeItem(at: url) },
            as: { "\(url.lastPathComponent) cannot be deleted: \($0)." })
    }
}

extension URL {
    var isBundle: Bool { pathExtension == "mesp" }
}
