import Foundation
import MeSPBundle
import MeSPCore
import MeSPDownload
import MeSPFiles
import MeSPSentences

/// The bundles in the app's folder: those that were imported, downloaded or came with the app, and a download in progress.
extension DocumentsFolder {
    /// All bundles, by name: the ones in Documents, and those that came with the app where none in Documents has the name. Sizes are
    /// checked, checksums are not: a run checks these.
    public func bundles() throws -> [StoredBundle] {
        let imported = try contents(documents).filter(\.isBundle).map {
            StoredBundle(url: $0, isIncluded: false, gpuRefusal: gpuRefusal)
        }
        let names = Set(imported.map(\.url.lastPathComponent))
        let others = try included.map { try contents($0) } ?? []
        return
            (imported
            + others.filter { $0.isBundle && !names.contains($0.lastPathComponent) }
            .map { StoredBundle(url: $0, isIncluded: true, gpuRefusal: gpuRefusal) })
            .sorted { $0.url.lastPathComponent < $1.url.lastPathComponent }
    }

    /// Copies the files that a bundle's manifest lists into Documents, and checks them. Other files of its folder are left out, and
    /// the files of a refused bundle are deleted.
    public func importBundle(at source: URL) throws -> StoredBundle {
        let name = source.lastPathComponent
        let target = documents.appendingPathComponent(name)
        guard source.isBundle else {
            throw MeSPError("\(name) is not a bundle: bundles are folders whose names end in .mesp.")
        }
        guard !FileManager.default.fileExists(atPath: target.path) else {
            throw MeSPError("There is a bundle \(name) already; delete it first.")
        }
        func open(_ url: URL, checksums: Bool) throws -> ModelBundle {
            do {
                return try ModelBundle(url: url, checksums: checksums)
            } catch {
                throw MeSPError("\(error.localizedDescription.replacingOccurrences(of: url.path, with: name))")
            }
        }
        let files = try open(source, checksums: false).manifest.files
        let size = files.reduce(0) { $0 + $1.size }
        if let free = freeBytes(documents), free < size + Self.spareBytes {
            throw MeSPError(
                "\(name) takes \(size.megabytes), and the phone has \(free.megabytes) free; make room for it first.")
        }
        let partial = documents.appendingPathComponent(".importing-\(UUID().uuidString)")
        defer { try? FileManager.default.removeItem(at: partial) }
        do {
            try FileManager.default.createDirectory(at: partial, withIntermediateDirectories: true)
            applyPolicy(partial, .bundle)
            for path in ["manifest.json"] + files.map(\.path) {
                let copy = partial.appendingPathComponent(path)
                try FileManager.default.createDirectory(
                    at: copy.deletingLastPathComponent(), withIntermediateDirectories: true)
                try FileManager.default.copyItem(at: source.appendingPathComponent(path), to: copy)
            }
        } catch {
            throw MeSPError("\(name) cannot be copied: \(error.plainSentence).")
        }
        _ = try open(partial, checksums: true)
        try FileManager.default.moveItem(at: partial, to: target)
        return StoredBundle(url: target, isIncluded: false, gpuRefusal: gpuRefusal)
    }

    /// The size of what has not been downloaded yet of a bundle on the Hub, in bytes.
    func missing(_ offer: BundleDownload.Offer, of download: BundleDownload) -> Int {
        max(0, offer.size - Self.size(partial(of: download)))
    }

    /// Downloads a bundle into Documents, or continues with one that was begun. Its files are checked as they come.
    func download(
        _ offer: BundleDownload.Offer, by download: BundleDownload, usesAnyNetwork: Bool,
        progress: @escaping @Sendable (Int) -> Void
    ) async throws -> StoredBundle {
        let target = target(of: download)
        guard !FileManager.default.fileExists(atPath: target.path) else {
            throw MeSPError("There is a bundle \(target.lastPathComponent) already; delete it first.")
        }
        let partial = partial(of: download)
        let missing = missing(offer, of: download)
        if let free = freeBytes(documents), free < missing + Self.spareBytes {
            throw MeSPError(
                "\(download.repository) takes \(missing.megabytes) more, and the phone has \(free.megabytes) free; make room for it first."
            )
        }
        // It is left out of backups before gigabytes are in it.
        try? FileManager.default.createDirectory(at: partial, withIntermediateDirectories: true)
        applyPolicy(partial, .bundle)
        try await download.fetch(offer, to: partial, usesAnyNetwork: usesAnyNetwork, progress: progress)
        try FileManager.default.moveItem(at: partial, to: target)
        return StoredBundle(url: target, isIncluded: false, gpuRefusal: gpuRefusal)
    }

    private func target(of download: BundleDownload) -> URL {
        documents.appendingPathComponent("\(download.name).mesp")
    }

    private func partial(of download: BundleDownload) -> URL {
        documents.appendingPathComponent(
            ".downloading-\(download.repository.replacingOccurrences(of: "/", with: "--"))")
    }

    /// Whether all of a download is there: the app was ended between its last file and `forgetDownload`.
    func hasEnded(_ download: BundleDownload) -> Bool {
        FileManager.default.fileExists(atPath: target(of: download).path)
            && !FileManager.default.fileExists(atPath: partial(of: download).path)
    }

    private var downloadFile: URL { documents.appendingPathComponent(".download.json") }

    /// A download in progress.
    struct BegunDownload: Codable {
        let offer: BundleDownload.Offer
        /// Whether the person lets it use networks that cost extra or are in Low Data Mode.
        let usesAnyNetwork: Bool
    }

    /// Reads the download in progress, or the one during which the app was ended; nil for none. A file that cannot be read is deleted.
    func readBegunDownload() throws -> BegunDownload? {
        guard FileManager.default.fileExists(atPath: downloadFile.path) else { return nil }
        do {
            return try JSONDecoder().decode(BegunDownload.self, from: Data(contentsOf: downloadFile))
        } catch {
            forgetDownload()
            throw MeSPError("The download cannot continue: \(error.plainSentence). Look up the bundle again.")
        }
    }

    /// Saves what is being downloaded, so that a later start of the app can resume it.
    func save(_ download: BegunDownload) throws {
        do {
            let json = try JSONEncoder().encode(download)
            try writeWhole(downloadFile) { try $0.write(contentsOf: json) }
        } catch {
            throw MeSPError("\(download.offer.repository) cannot be written: \(error.plainSentence).")
        }
        applyPolicy(downloadFile, .bundle)
    }

    func forgetDownload() { try? FileManager.default.removeItem(at: downloadFile) }

    public func delete(_ bundle: StoredBundle) throws {
        guard !bundle.isIncluded else { throw MeSPError("\(bundle.name) came with the app and stays with it.") }
        try delete(documents.appendingPathComponent(bundle.id))
    }
}
