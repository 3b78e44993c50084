import Foundation
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSentences

/// The numbered folders of a fine-tuner's runs. A run that finishes removes the folders of earlier runs. Other contents of the folder stay.
struct RunFolders: Sendable {
    let folder: URL

    private static let prefix = "run-"
    /// The name of the folder, within a run, that has a copy of its initial adapters.
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

    /// The folder of the last run that has begun; nil if no run has begun.
    private var last: URL? { numbers.last { hasBegun(url($0)) }.map(url) }

    private func hasBegun(_ run: URL) -> Bool {
        FileManager.default.fileExists(atPath: LogWriter.url(in: run).path)
    }

    /// The URL for the folder of a new run, which does not exist yet.
    var next: URL { url((numbers.last ?? 0) + 1) }

    /// The folder of the adapters of the last run that has saved adapters after a step; nil if there is no such run.
    var adapters: URL? {
        let learned = numbers.reversed().map(url).first {
            $0.appendingPathComponent("adapters").hasAdapters && (try? LogOutline(folder: $0).lastStep) ?? 0 > 0
        }
        return learned?.appendingPathComponent("adapters")
    }

    /// Removes the folders of runs that have not begun.
    func removeUnbegun() {
        for run in numbers.map(url) where !hasBegun(run) { try? FileManager.default.removeItem(at: run) }
    }

    /// - Parameter kept: the folder of the run to keep. Folders are compared by name, because several URLs can lead to one folder.
    func removeAll(but kept: URL) {
        for run in numbers.map(url) where run.lastPathComponent != kept.lastPathComponent {
            try? FileManager.default.removeItem(at: run)
        }
    }

    /// Returns the settings that continue the last run, or nil if no run has begun, or if the last run has finished or its log cannot be read.
    ///
    /// - Parameter bundle: the present URL of the bundle. An app's folders move when the app is updated.
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
