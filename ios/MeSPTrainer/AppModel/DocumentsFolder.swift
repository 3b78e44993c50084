import Foundation
import MeSPBundle
import MeSPCore
import MeSPDownload
import MeSPFiles

/// The files that an app keeps: bundles in its Documents, and its runs in the folder `runs` there, where `tools/collect.py` finds them.
public struct DocumentsFolder: Sendable {
    /// The folder that people see in Files.
    public let documents: URL
    /// The folder with bundles that came with the app.
    private let included: URL?
    /// The bytes that are free where a folder is; nil where nobody knows.
    private let freeBytes: @Sendable (URL) -> Int?
    /// Why no bundle for the GPU can be used here; nil where one can.
    let gpuRefusal: Sentence?
    /// Has a file or a folder kept so.
    private let keep: @Sendable (URL, Keeping) -> Void
    private let read: @Sendable (URL) throws -> Data
    private let list: @Sendable (URL) throws -> [URL]

    /// The suffix of the name of a benchmark's run.
    static let benchmark = "benchmark"

    /// - Parameters:
    ///   - documents: the folder that people see in Files.
    ///   - included: the folder with bundles that came with the app.
    ///   - gpuRefusal: why no bundle for the GPU can be used here; nil where one can.
    ///   - freeBytes: the bytes that are free where a folder is.
    ///   - keep: has a file or a folder kept so.
    ///   - read: reads a file that is locked away while the phone is locked.
    ///   - list: lists a folder, without hidden files.
    public init(
        documents: URL, included: URL? = nil, gpuRefusal: Sentence? = MLXSupport.gpuRefusal,
        freeBytes: @escaping @Sendable (URL) -> Int? = { $0.freeBytes },
        keep: @escaping @Sendable (URL, Keeping) -> Void = { $1.apply(to: $0) },
        read: @escaping @Sendable (URL) throws -> Data = { try Data(contentsOf: $0) },
        list: @escaping @Sendable (URL) throws -> [URL] = {
            try FileManager.default.contentsOfDirectory(
                at: $0, includingPropertiesForKeys: nil, options: .skipsHiddenFiles)
        }
    ) {
        (self.documents, self.included, self.gpuRefusal) = (documents, included, gpuRefusal)
        (self.freeBytes, self.keep, self.read, self.list) = (freeBytes, keep, read, list)
    }

    public var runsFolder: URL { documents.appendingPathComponent("runs") }
    /// The folder of a federation's node, made where it is missing: its key, the text's tokens and what it has to answer.
    func makeFederationFolder() throws -> URL {
        let folder = documents.appendingPathComponent(".federation")
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        keep(folder, .state)
        return folder
    }
    /// The folder in which `tools/collect.py` finds reports of self-checks.
    public var selfChecksFolder: URL { documents.appendingPathComponent("self-check") }

    // MARK: - Runs

    /// All runs, the newest first.
    ///
    /// - Parameter running: the folder of the run in progress.
    public func runs(running: URL? = nil) throws -> [StoredRun] {
        try contents(runsFolder).map {
            StoredRun(url: $0, isRunning: $0.lastPathComponent == running?.lastPathComponent)
        }
        .sorted { $0.date > $1.date }
    }

    /// A folder for a new run, which is not there yet: by the bundle, the method and the time.
    public func newRun(
        bundle: String, method: GradientMethod, isBenchmark: Bool = false, at date: Date = .now
    ) -> URL {
        newPlace(
            in: runsFolder, "\(bundle) \(method.rawValue)", at: date, ending: isBenchmark ? "." + Self.benchmark : "")
    }

    /// Has runs kept as they are to be. Files are replaced in a run, and what was said of the old ones is lost.
    func keepRuns() throws {
        for run in try contents(runsFolder) {
            keep(run, .run)
            // An app that was ended while it saved a state has left a part of it.
            for name in ["state.safetensors", "state.safetensors.partial"] {
                let state = run.appendingPathComponent(name)
                if FileManager.default.fileExists(atPath: state.path) { keep(state, .state) }
            }
        }
    }

    /// Copies the reports of self-checks and the logs of runs into `folder`, which is replaced.
    public func exportMeasurements(to folder: URL) throws {
        let files = FileManager.default
        do {
            try? files.removeItem(at: folder)
            try files.createDirectory(at: folder, withIntermediateDirectories: true)
            if files.fileExists(atPath: selfChecksFolder.path) {
                try files.copyItem(at: selfChecksFolder, to: folder.appendingPathComponent("self-check"))
            }
            for run in try contents(runsFolder) {
                let (log, name) = (run.appendingPathComponent("metrics.jsonl"), "runs/\(run.lastPathComponent)")
                guard files.fileExists(atPath: log.path) else { continue }
                let copy = folder.appendingPathComponent(name)
                try files.createDirectory(at: copy, withIntermediateDirectories: true)
                try files.copyItem(at: log, to: copy.appendingPathComponent(log.lastPathComponent))
            }
        } catch {
            throw MeSPError("The measurements cannot be copied: \(error.plainSentence).")
        }
    }

    /// A file for a new self-check, likewise.
    public func newSelfCheck(bundle: String, at date: Date = .now) -> URL {
        newPlace(in: selfChecksFolder, bundle, at: date, ending: ".json")
    }

    private func newPlace(in folder: URL, _ subject: String, at date: Date, ending: String = "") -> URL {
        let format = Date.VerbatimFormatStyle(
            format:
                "\(year: .defaultDigits)-\(month: .twoDigits)-\(day: .twoDigits) \(hour: .twoDigits(clock: .twentyFourHour, hourCycle: .zeroBased)).\(minute: .twoDigits).\(second: .twoDigits)",
            timeZone: .current, calendar: Calendar(identifier: .gregorian))
        let name = "\(subject) \(date.formatted(format))"
        var (url, number) = (folder.appendingPathComponent(name + ending), 2)
        while FileManager.default.fileExists(atPath: url.path) {
            url = folder.appendingPathComponent("\(name) \(number)" + ending)
            number += 1
        }
        return url
    }

    /// The settings to resume a run from its last saved state. The app's folders may have moved since, as they do in an update.
    public func settingsToResume(_ run: StoredRun) throws -> RunSettings {
        guard run.canResume, var settings = run.log?.start?.settings else {
            throw MeSPError("\(run.name) cannot be resumed: it has ended, or it has no saved state.")
        }
        let name = URL(fileURLWithPath: settings.bundle).lastPathComponent
        guard let bundle = try bundles().first(where: { $0.url.lastPathComponent == name }) else {
            throw MeSPError("The bundle \(name) of \(run.name) is no longer there; import it again.")
        }
        settings.bundle = bundle.url.path
        settings.output = run.url.path
        if settings.data != nil { settings.data = run.url.appendingPathComponent(TextData.folderName).path }
        if settings.general != nil { settings.general = run.url.appendingPathComponent(TextData.generalName).path }
        settings.resume = true
        return settings
    }

    public func delete(_ run: StoredRun) throws { try delete(run.url) }

    // MARK: - Chat

    private var chatFile: URL { documents.appendingPathComponent("chat.json") }

    /// The conversation that was kept last; nil if there is none.
    ///
    /// - Throws: where it can't be read; `MeSPError` while the phone is locked.
    func chat() throws -> Chat? {
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
        return try? JSONDecoder().decode(Chat.self, from: json)
    }

    /// Keeps a conversation in place of the last; nil for none.
    func keep(_ chat: Chat?) {
        guard let chat, let json = try? JSONEncoder().encode(chat) else {
            try? FileManager.default.removeItem(at: chatFile)
            return
        }
        try? json.write(to: chatFile, options: .atomic)
        keep(chatFile, .chat)
    }

    // MARK: - Choices

    /// A person's preferences between two answers.
    var choices: ChoiceStore { ChoiceStore(url: documents.appendingPathComponent("choices.jsonl")) }

    /// Has the file of choices kept as it is to be; it is replaced with each.
    func keepChoices() {
        if FileManager.default.fileExists(atPath: choices.url.path) { keep(choices.url, .chat) }
    }

    // MARK: - Bundles

    /// All bundles, by name: the ones in Documents, and those that came with the app where none in Documents has the name. Sizes are
    /// checked, checksums are not: a run checks these.
    public func bundles() throws -> [StoredBundle] {
        let own = try contents(documents).filter(\.isBundle).map {
            StoredBundle(url: $0, isIncluded: false, gpuRefusal: gpuRefusal)
        }
        let names = Set(own.map(\.url.lastPathComponent))
        let others = try included.map { try contents($0) } ?? []
        return
            (own
            + others.filter { $0.isBundle && !names.contains($0.lastPathComponent) }
            .map { StoredBundle(url: $0, isIncluded: true, gpuRefusal: gpuRefusal) })
            .sorted { $0.url.lastPathComponent < $1.url.lastPathComponent }
    }

    /// Copies the files that a bundle's manifest lists into Documents, and checks them. Other files of its folder are left out, and
    /// a refused bundle leaves nothing behind.
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
            keep(partial, .bundle)
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
        keep(partial, .bundle)
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

    /// The download in progress, also one in which the app was ended; nil for none. One that cannot be read is forgotten.
    func begunDownload() throws -> BegunDownload? {
        guard FileManager.default.fileExists(atPath: downloadFile.path) else { return nil }
        do {
            return try JSONDecoder().decode(BegunDownload.self, from: Data(contentsOf: downloadFile))
        } catch {
            forgetDownload()
            throw MeSPError("The download cannot continue: \(error.plainSentence). Look up the bundle again.")
        }
    }

    /// Keeps what is being downloaded, for a later start of the app.
    func keep(_ download: BegunDownload) throws {
        do {
            let json = try JSONEncoder().encode(download)
            try writeWhole(downloadFile) { try $0.write(contentsOf: json) }
        } catch {
            throw MeSPError("\(download.offer.repository) cannot be written: \(error.plainSentence).")
        }
        keep(downloadFile, .bundle)
    }

    func forgetDownload() { try? FileManager.default.removeItem(at: downloadFile) }

    public func delete(_ bundle: StoredBundle) throws {
        guard !bundle.isIncluded else { throw MeSPError("\(bundle.name) came with the app and stays with it.") }
        try delete(documents.appendingPathComponent(bundle.id))
    }

    // MARK: - Files

    /// The space that stays free after a copy, for runs and for the system.
    static let spareBytes = 200_000_000

    /// The size of all files in a folder, in bytes.
    private static func size(_ folder: URL) -> Int {
        let files = FileManager.default.enumerator(at: folder, includingPropertiesForKeys: [.fileSizeKey])
        return (files?.allObjects ?? []).reduce(0) { sum, file in
            sum + (((file as? URL)?.resourceSize) ?? 0)
        }
    }

    /// The folders in a folder; none where that isn't there.
    private func contents(_ folder: URL) throws -> [URL] {
        guard FileManager.default.fileExists(atPath: folder.path) else { return [] }
        do {
            return try list(folder).filter(\.hasDirectoryPath)
        } catch {
            throw MeSPError("\(folder.lastPathComponent) cannot be read: \(error.plainSentence).")
        }
    }

    private func delete(_ url: URL) throws {
        do {
            try FileManager.default.removeItem(at: url)
        } catch {
            throw MeSPError("\(url.lastPathComponent) cannot be deleted: \(error.plainSentence).")
        }
    }
}

extension URL {
    var isBundle: Bool { pathExtension == "mesp" }

    fileprivate var resourceSize: Int? { try? resourceValues(forKeys: [.fileSizeKey]).fileSize }

    /// The space that the system would free for something that a person has asked for.
    public var freeBytes: Int? {
        #if os(iOS) || os(macOS)
            let values = try? resourceValues(forKeys: [.volumeAvailableCapacityForImportantUsageKey])
            return values?.volumeAvailableCapacityForImportantUsage.map { Int($0) }
        #else
            let attributes = try? FileManager.default.attributesOfFileSystem(forPath: path)
            return (attributes?[.systemFreeSize] as? NSNumber)?.intValue
        #endif
    }
}

extension Int {
    /// Bytes as a size in words.
    var megabytes: String { "\((Double(self) / 1e6).formatted(.number.precision(.fractionLength(0)))) MB" }
}
