import Foundation
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSentences

/// The runs of a fine-tuner, numbered folders. There is one, and beside it a new one until that has ended. What else is in the folder stays.
struct RunFolders: Sendable {
    let folder: URL

    private static let prefix = "run-"
    /// The folder in a run with a copy of the adapters that it goes on from.
    static let initialAdapters = "initial-adapters"

    private var numbers: [Int] {
        let names = (try? FileManager.default.contentsOfDirectory(atPath: folder.path)) ?? []
        return names.compactMap { name in
            guard name.hasPrefix(Self.prefix), let number = Int(name.dropFirst(Self.prefix.count)) else { return nil }
            return name == Self.name(number) ? number : nil
        }.sorted()
    }

    private static func name(_ number: Int) -> String { "\(prefix)\(number)" }

    private func url(_ number: Int) -> URL { folder.appendingPathComponent(Self.name(number)) }

    /// The folder of the last run that has begun; nil where none has.
    private var last: URL? { numbers.last { hasBegun(url($0)) }.map(url) }

    private func hasBegun(_ run: URL) -> Bool {
        FileManager.default.fileExists(atPath: LogWriter.url(in: run).path)
    }

    /// A folder for a new run, which is not there yet.
    var next: URL { url((numbers.last ?? 0) + 1) }

    /// The adapters that were saved last, whole and after a step; nil where none were.
    var adapters: URL? {
        let learned = numbers.reversed().map(url).first {
            $0.appendingPathComponent("adapters").hasAdapters && (try? LogOutline(folder: $0).lastStep) ?? 0 > 0
        }
        return learned?.appendingPathComponent("adapters")
    }

    /// Removes runs that have not begun.
    func removeUnbegun() {
        for run in numbers.map(url) where !hasBegun(run) { try? FileManager.default.removeItem(at: run) }
    }

    /// - Parameter kept: the folder of a run; by its name, as other places lead to it by other URLs.
    func removeAll(but kept: URL) {
        for run in numbers.map(url) where run.lastPathComponent != kept.lastPathComponent {
            try? FileManager.default.removeItem(at: run)
        }
    }

    /// The settings with which the last run goes on, where that was stopped or its process ended; nil where it has finished.
    ///
    /// - Parameter bundle: the bundle's present place. An app's folders move when it is updated.
    func settingsToContinue(with bundle: URL) -> RunSettings? {
        guard let last, let log = try? LogOutline(folder: last), log.end != .finished,
            var settings = log.start?.settings
        else { return nil }
        settings.bundle = bundle.path
        settings.output = last.path
        settings.data = last.appendingPathComponent(TextData.folderName).path
        if settings.adapters != nil { settings.adapters = last.appendingPathComponent(Self.initialAdapters).path }
        if settings.general != nil { settings.general = last.appendingPathComponent(TextData.generalName).path }
        settings.resume = true
        return settings
    }
}
