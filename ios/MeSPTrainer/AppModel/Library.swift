import Foundation
import MeSPControl
import MeSPCore
import MeSPSelfCheck
import MeSPSentences
import Observation

/// The bundles and the runs that are on the device, as lists to show.
@MainActor @Observable public final class Library {
    public let folder: DocumentsFolder
    public private(set) var bundles = [StoredBundle]()
    /// The newest first.
    public private(set) var runs = [StoredRun]()
    /// The bundle that is being copied and checked, or the model that is being rewritten.
    public private(set) var importing: String?
    /// The part of the model that is rewritten, from 0 to 1; nil while none is.
    public private(set) var rewritten: Double?
    @ObservationIgnored private var rewriting: Task<StoredBundle, any Error>?
    /// Whether it is known what is on the device.
    public private(set) var hasLooked = false

    init(_ folder: DocumentsFolder) { self.folder = folder }

    /// The number of looks at the folder; the result of an earlier look that ends later is dropped.
    @ObservationIgnored private var looks = 0

    /// Looks for bundles and runs again, not on the main thread.
    ///
    /// - Parameter running: the folder of the run in progress.
    func refresh(running: URL?) async throws {
        looks += 1
        let (look, folder) = (looks, folder)
        let found = await Task.detached {
            SelfCheckReport.useMeasurements(in: folder.selfChecksFolder)
            return (bundles: Result { try folder.bundles() }, runs: Result { try folder.runs(running: running) })
        }.value
        guard look == looks else { return }
        hasLooked = true
        // Where one list can't be read, the other is shown.
        defer { if let found = try? found.runs.get() { runs = found } }
        bundles = try found.bundles.get()
        _ = try found.runs.get()
    }

    /// Reads a run's log, not on the main thread; nil where it can't be read.
    public func log(of run: StoredRun) async -> LogSummary? {
        let url = run.url
        return await Task.detached { try? LogSummary(folder: url) }.value
    }

    /// Those that can be trained.
    public var usableBundles: [StoredBundle] { bundles.filter { $0.problem == nil } }

    /// The bundle that a run was trained on, if it is still there.
    public func bundle(of run: StoredRun) -> StoredBundle? {
        guard let path = run.log?.start?.settings.bundle else { return nil }
        let name = URL(fileURLWithPath: path).lastPathComponent
        return usableBundles.first { $0.id == name }
    }

    /// The runs with adapters to write with, the newest first.
    public var trained: [StoredRun] { runs.filter { !$0.isBenchmark && $0.adapters != nil && bundle(of: $0) != nil } }

    /// Copies a bundle that the person chose into the app, or rewrites a model. A bundle that is in Documents already is only found, and
    /// what AirDrop put into the inbox moves from there.
    ///
    /// - Parameter confirm: asks whether a model is to be rewritten into a bundle of so many bytes.
    /// - Returns: the bundle's identifier; nil where the person has decided against it.
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

    /// Ends the rewriting of a model. Nothing of its bundle stays.
    public func stopImport() { rewriting?.cancel() }

    /// The file of the text that was copied last.
    @ObservationIgnored private var textFolder: URL?

    /// Copies a text that the person chose, in place of the last, to where the system may clear it. Files in AirDrop's inbox are moved
    /// instead.
    ///
    /// - Returns: the copy.
    func copyText(at url: URL) async throws -> URL {
        let place = FileManager.default.temporaryDirectory.appendingPathComponent("text-\(UUID().uuidString)")
        let copy = place.appendingPathComponent(url.lastPathComponent)
        do {
            try await Task.detached {
                try FileManager.default.createDirectory(at: place, withIntermediateDirectories: true)
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
    /// Whether a file or a folder is in this folder itself.
    fileprivate func holds(_ url: URL) -> Bool {
        url.deletingLastPathComponent().resolvingSymlinksInPath().path == resolvingSymlinksInPath().path
    }
}
