import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

package enum Run {
    package static let version = "0.1.0"

    /// Trains with `settings`, and appends each record to the log. With `dryRun`, it only reports the plan.
    ///
    /// - Parameters:
    ///   - atBlock: called at every block boundary with a function that appends an event to the log. It may wait in the middle of a step. If it
    ///     throws `CancellationError`, the step is dropped, or finished if its updates have begun. Then the adapters are saved, and the run ends as
    ///     `stopped`. If it throws `GPUWithdrawn`, the run ends as `stopped` at once, at its last saved state.
    ///   - besideBytes: the process's footprint without the run, such as an app's own memory. The memory limit does not include it.
    ///   - memoryIsShort: called before each step. Returns whether the system has warned of low memory since the last call. If so, the run continues
    ///     with a plan that takes less memory. If there is none, the run saves its state and ends with an error.
    ///   - reward: with `groupSize`, returns a reward for each answer that was sampled for a step's prompts.
    ///   - atPhase: called when the run begins to train, to evaluate or to save.
    /// - Throws: for example `MeSPError`, or an error of one of the closures. Earlier saves stay valid.
    package static func run(
        _ settings: RunSettings, report: @escaping (LogRecord, Data) throws -> Void = { _, _ in },
        atBlock: @escaping (_ log: (LogRecord.Event) throws -> Void) throws -> Void = { _ in },
        besideBytes: Int = 0, memoryIsShort: @escaping () -> Bool = { false },
        reward: (([AnswerGroup]) throws -> [[Float]])? = nil,
        battery: @escaping () -> Battery? = { nil }, atPhase: @escaping (RunPhase) -> Void = { _ in }
    ) throws {
        let hooks = RunHooks(
            report: report, atBlock: atBlock, besideBytes: besideBytes, memoryIsShort: memoryIsShort, reward: reward,
            battery: battery, atPhase: atPhase)
        try settings.check()
        var settings = settings
        // A resumed run stays on its device unless the settings name another.
        settings.device = settings.device ?? SavedState.device(of: settings) ?? .standard
        let bundle = try ModelBundle(
            url: URL(fileURLWithPath: settings.bundle), text: settings.data.map { URL(fileURLWithPath: $0) },
            device: settings.device, checksums: !settings.dryRun)
        try bundle.withDevice { try run(settings, bundle, hooks) }
    }

    static func run(_ settings: RunSettings, _ bundle: ModelBundle, _ hooks: RunHooks) throws {
        var settings = settings
        settings.setDefaultUpdate(for: bundle.architecture)
        try bundle.manifest.check(settings)
        try settings.countSteps()
        try bundle.checkPositions(settings.seqLen)
        let output = URL(fileURLWithPath: settings.output)
        guard !settings.resume || FileManager.default.fileExists(atPath: LogWriter.url(in: output).path) else {
            throw MeSPError("\(output.path) holds no run to resume; start the run without resume.")
        }
        // The folder is locked before the state is read, so that no other process changes the state.
        var lock = settings.resume && !settings.dryRun ? try FolderLock(output) : nil
        defer { withExtendedLifetime(lock) {} }
        var saved = settings.resume ? try SavedState.load(from: output, settings) : nil
        let planner = Planner(bundle.manifest, settings)
        if let plan = saved?.plan, !planner.isPossible(plan) { throw SavedState.damaged(in: output) }
        var plan = try saved?.plan ?? planner.plan()
        if settings.dryRun {
            try saved?.state.check(SavedState.Sources(bundle, settings), in: output)
            let data = settings.dpClip == nil ? nil : try Splits(bundle, settings)
            let record = LogRecord.plan(plan, .init(settings, bundle, planner, plan, data))
            return try hooks.report(record, record.line())
        }
        let sources = try SavedState.Sources(bundle, settings)
        try saved?.state.check(sources, in: output)
        let data = try Splits(bundle, settings)
        if lock == nil { lock = try FolderLock(output) }
        // The first work on a GPU begins after this call, in which `atBlock` may wait. A stop takes effect at the next boundary.
        do { try hooks.atBlock { _ in } } catch is CancellationError {}
        let progress = TrainingLoop.Progress()
        var cut: TrainingLoop.CutShort?
        while true {
            if let cut { plan = cut.plan }
            do {
                return try MLXErrors.separate {
                    let loop = try MLXErrors.checked {
                        try TrainingLoop(
                            settings, bundle, data, sources, planner, plan, from: saved, progress, after: cut,
                            hooks: hooks)
                    }
                    try loop.run()
                }
            } catch let end as TrainingLoop.CutShort {
                (cut, settings.resume) = (end, true)
                saved = try SavedState.load(from: output, settings)
            } catch let failure as MLXFailure where failure.isOfMemory {
                // The loop's arrays could not be made.
                let reason: Sentence = "MLX ran short of memory"
                cut = .init(reason: reason, plan: try planner.cheaper(than: plan, because: reason))
            }
        }
    }
}

package enum RunPhase: Sendable { case training, evaluating, saving }

struct RunHooks {
    var report: (LogRecord, Data) throws -> Void = { _, _ in }
    var atBlock: (_ log: (LogRecord.Event) throws -> Void) throws -> Void = { _ in }
    var besideBytes = 0
    var memoryIsShort: () -> Bool = { false }
    var reward: (([AnswerGroup]) throws -> [[Float]])?
    var battery: () -> Battery? = { nil }
    var atPhase: (RunPhase) -> Void = { _ in }
    var now: () -> ContinuousClock.Instant = { .now }
}
