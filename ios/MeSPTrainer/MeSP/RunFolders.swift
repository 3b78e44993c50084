import Foundation
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSentences

/// The numbered folders of a fine-tuner's runs. A run that finishes removes the folders of earlier runs.
struct RunFolders: Sendable {
    let folder: URL
    /// The digest of the bundle's weights.
    let weights: String

    private static let prefix = "run-"
    /// The name of the folder, within a run's folder, for a copy of the initial adapters.
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

    /// The folder of the last run that has begun; nil if there is none.
    private var last: URL? { numbers.last { hasBegun(url($0)) }.map(url) }

    private func hasBegun(_ run: URL) -> Bool {
        FileManager.default.fileExists(atPath: LogWriter.url(in: run).path)
    }

    var next: URL { url((numbers.last ?? 0) + 1) }

    /// The folder of the last adapters that were saved after a step.
    ///
    /// - Throws: `MeSPError` if there are none, or if they are of other weights.
    var adapters: URL {
        get throws {
            for run in numbers.reversed().map(url) where run.appendingPathComponent("adapters").hasAdapters {
                guard let log = try? LogOutline(folder: run), log.lastStep > 0 else { continue }
                try check(log, in: run)
                return run.appendingPathComponent("adapters")
            }
            throw MeSPError("No run in \(folder.path) has saved adapters; train first.", .nothingSaved)
        }
    }

    private func check(_ log: LogOutline, in run: URL) throws {
        if let trained = log.start?.model.weights, trained != weights {
            throw MeSPError(
                "The run in \(run.path) has trained for other weights of the model; begin a new run.",
                .otherWeights)
        }
    }

    func removeUnbegun() {
        for run in numbers.map(url) where !hasBegun(run) { try? FileManager.default.removeItem(at: run) }
    }

    func removeLast() throws {
        if let number = numbers.last { try FileManager.default.removeItem(at: url(number)) }
    }

    func removeAll() throws {
        for number in numbers { try FileManager.default.removeItem(at: url(number)) }
    }

    /// Removes the folders of all runs except `kept`. Compares names, because different URLs can lead to the same folder.
    func removeAll(but kept: URL) {
        for run in numbers.map(url) where run.lastPathComponent != kept.lastPathComponent {
            try? FileManager.default.removeItem(at: run)
        }
    }

    /// Returns the settings that continue the last run.
    ///
    /// - Parameter bundle: the current URL of the bundle. An app's folders move when the app is updated.
    /// - Throws: `MeSPError` if no run has begun, if the last run has finished or is of other weights, or if its log cannot be read or has no start.
    func settingsToContinue(with bundle: URL) throws -> RunSettings {
        guard let last, let log = try? LogOutline(folder: last), log.end != .finished,
            var settings = log.start?.settings
        else { throw MeSPError("There is no training to continue in \(folder.path); begin one.", .nothingSaved) }
        try check(log, in: last)
        settings.bundle = bundle.path
        settings.output = last.path
        settings.data = last.appendingPathComponent(TextData.folderName).path
        if settings.adapters != nil { settings.adapters = last.appendingPathComponent(Self.initialAdapters).path }
        if settings.general != nil { settings.general = last.appendingPathComponent(TextData.generalName).path }
        settings.resume = true
        return settings
    }
}
