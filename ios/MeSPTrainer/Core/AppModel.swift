import Foundation
import Observation

/// What the app shows and does: its views only lay this out.
@MainActor @Observable public final class AppModel {
    /// Where the text to train on comes from.
    public enum TextKind: Sendable, CaseIterable { case bundle, file, pasted }

    /// Why the app can't train here; nil where it can.
    public static var refusal: String? {
        #if targetEnvironment(simulator)
            "MLX needs a GPU that the iOS simulator doesn't have: run the app on an iPhone or iPad."
        #else
            nil
        #endif
    }

    public let controller: RunController
    public let comparison: Comparison
    public let benchmark: Benchmark
    public let store: RunStore

    public private(set) var bundles = [StoredBundle]()
    public private(set) var runs = [StoredRun]()
    /// What went wrong last, in a sentence, until it is set to nil.
    public var problem: String?
    /// Setting it to false is reading it.
    public var hasProblem: Bool {
        get { problem != nil }
        set { if !newValue { problem = nil } }
    }
    /// The bundle that is being copied and checked.
    public private(set) var importing: String?

    /// The bundle to train.
    public private(set) var bundle: StoredBundle?
    public var bundleID: StoredBundle.ID? {
        get { bundle?.id }
        set { select(bundles.first { $0.id == newValue }) }
    }
    /// The next run's settings. The bundle, the output and the text are filled in by `start()`.
    public var settings = RunSettings(bundle: "", output: "")
    /// Whether the run is to stay below a memory limit.
    public var hasLimit: Bool {
        get { settings.memoryLimitMb != nil }
        set { settings.memoryLimitMb = newValue ? limit : nil }
    }
    /// The memory limit in MB.
    public var limit = 100.0 { didSet { if hasLimit { settings.memoryLimitMb = limit } } }
    public var textKind = TextKind.bundle
    /// The text file that was chosen.
    public var file: URL?
    public var pasted = ""
    /// Of records with prompts, whether only the answers count in the loss.
    public var answersOnly = false
    /// How much of the text is tokenized, from 0 to 1; nil while none is being tokenized.
    public private(set) var tokenized: Double?
    /// Whether the form for a new run is shown, and not the run in progress or the last one.
    public var showsSetup = true
    /// What the person wants of the screen while a run is in progress.
    public var keepsAwake = true
    /// In front all night, with the screen dark.
    public var isOvernight = false

    @ObservationIgnored private let phone: any Phone
    @ObservationIgnored private let loadTokenizer: @Sendable (URL) async throws -> any TextTokenizer

    /// - Parameter loadTokenizer: reads the tokenizer in a bundle's folder.
    public init(
        phone: any Phone, store: RunStore, loadTokenizer: @escaping @Sendable (URL) async throws -> any TextTokenizer
    ) {
        (self.phone, self.store, self.loadTokenizer) = (phone, store, loadTokenizer)
        controller = RunController(phone: phone)
        comparison = Comparison(phone: phone)
        benchmark = Benchmark(controller: controller)
        // What shows within minutes; the trainer's own defaults are the paper's.
        (settings.optimizer, settings.learningRate) = (.adamw, 5e-4)
        refresh()
    }

    // MARK: - Files

    /// Looks for bundles and runs again.
    public func refresh() {
        bundles = store.bundles()
        runs = store.runs(
            running: controller.isRunning ? controller.settings.map { URL(fileURLWithPath: $0.output) } : nil)
        let known = bundles.first { $0.id == bundle?.id && $0.problem == nil }
        if known == nil || bundle == nil { select(known ?? bundles.first { $0.problem == nil }) }
    }

    /// Chooses the bundle to train, with the nearest settings that it has traces for.
    public func select(_ bundle: StoredBundle?) {
        self.bundle = bundle
        guard let manifest = bundle?.manifest else { return }
        if !manifest.seqLens.contains(settings.seqLen) {
            settings.seqLen = manifest.seqLens.filter { $0 <= settings.seqLen }.max() ?? manifest.seqLens.min() ?? 1
        }
        if !manifest.ranks.contains(settings.rank) { settings.rank = manifest.ranks.first ?? 1 }
    }

    /// Copies a bundle that the person chose into the app. One that is in Documents already is only chosen, and what AirDrop put into
    /// the inbox moves from there.
    public func importBundle(at url: URL) async {
        let folder = url.deletingLastPathComponent().resolvingSymlinksInPath().path
        if folder == store.documents.resolvingSymlinksInPath().path {
            refresh()
            return select(bundles.first { $0.id == url.lastPathComponent })
        }
        importing = url.lastPathComponent
        defer { importing = nil }
        let store = store
        await attempt {
            let bundle = try await Task.detached { try store.importBundle(at: url) }.value
            if folder == store.documents.appendingPathComponent("Inbox").resolvingSymlinksInPath().path {
                try? FileManager.default.removeItem(at: url)
            }
            refresh()
            select(bundle)
        }
    }

    public func delete(_ bundle: StoredBundle) async {
        await attempt { try store.delete(bundle) }
        refresh()
    }

    public func delete(_ run: StoredRun) async {
        await attempt { try store.delete(run) }
        refresh()
    }

    // MARK: - Runs

    /// Whether the device is free for a run, a text or a benchmark.
    public var isFree: Bool {
        !controller.isRunning && comparison.writing == nil && benchmark.running == nil && tokenized == nil
            && Self.refusal == nil
    }

    /// Whether a run with the form's settings can begin now.
    public var canStart: Bool { isFree && (try? fit.get().fits) == true }

    /// The predicted peak and whether it fits now, or why there can be no such run.
    public var fit: Result<Fit, MeSPError> {
        guard let manifest = bundle?.manifest else {
            return .failure(MeSPError("Bring in a bundle first, by AirDrop, the Files app or tools/push.py."))
        }
        do {
            return .success(try Fit(settings, manifest, available: phone.availableMemory))
        } catch {
            return .failure(MeSPError(error.localizedDescription))
        }
    }

    /// Tokenizes the text, where it is not the bundle's, and begins the run.
    public func start() async {
        guard canStart, let bundle else { return }
        let folder = store.newRun(bundle: bundle.name, method: settings.method)
        var settings = settings
        (settings.bundle, settings.output, settings.resume) = (bundle.url.path, folder.path, false)
        await attempt {
            settings.data = try await tokenize(bundle, into: folder)?.path
            controller.start(settings)
            showsSetup = false
        }
        if settings.data == nil, textKind != .bundle { try? FileManager.default.removeItem(at: folder) }
        refresh()
    }

    /// - Returns: the folder with the tokens; nil where the bundle's text is wanted.
    private func tokenize(_ bundle: StoredBundle, into run: URL) async throws -> URL? {
        let source: TextData.Source
        switch textKind {
        case .bundle: return nil
        case .file:
            guard let file else { throw MeSPError("Choose a text file first.") }
            source = .file(file)
        case .pasted: source = .text(pasted)
        }
        tokenized = 0
        defer { tokenized = nil }
        let data = TextData(
            tokenizer: try await loadTokenizer(bundle.url), length: settings.seqLen, answersOnly: answersOnly)
        let folder = run.appendingPathComponent(TextData.folderName)
        let (progress, sender) = AsyncStream.makeStream(of: Double.self, bufferingPolicy: .bufferingNewest(1))
        let work = Task.detached {
            defer { sender.finish() }
            try data.write(source, to: folder) { sender.yield($0) }
        }
        for await part in progress { tokenized = part }
        try await work.value
        return folder
    }

    /// Goes on with a run from its last saved state.
    public func resume(_ run: StoredRun) async {
        guard isFree else { return }
        await attempt {
            controller.start(try store.settingsToResume(run))
            showsSetup = false
        }
        refresh()
    }

    /// Measures the three methods with the form's length and rank.
    public func compareMethods(steps: Int) async {
        guard isFree, let bundle else { return }
        var settings = RunSettings(bundle: bundle.url.path, output: "")
        (settings.seqLen, settings.rank, settings.steps) = (self.settings.seqLen, self.settings.rank, steps)
        await benchmark.run(settings) { store.newRun(bundle: bundle.name, method: $0) }
        refresh()
    }

    /// Lets both models write, with the adapters of `run`.
    public func write(_ request: Comparison.Request, with run: StoredRun?) async {
        guard isFree, let bundle = run.flatMap(bundle(of:)) ?? bundle else { return }
        await attempt {
            let tokenizer = try await loadTokenizer(bundle.url)
            comparison.start(request, bundle: bundle.url, adapters: run?.adapters, tokenizer: tokenizer)
        }
    }

    /// The bundle that a run was trained on, if it is still there.
    public func bundle(of run: StoredRun) -> StoredBundle? {
        guard let path = run.log?.start?.settings.bundle else { return nil }
        let name = URL(fileURLWithPath: path).lastPathComponent
        return bundles.first { $0.id == name && $0.problem == nil }
    }

    private func attempt(_ body: () async throws -> Void) async {
        do {
            try await body()
        } catch {
            problem = error.localizedDescription
        }
    }

    // MARK: - The screen

    /// Whether the screen is to stay on.
    public var staysAwake: Bool { controller.isRunning && (keepsAwake || isOvernight) }

    /// Whether the screen is to be dark.
    public var isDimmed: Bool { controller.isRunning && isOvernight }

    /// What to do for a run that takes the night.
    public var overnightAdvice: String {
        let battery = phone.battery.map { !$0.isCharging } ?? false
        return (battery ? "Connect the charger: below 20% the run pauses. " : "")
            + "Leave the app in front and don't lock the phone: iOS stops training in the background, and it goes on only when you come back."
    }
}
