import Foundation
import MeSP
import MeSPBundle
import MeSPCore
import MeSPSentences

extension DocumentsFolder {
    public func runs(running: URL? = nil) throws -> [StoredRun] {
        try contents(runsFolder).map {
            StoredRun(url: $0, isRunning: $0.lastPathComponent == running?.lastPathComponent)
        }
        .sorted { $0.date > $1.date }
    }

    package func newRun(
        bundle: String, method: GradientMethod, isBenchmark: Bool = false, at date: Date = .now
    ) -> URL {
        unusedURL(
            in: runsFolder, "\(bundle) \(method.rawValue)", at: date, ending: isBenchmark ? "." + Self.benchmark : "")
    }

    /// Applies storage policies to the folders and saved states of all runs. A run that saves its state writes a new file without a policy.
    func applyPoliciesToRuns() throws {
        for run in try contents(runsFolder) {
            applyPolicy(run, .run)
            // The partial file exists if the app was terminated while it saved a state.
            for name in ["state.safetensors", "state.safetensors.partial"] {
                let state = run.appendingPathComponent(name)
                if FileManager.default.fileExists(atPath: state.path) { applyPolicy(state, .state) }
            }
        }
    }

    public func exportMeasurements(to folder: URL) throws {
        let files = FileManager.default
        try explaining {
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
        } as: {
            "The measurements cannot be copied: \($0)."
        }
    }

    package func newSelfCheck(bundle: String, at date: Date = .now) -> URL {
        unusedURL(in: selfChecksFolder, bundle, at: date, ending: ".json")
    }

    private func unusedURL(in folder: URL, _ subject: String, at date: Date, ending: String = "") -> URL {
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

    /// Returns the settings that resume a run from its last saved state. Replaces the recorded paths, because an app update can move the app's
    /// folders.
    package func settingsToResume(_ run: StoredRun) throws -> RunSettings {
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
}
