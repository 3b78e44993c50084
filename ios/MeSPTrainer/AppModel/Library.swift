import Foundation
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSelfCheck
import MeSPSentences
import Observation

@MainActor @Observable public final class Library {
    public let folder: DocumentsFolder
    public private(set) var bundles = [StoredBundle]()
    public private(set) var runs = [StoredRun]()
    public private(set) var importing: String?
    public private(set) var rewritten: Double?
    @ObservationIgnored private var rewriting: Task<StoredBundle, any Error>?
    /// Whether a refresh of the lists has ended, even if it failed.
    public private(set) var hasLooked = false

    init(_ folder: DocumentsFolder) { self.folder = folder }

    /// The number of calls of `refresh`. Only the latest call updates the lists.
    @ObservationIgnored private var looks = 0

    func refresh(running: URL?) async throws {
        looks += 1
        let (look, folder) = (looks, folder)
        let found = await Task.detached {
            SelfCheckReport.useMeasurements(in: folder.selfChecksFolder)
            return (bundles: Result { try folder.bundles() }, runs: Result { try folder.runs(running: running) })
        }.value
        guard look == looks else { return }
        hasLooked = true
        // If one list cannot be read, the other is still updated.
        defer { if let found = try? found.runs.get() { runs = found } }
        bundles = try found.bundles.get()
        _ = try found.runs.get()
    }

    public func log(of run: StoredRun) async -> LogSummary? {
        let url = run.url
        return await Task.detached { try? LogSummary(folder: url) }.value
    }

    public var usableBundles: [StoredBundle] { bundles.filter { $0.problem == nil } }

    public func bundle(of run: StoredRun) -> StoredBundle? {
        guard let path = run.log?.start?.settings.bundle else { return nil }
        let name = URL(fileURLWithPath: path).lastPathComponent
        return usableBundles.first { $0.id == name }
    }

    public var trained: [StoredRun] { runs.filter { !$0.isBenchmark && $0.adapters != nil && bundle(of: $0) != nil } }

    /// Copies a bundle into the app, or converts a model into a bundle. A bundle already in Documents is not copied.
    ///
    /// - Returns: the bundle's identifier, or nil if the person declined or stopped the conversion.
    func importBundle(
        at url: URL, confirm: (_ name: String, _ size: Int, _ notices: [Sentence]) async -> Bool
    ) async throws -> StoredBundle.ID? {
        if url.isBundle && folder.documents.holds(url) { return url.lastPathComponent }
        if let importing { throw MeSPError("\(importing) is being imported; wait for it.") }
        let name = url.lastPathComponent
        importing = name
        defer { (importing, rewritten, rewriting) = (nil, nil, nil) }
        let folder = folder
        guard !url.isBundle else {
            let bundle = try await Task.detached { try folder.importBundle(at: url) }.value
            emptyInbox(of: url)
            return bundle.id
        }
        let model = try await Task.detached { try folder.openModel(at: url) }.value
        guard await confirm(name, model.size, model.notices) else { return nil }
        let (bytes, sender) = AsyncStream.makeStream(of: Int.self, bufferingPolicy: .bufferingNewest(1))
        let work = Task.detached {
            defer { sender.finish() }
            return try await folder.importModel(model, at: url) { sender.yield($0) }
        }
        (rewriting, rewritten) = (work, 0)
        for await count in bytes { rewritten = Double(count) / Double(max(model.size, 1)) }
        do {
            let bundle = try await work.value
            emptyInbox(of: url)
            return bundle.id
        } catch is CancellationError {
            return nil
        }
    }

    /// Stops rewriting a model. The incomplete bundle is deleted.
    public func stopImport() { rewriting?.cancel() }

    @ObservationIgnored private var textFolder: URL?

    /// Copies a text into a temporary folder and returns the copy's URL. Deletes the previous copy.
    func copyText(at url: URL) async throws -> URL {
        let place = FileManager.default.temporaryDirectory.appendingPathComponent("text-\(UUID().uuidString)")
        let copy = place.appendingPathComponent(url.lastPathComponent)
        do {
            try await Task.detached {
                try makeNewFolder(place)
                try FileManager.default.copyItem(at: url, to: copy)
            }.value
        } catch {
            try? FileManager.default.removeItem(at: place)
            throw MeSPError("\(url.lastPathComponent) cannot be copied: \(error.plainSentence).")
        }
        if let textFolder { try? FileManager.default.removeItem(at: textFolder) }
        textFolder = place
        emptyInbox(of: url)
        return copy
    }

    private func emptyInbox(of url: URL) {
        if folder.documents.appendingPathComponent("Inbox").holds(url) { try? FileManager.default.removeItem(at: url) }
    }
}

extension URL {
    fileprivate func holds(_ url: URL) -> Bool {
        url.deletingLastPathComponent().resolvingSymlinksInPath().path == resolvingSymlinksInPath().path
    }
}
