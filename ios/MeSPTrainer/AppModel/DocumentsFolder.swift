import Foundation
import MeSPCore

/// What an app keeps: bundles in its Documents, and its runs in the folder `runs` there, where `tools/collect.py` finds them.
public struct DocumentsFolder: Sendable {
    /// The folder that people see in Files.
    public let documents: URL
    /// The folder with bundles that came with the app.
    private let included: URL?

    public init(documents: URL, included: URL? = nil) {
        (self.documents, self.included) = (documents, included)
    }

    public var runsFolder: URL { documents.appendingPathComponent("runs") }
    /// Where `tools/collect.py` finds reports of self-checks.
    public var selfChecksFolder: URL { documents.appendingPathComponent("self-check") }

    // MARK: - Runs

    /// All runs, the newest first.
    ///
    /// - Parameter running: the folder of the run in progress.
    public func runs(running: URL? = nil) -> [StoredRun] {
        contents(runsFolder).map {
            StoredRun(url: $0, isRunning: $0.lastPathComponent == running?.lastPathComponent)
        }
        .sorted { $0.date > $1.date }
    }

    /// A folder for a new run, which is not there yet: by the bundle, the method and the time.
    public func newRun(bundle: String, method: GradientMethod, at date: Date = .now) -> URL {
        newPlace(in: runsFolder, "\(bundle) \(method.rawValue)", at: date)
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

    /// The settings to go on with a run from its last saved state. The app's folders may have moved since, as they do in an update.
    public func settingsToResume(_ run: StoredRun) throws -> RunSettings {
        guard run.canResume, var settings = run.log?.start?.settings else {
            throw MeSPError("\(run.name) cannot go on: it has ended, or there is no saved state.")
        }
        let name = URL(fileURLWithPath: settings.bundle).lastPathComponent
        guard let bundle = bundles().first(where: { $0.url.lastPathComponent == name }) else {
            throw MeSPError("The bundle \(name) of \(run.name) is no longer there; bring it in again.")
        }
        settings.bundle = bundle.url.path
        settings.output = run.url.path
        if settings.data != nil { settings.data = run.url.appendingPathComponent(TextData.folderName).path }
        settings.resume = true
        return settings
    }

    public func delete(_ run: StoredRun) throws { try delete(run.url) }

    // MARK: - Bundles

    /// All bundles, by name: the ones in Documents, and those that came with the app where none in Documents has the name. Sizes are
    /// checked, checksums are not: a run checks these.
    public func bundles() -> [StoredBundle] {
        let own = contents(documents).filter(\.isBundle).map { StoredBundle(url: $0, isIncluded: false) }
        let names = Set(own.map(\.url.lastPathComponent))
        let others = included.map { contents($0) } ?? []
        return
            (own
            + others.filter { $0.isBundle && !names.contains($0.lastPathComponent) }
            .map { StoredBundle(url: $0, isIncluded: true) })
            .sorted { $0.url.lastPathComponent < $1.url.lastPathComponent }
    }

    /// Copies a bundle into Documents, and checks all of it. Nothing stays of one that is refused.
    public func importBundle(at source: URL) throws -> StoredBundle {
        let name = source.lastPathComponent
        let target = documents.appendingPathComponent(name)
        guard source.isBundle else {
            throw MeSPError("\(name) is not a bundle: bundles are folders whose names end in .mesp.")
        }
        guard !FileManager.default.fileExists(atPath: target.path) else {
            throw MeSPError("There is a bundle \(name) already; delete it first.")
        }
        let partial = documents.appendingPathComponent(".importing-\(UUID().uuidString)")
        defer { try? FileManager.default.removeItem(at: partial) }
        do {
            try FileManager.default.copyItem(at: source, to: partial)
        } catch {
            throw MeSPError("\(name) cannot be copied: \(error.plainSentence).")
        }
        do {
            _ = try ModelBundle(url: partial)
        } catch {
            throw MeSPError(error.localizedDescription.replacingOccurrences(of: partial.path, with: name))
        }
        try FileManager.default.moveItem(at: partial, to: target)
        return StoredBundle(url: target, isIncluded: false)
    }

    public func delete(_ bundle: StoredBundle) throws {
        guard !bundle.isIncluded else { throw MeSPError("\(bundle.name) came with the app and stays with it.") }
        try delete(documents.appendingPathComponent(bundle.id))
    }

    // MARK: - Files

    private func contents(_ folder: URL) -> [URL] {
        let contents = try? FileManager.default.contentsOfDirectory(
            at: folder, includingPropertiesForKeys: nil, options: .skipsHiddenFiles)
        return (contents ?? []).filter(\.hasDirectoryPath)
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
    fileprivate var isBundle: Bool { pathExtension == "mesp" }
}
