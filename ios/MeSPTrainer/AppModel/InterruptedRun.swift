import Foundation
import MeSPControl
import MeSPCore

/// How a run that was interrupted, or stopped, continues from its last saved state: the person asks for it, or the system gives time in
/// the background.
extension AppModel {
    /// The run during which the app was ended, until the person has continued or declined it.
    public var interrupted: StoredRun? {
        guard !controller.isRunning, let run = library.runs.first(where: { !$0.isBenchmark }),
            run.status == .interrupted, run.canResume,
            run.id != declinedRun, library.bundle(of: run) != nil
        else { return nil }
        return run
    }

    /// Leaves the interrupted run in the list, and offers it no more.
    public func decline(_ run: StoredRun) { declinedRun = run.id }

    /// Continues a run from its last saved state.
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

    /// Continues the interrupted run in a time in the background.
    ///
    /// - Returns: whether there was a run that may train in such a time.
    func resumeInBackground(_ grant: BackgroundGrant) async -> Bool {
        await refresh()
        guard let run = interrupted, run.log?.start?.device == .cpu || grant == .continuedOnGPU else { return false }
        await resume(run)
        return controller.isRunning
    }

    // MARK: - A recorded run

    /// Whether there is a recorded run to look at, as there is where nothing can be trained.
    public var canReplay: Bool { refusal != nil && recording != nil && !controller.isRunning }

    /// Shows the recorded run as if it were in progress, and puts it into the list.
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
