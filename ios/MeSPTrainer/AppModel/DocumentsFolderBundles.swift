import Foundation
import MeSPBundle
import MeSPCore
import MeSPDownload
import MeSPFiles
import MeSPImport
import MeSPSentences

extension DocumentsFolder {
    /// Returns all bundles, sorted by name. A bundle in Documents hides an included bundle of the same name. Checksums are not verified.
    public func bundles() throws -> [StoredBundle] {
        let imported = try contents(documents).filter(\.isBundle)
        let names = Set(imported.map(\.lastPathComponent))
        let others = try (included.map { try contents($0) } ?? []).filter {
            $0.isBundle && !names.contains($0.lastPathComponent)
        }
        let bundles =
            imported.map { StoredBundle(url: $0, isIncluded: false) }
            + others.map { StoredBundle(url: $0, isIncluded: true) }
        return bundles.sorted { $0.id < $1.id }
    }

    /// Copies a bundle's files into Documents and verifies the copies. If the bundle is invalid, the copies are deleted.
    public func importBundle(at source: URL) throws -> StoredBundle {
        let name = source.lastPathComponent
        let target = documents.appendingPathComponent(name)
        try checkIsNew(target)
        func open(_ url: URL, checksums: Bool) throws -> ModelBundle {
            do {
                return try ModelBundle(url: url, checksums: checksums)
            } catch {
                throw MeSPError("\(error.localizedDescription.replacingOccurrences(of: url.path, with: name))")
            }
        }
        let files = try open(source, checksums: false).manifest.files
        try checkRoom(for: files.reduce(0) { $0 + $1.size }, of: name)
        let partial = importFolder()
        defer { try? FileManager.default.removeItem(at: partial) }
        try explaining {
            try makeNewFolder(partial)
            applyPolicy(partial, .bundle)
            for path in ["manifest.json"] + files.map(\.path) {
                let copy = partial.appendingPathComponent(path)
                try FileManager.default.createDirectory(
                    at: copy.deletingLastPathComponent(), withIntermediateDirectories: true)
                try FileManager.default.copyItem(at: source.appendingPathComponent(path), to: copy)
            }
        } as: {
            "\(name) cannot be copied: \($0)."
        }
        _ = try open(partial, checksums: true)
        return try move(partial, to: target)
    }

    func openModel(at source: URL) throws -> ModelImport {
        let name = source.lastPathComponent
        guard FileManager.default.fileExists(atPath: source.appendingPathComponent("config.json").path) else {
            throw MeSPError(
                "\(name) is neither a bundle, a folder whose name ends in .mesp, nor a model's folder with a config.json."
            )
        }
        try checkIsNew(target(of: source))
        let model = try ModelImport(model: source)
        try checkRoom(for: model.size, of: name)
        return model
    }

    /// Converts a model into a bundle in Documents. The model's own files stay unchanged.
    func importModel(_ model: ModelImport, at source: URL, progress: @escaping @Sendable (Int) -> Void) async throws
        -> StoredBundle
    {
        let folder = importFolder()
        defer { try? FileManager.default.removeItem(at: folder) }
        try make(folder, for: source.lastPathComponent)
        let target = target(of: source)
        let whole = folder.appendingPathComponent(target.lastPathComponent)
        try await rewrite(model, to: whole, progress: progress)
        return try move(whole, to: target)
    }

    func removeInterruptedImports() {
        let names = (try? FileManager.default.contentsOfDirectory(atPath: documents.path)) ?? []
        for name in names where name.hasPrefix(Self.importing) && !name.contains(launch) {
            try? FileManager.default.removeItem(at: documents.appendingPathComponent(name))
        }
    }

    private static let importing = ".importing-"

    private func importFolder() -> URL {
        documents.appendingPathComponent("\(Self.importing)\(launch)-\(UUID().uuidString)")
    }

    private func target(of model: URL) -> URL {
        documents.appendingPathComponent("\(model.lastPathComponent).mesp")
    }

    /// Converts a model into a bundle in a hidden folder. Only one conversion runs at a time.
    private func rewrite(_ model: ModelImport, to bundle: URL, progress: @escaping @Sendable (Int) -> Void) async throws
    {
        try await rewriting.run {
            try model.write(to: bundle) { bytes, _ in
                try Task.checkCancellation()
                progress(bytes)
            }
        }
        // The bundle needs its own policy, because it will leave the hidden folder, whose policy keeps it out of backups.
        applyPolicy(bundle, .bundle)
    }

    private func move(_ whole: URL, to target: URL) throws -> StoredBundle {
        try FileManager.default.moveItem(at: whole, to: target)
        return StoredBundle(url: target, isIncluded: false)
    }

    private func checkIsNew(_ target: URL) throws {
        guard !FileManager.default.fileExists(atPath: target.path) else {
            throw MeSPError("There is a bundle \(target.lastPathComponent) already; delete it first.")
        }
    }

    private func checkRoom(for size: Int, of name: String) throws {
        if let free = freeBytes(documents), free < size + Self.spareBytes {
            throw MeSPError(
                "\(name) takes \(size.megabytes(.up)), and the phone has \(free.megabytes(.down)) free; make room for it first."
            )
        }
    }

    private func make(_ folder: URL, for name: String) throws {
        try explaining({ try makeFolder(folder) }, as: { "\(name) cannot be written: \($0)." })
        applyPolicy(folder, .bundle)
    }

    // MARK: - Downloads

    func missing(_ offer: HubDownload.Offer, of download: HubDownload) -> Int {
        max(0, offer.size - Self.size(place(of: offer, download)))
    }

    enum DownloadProgress: Sendable {
        case downloaded(Int)
        case rewritten(Int)
    }

    /// Downloads an offer into Documents, or continues an earlier download. If the offer is a model and not a bundle, the model is then converted, and its files are deleted.
    func download(
        _ offer: HubDownload.Offer, by download: HubDownload, usesAnyNetwork: Bool,
        progress: @escaping @Sendable (DownloadProgress) -> Void
    ) async throws -> (bundle: StoredBundle, notices: [Sentence]) {
        let (target, partial) = (target(of: download), partial(of: download))
        try checkIsNew(target)
        let place = place(of: offer, download)
        guard let model = offer.model else {
            try prepare(offer, download)
            try await download.fetch(offer, to: place, usesAnyNetwork: usesAnyNetwork) { progress(.downloaded($0)) }
            return (try move(place, to: target), [])
        }
        let whole = place.deletingLastPathComponent().appendingPathComponent(target.lastPathComponent)
        var notices = [Sentence]()
        // The app may have been terminated after it had written the bundle.
        if !FileManager.default.fileExists(atPath: whole.path) {
            for other in (try? FileManager.default.contentsOfDirectory(atPath: partial.path)) ?? []
            where other != model.commit {
                try? FileManager.default.removeItem(at: partial.appendingPathComponent(other))
            }
            try prepare(offer, download)
            try make(place.deletingLastPathComponent(), for: offer.repository)
            try await download.fetch(offer, to: place, usesAnyNetwork: usesAnyNetwork) { progress(.downloaded($0)) }
            let opened = try ModelImport(model: place, id: offer.repository, revision: model.commit)
            notices = opened.notices
            progress(.rewritten(0))
            try await rewrite(opened, to: whole) { progress(.rewritten($0)) }
        }
        try? FileManager.default.removeItem(at: place)
        let bundle = try move(whole, to: target)
        removeRest(of: download)
        return (bundle, notices)
    }

    private func prepare(_ offer: HubDownload.Offer, _ download: HubDownload) throws {
        let partial = partial(of: download)
        let needed = offer.size + (offer.isModel ? offer.bundleSize : 0) - Self.size(partial)
        if let free = freeBytes(documents), free < needed + Self.spareBytes {
            throw MeSPError(
                "\(offer.repository) takes \(needed.megabytes(.up)) more, and the phone has \(free.megabytes(.down)) free; make room for it first."
            )
        }
        try make(partial, for: offer.repository)
    }

    func removeRest(of download: HubDownload) { try? FileManager.default.removeItem(at: partial(of: download)) }

    private func target(of download: HubDownload) -> URL {
        documents.appendingPathComponent("\(download.name).mesp")
    }

    private func partial(of download: HubDownload) -> URL {
        documents.appendingPathComponent(
            ".downloading-\(download.repository.replacingOccurrences(of: "/", with: "--"))")
    }

    /// Returns the folder for the downloaded files. A model's files are in a folder of their commit. This keeps the files of different commits apart,
    /// because not all of them have a known checksum.
    private func place(of offer: HubDownload.Offer, _ download: HubDownload) -> URL {
        let partial = partial(of: download)
        return offer.model.map { partial.appendingPathComponent($0.commit).appendingPathComponent("model") } ?? partial
    }

    func hasEnded(_ download: HubDownload) -> Bool {
        FileManager.default.fileExists(atPath: target(of: download).path) && Self.size(partial(of: download)) == 0
    }

    private var downloadFile: URL { documents.appendingPathComponent(".download.json") }

    struct BegunDownload: Codable {
        let offer: HubDownload.Offer
        let usesAnyNetwork: Bool
    }

    /// Reads the record of an unfinished download, or returns nil if there is none.
    ///
    /// - Throws: `MeSPError` if the record cannot be read. The record is then deleted.
    func readBegunDownload() throws -> BegunDownload? {
        guard FileManager.default.fileExists(atPath: downloadFile.path) else { return nil }
        do {
            return try JSONDecoder().decode(BegunDownload.self, from: Data(contentsOf: downloadFile))
        } catch {
            forgetDownload()
            throw MeSPError("The download cannot continue: \(error.plainSentence). Look up the repository again.")
        }
    }

    func save(_ download: BegunDownload) throws {
        try explaining {
            let json = try JSONEncoder().encode(download)
            try writeWhole(downloadFile) { try $0.write(contentsOf: json) }
        } as: {
            "\(download.offer.repository) cannot be written: \($0)."
        }
        applyPolicy(downloadFile, .bundle)
    }

    func forgetDownload() { try? FileManager.default.removeItem(at: downloadFile) }

    public func delete(_ bundle: StoredBundle) throws {
        guard !bundle.isIncluded else { throw MeSPError("\(bundle.name) came with the app and stays with it.") }
        try delete(documents.appendingPathComponent(bundle.id))
    }
}
