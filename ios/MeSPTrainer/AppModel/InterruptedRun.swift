import Foundation
import MeSPControl
import MeSPCore

extension AppModel {
    /// The last run that is not part of a benchmark, if it was interrupted, can be continued and was not declined. Otherwise nil.
    public var interrupted: StoredRun? {
        guard !controller.isRunning, let run = library.runs.first(where: { !$0.isBenchmark }),
            run.status == .interrupted, run.canResume,
            run.id != declinedRun, library.bundle(of: run) != nil
        else { return nil }
        return run
    }

    public func decline(_ run: StoredRun) { declinedRun = run.id }

    public func resume(_ run: StoredRun) async {
        guard isFree else { return }
        await attempt {
            let settings = try library.folder.settingsToResume(run)
            beginUsing(URL(fileURLWithPath: settings.bundle).lastPathComponent)
            controller.start(settings)
            (tab, showsSetup) = (.train, false)
        }
        await refresh()
    }

    func resumeInBackground(_ grant: BackgroundGrant) async -> Bool {
        await refresh()
        guard let run = interrupted, run.log?.start?.device == .cpu || grant == .continuedOnGPU else { return false }
        await resume(run)
        return controller.isRunning
    }

    // MARK: - A recorded run

    public var canReplay: Bool { refusal != nil && recording != nil && !controller.isRunning }

    public func replay() async {
        guard canReplay, let recording else { return }
        let copy = library.folder.runsFolder.appendingPathComponent("Recorded run")
        await attempt {
            if !FileManager.default.fileExists(atPath: copy.path) {
                try FileManager.default.createDirectory(
                    at: library.folder.runsFolder, withIntermediateDirectories: true)
                try FileManager.default.copyItem(at: recording, to: copy)
            }
            controller.replay(copy)
            showsSetup = false
        }
        await refresh()
    }
}
