import Foundation
import MeSP
import MeSPAdapters
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPDownload
import MeSPFederation
import MeSPSelfCheck
import MeSPSentences
import Observation

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

@MainActor @Observable public final class AppModel {
    public let refusal: Sentence?

    public let library: Library
    public let form: TrainingForm
    public let screen: ScreenPower
    public let controller: RunController
    public let chat: SideBySideChat
    public let choices: ChoiceList
    public let benchmark: Benchmark
    public let selfChecker: SelfChecker
    public let evaluation: Evaluation
    public let examples: LearnedExamples
    public let preview: DataPreview
    public let downloads: DownloadState
    public let federation: Federation

    public enum Tab: Sendable { case train, tryIt, runs, bundles, compare }
    public var tab = Tab.train { didSet { if tab != .tryIt { chat.freeCaches() } } }
    public var problem: Sentence?
    public var hasProblem: Bool {
        get { problem != nil }
        set { if !newValue { problem = nil } }
    }
    package internal(set) var deletion: Deletion?
    var importRequest: ImportRequest?
    public internal(set) var tokenized: Double?
    public internal(set) var textNotices = [Sentence]()
    public var showsSetup = true
    var declinedRun: StoredRun.ID?

    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored let loadTokenizer: @Sendable (URL) async throws -> any TextTokenizer
    @ObservationIgnored let recording: URL?
    @ObservationIgnored let notificationDisplay: (any NotificationDisplay)?
    @ObservationIgnored private var runNotifications: RunNotifications?
    @ObservationIgnored private var activityUpdates: LiveActivityUpdates?
    @ObservationIgnored private var background: BackgroundTraining?

    public init(
        monitor: any DeviceMonitor, folder: DocumentsFolder, display: (any Display)? = nil,
        scheduler: (any BackgroundScheduler)? = nil, notificationDisplay: (any NotificationDisplay)? = nil,
        activityDisplay: (any LiveActivityDisplay)? = nil, network: (any NetworkPath)? = nil,
        refusal: Sentence? = MLXSupport.refusal, recording: URL? = nil,
        openDownload: @escaping @Sendable (String) throws -> HubDownload = { try HubDownload(repository: $0) },
        loadTokenizer: @escaping @Sendable (URL) async throws -> any TextTokenizer
    ) {
        MLXSupport.setEnvironment()
        (self.notificationDisplay, self.refusal, self.recording) = (notificationDisplay, refusal, recording)
        self.monitor = monitor
        self.loadTokenizer = { try await loadTokenizer($0).asTrained($0) }
        library = Library(folder)
        form = TrainingForm(library: library, monitor: monitor)
        controller = RunController(monitor: monitor)
        screen = ScreenPower(monitor: monitor, controller: controller, display: display)
        chat = SideBySideChat(monitor: monitor, folder: folder)
        choices = ChoiceList(folder)
        benchmark = Benchmark(controller: controller)
        selfChecker = SelfChecker(monitor: monitor)
        evaluation = Evaluation(monitor: monitor)
        examples = LearnedExamples(monitor: monitor)
        preview = DataPreview(form: form, choices: choices, loadTokenizer: self.loadTokenizer)
        downloads = DownloadState(folder: folder, monitor: monitor, network: network, open: openDownload)
        federation = Federation(monitor: monitor, controller: controller)
        controller.observers.append { [weak self] in self?.runChanged() }
        runNotifications = notificationDisplay.map {
            RunNotifications(controller: controller, monitor: monitor, display: $0)
        }
        activityUpdates = activityDisplay.map {
            LiveActivityUpdates(controller: controller, monitor: monitor, display: $0)
        }
        background = scheduler.map {
            BackgroundTraining(
                controller: controller, monitor: monitor, scheduler: $0,
                // The runs of a federation are started by its server, not by the person.
                isStartedByPerson: { [weak self] in self?.federation.isOn == false },
                resume: { [weak self] in await self?.resumeInBackground($0) ?? false })
        }
    }

    public func refresh() async {
        // An earlier launch that was terminated may have left unfinished imports, and files without a storage policy.
        if !library.hasLooked {
            applyStoragePolicies()
            let folder = library.folder
            await Task.detached { folder.removeInterruptedImports() }.value
        }
        await attempt {
            try await library.refresh(
                running: controller.isRunning ? controller.settings.map { URL(fileURLWithPath: $0.output) } : nil)
        }
        form.refresh()
        // Choices cannot be read while the phone is locked. They are read again when the app becomes active.
        do { try choices.refresh() } catch { if monitor.scene == .active { problem = error.plainSentence } }
        if hasEnded, let run = shownRun {
            hasEnded = false
            showExamples(of: run, isAskedFor: false)
        }
    }

    // MARK: - Whether the model is in use

    var bundleInUse: StoredBundle.ID? { isBusy ? lastUsed : nil }
    private var lastUsed: StoredBundle.ID?
    var isBusy: Bool {
        isPreparing || controller.isRunning || chat.writing != nil || benchmark.running != nil
            || selfChecker.isRunning || evaluation.isRunning || federation.isOn
    }
    public private(set) var isPreparing = false

    // MARK: - Runs

    private func runChanged() {
        guard !controller.isRunning else { return chat.freeCaches() }
        applyStoragePolicies()
        if case .finished = controller.state { hasEnded = true }
    }

    private func applyStoragePolicies() {
        let folder = library.folder
        Task { await attempt { try await Task.detached { try folder.applyPoliciesToRuns() }.value } }
    }

    private var hasEnded = false

    public var progress: RunProgress? {
        controller.settings.map { RunProgress(controller.log, steps: $0.steps) }
    }

    /// The last run's entry in the list, once the list shows that the run has ended. It is nil for a benchmark's run.
    public var shownRun: StoredRun? {
        guard !controller.isRunning, let id = runFolder else { return nil }
        // A list read before the run ended still shows the run as running.
        return library.runs.first { $0.id == id && !$0.isBenchmark && $0.status != .running }
    }

    /// The name of the folder of the current or last run.
    var runFolder: StoredRun.ID? {
        controller.settings.map { URL(fileURLWithPath: $0.output).lastPathComponent }
    }

    public func canShowExamples(of run: StoredRun) -> Bool {
        run.adapters != nil && library.bundle(of: run) != nil && (run.log?.lastStep ?? 0) > 0
    }

    /// Starts to generate examples of a run's effect. Does nothing if `isFree` or `canShowExamples(of:)` is false.
    public func showExamples(of run: StoredRun, isAskedFor: Bool = true) {
        guard isFree, canShowExamples(of: run), let bundle = library.bundle(of: run) else { return }
        examples.start(run, bundle: bundle.url, isAskedFor: isAskedFor, loadTokenizer: loadTokenizer)
    }

    /// The run that the person chose for writing, or nil for the latest.
    public var chosenRun: StoredRun.ID?
    package var writingRun: StoredRun? { library.trained.first { $0.id == chosenRun } ?? library.trained.first }
    public var writingBundle: StoredBundle? { writingRun.flatMap(library.bundle(of:)) ?? form.bundle }
    public var secondRuns: [StoredRun] {
        guard let first = writingRun else { return [] }
        return library.trained.filter { $0.id != first.id && library.bundle(of: $0)?.id == writingBundle?.id }
    }
    /// The run that is combined with `writingRun`; nil for none. A run that is not in `secondRuns` counts as none.
    public var secondRun: StoredRun.ID? {
        get { secondRuns.first { $0.id == chosenSecondRun }?.id }
        set { chosenSecondRun = newValue }
    }
    private var chosenSecondRun: StoredRun.ID?
    public var writingRuns: [StoredRun] {
        let second = secondRun
        return [writingRun].compactMap { $0 } + secondRuns.filter { $0.id == second }
    }
    public var strengths: [Float] = [1, 1]

    /// Opens the *Try* tab with this run's adapters alone, at full strength. Fills an empty prompt with an example of the run.
    public func openChat(with run: StoredRun) {
        (chosenRun, chosenSecondRun, strengths) = (run.id, nil, [1, 1])
        if chat.draft.prompt.isEmpty, let sample = examples.of(run).first {
            (chat.draft.prompt, chat.draft.isChat) = (sample.prompt, sample.isMessage)
        }
        tab = .tryIt
    }

    public var isFree: Bool { !isBusy && refusal == nil }

    /// Updates the preview of the form's data if the app can begin work. For pasted text it first waits for a pause in typing.
    public func updatePreview() async {
        guard isFree else { return }
        await preview.read()
    }

    public func compareMethods(steps: Int) async {
        guard isFree, let bundle = form.bundle else { return }
        beginUsing(bundle.id)
        var settings = RunSettings(bundle: bundle.url.path, output: "")
        settings.usePaperUpdate()
        (settings.seqLen, settings.rank, settings.steps) = (form.settings.seqLen, form.settings.rank, steps)
        await benchmark.run(settings) {
            library.folder.newRun(bundle: bundle.name, method: $0, isBenchmark: true)
        }
        await refresh()
    }

    public func checkDevice() {
        guard isFree, let bundle = form.bundle else { return }
        beginUsing(bundle.id)
        chat.freeCaches()
        selfChecker.start(
            .init(bundle: bundle.url.path), file: library.folder.newSelfCheck(bundle: bundle.name))
    }

    /// Starts a self-check if the app's arguments contain `--self-check`, optionally followed by a bundle's name.
    public func begin(arguments: [String]) {
        guard let index = arguments.firstIndex(of: "--self-check") else { return }
        if index + 1 < arguments.count {
            let name = arguments[index + 1]
            guard let bundle = library.usableBundles.first(where: { $0.id == name }) else {
                problem = "There is no usable bundle \(name)."
                return
            }
            form.select(bundle)
        }
        checkDevice()
    }

    public var staysAwake: Bool {
        screen.staysAwake || selfChecker.isRunning || evaluation.isRunning || federation.isOn
    }

    public func evaluate(_ file: URL, with run: StoredRun?) async {
        guard isFree, let bundle = run.flatMap(library.bundle(of:)) ?? form.bundle else { return }
        await prepare(bundle) {
            guard try TextFileKind(of: file) != .text else {
                throw MeSPError("\(file.lastPathComponent) is a text; measure on records, as .jsonl, .ndjson or .json.")
            }
            guard let records = try? Data(contentsOf: file) else {
                throw MeSPError("\(file.lastPathComponent) cannot be read.")
            }
            let tokenizer = try await loadTokenizer(bundle.url)
            evaluation.start(records, bundle: bundle.url, adapters: run?.adapters, tokenizer: tokenizer)
        }
    }

    public func write(_ request: SideBySideChat.Request) async {
        guard isFree, let bundle = writingBundle else { return }
        let adapters = zip(writingRuns, strengths).compactMap { run, strength in
            run.adapters.map { WeightedAdapters($0, weight: strength) }
        }
        await prepare(bundle) {
            let tokenizer = try await loadTokenizer(bundle.url)
            chat.start(request, bundle: bundle.url, adapters: adapters, tokenizer: tokenizer)
        }
    }

    /// Saves a preference of the person.
    ///
    /// Without `corrected`, the answer of `side` is preferred to the other answer. With `corrected`, the corrected text is preferred to the answer of
    /// `side`.
    public func choose(_ side: SideBySideChat.Side, of turn: SideBySideChat.Turn.ID, corrected: String? = nil) async {
        await attempt { try choices.add(chat.choice(side, of: turn, corrected: corrected)) }
    }

    /// Runs `body`, which prepares data and then begins work with `bundle`. Other work cannot begin meanwhile.
    func prepare(_ bundle: StoredBundle, _ body: () async throws -> Void) async {
        beginUsing(bundle.id)
        isPreparing = true
        defer { isPreparing = false }
        await attempt(body)
    }

    func beginUsing(_ bundle: StoredBundle.ID) {
        lastUsed = bundle
        examples.stop()
        preview.freeTokenizer()
    }

    func attempt(_ body: () async throws -> Void) async {
        do {
            try await body()
        } catch {
            problem = error.plainSentence
        }
    }
}
