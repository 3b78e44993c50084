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

/// The app's state and actions: its views only lay them out.
@MainActor @Observable public final class AppModel {
    /// Why the app can't train here; nil where it can.
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
    /// The tab that is shown. Leaving the chat frees what the models keep of its text.
    public var tab = Tab.train { didSet { if tab != .tryIt { chat.freeCaches() } } }
    /// The last problem, in a sentence, until it is set to nil.
    public var problem: Sentence?
    /// Whether there is a problem to show. Setting it to false removes the problem.
    public var hasProblem: Bool {
        get { problem != nil }
        set { if !newValue { problem = nil } }
    }
    /// The item that is deleted when the person confirms; nil while nothing is asked.
    package internal(set) var deletion: Deletion?
    /// The model that is rewritten when the person confirms; nil while nothing is asked.
    var importRequest: ImportRequest?
    /// The part of the text that is tokenized, from 0 to 1; nil while no text is being tokenized.
    public internal(set) var tokenized: Double?
    /// Notices on the text of the last run, once it is tokenized: what was left out, added or cut.
    public internal(set) var textNotices = [Sentence]()
    /// Whether the form for a new run is shown, and not the run in progress or the last one.
    public var showsSetup = true
    /// The run that the person does not want to continue now.
    var declinedRun: StoredRun.ID?

    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored let loadTokenizer: @Sendable (URL) async throws -> any TextTokenizer
    /// A run to look at where nothing can be trained.
    @ObservationIgnored let recording: URL?
    @ObservationIgnored let notificationDisplay: (any NotificationDisplay)?
    @ObservationIgnored private var runNotifications: RunNotifications?
    @ObservationIgnored private var activityUpdates: LiveActivityUpdates?
    @ObservationIgnored private var background: BackgroundTraining?

    /// - Parameters:
    ///   - display: the screen that is dimmed in the night.
    ///   - scheduler: what gives time in the background; nil where nothing does.
    ///   - notificationDisplay: what shows messages to a person who has left the app.
    ///   - activityDisplay: what shows the run on the lock screen; nil where nothing does.
    ///   - network: the network that the device uses; nil where it is not known.
    ///   - refusal: why nothing can be trained here; nil where it can.
    ///   - openDownload: the download of a repository.
    ///   - recording: the folder of a run to look at where nothing can be trained.
    ///   - loadTokenizer: reads the tokenizer in a bundle's folder.
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
        (self.monitor, self.loadTokenizer) = (monitor, loadTokenizer)
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
        preview = DataPreview(form: form, choices: choices, loadTokenizer: loadTokenizer)
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
                // A server asks for the runs of a federation.
                isStartedByPerson: { [weak self] in self?.federation.isOn == false },
                resume: { [weak self] in await self?.resumeInBackground($0) ?? false })
        }
    }

    /// Looks for bundles and runs again.
    public func refresh() async {
        // A process that was ended has left files without them, and parts of imports.
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
        // The system may have started the app while the phone is locked, when choices can't be read. They are read again in front.
        do { try choices.refresh() } catch { if monitor.scene == .active { problem = error.plainSentence } }
        if hasEnded, let run = shownRun {
            hasEnded = false
            showExamples(of: run, isAskedFor: false)
        }
    }

    // MARK: - Whether the model is in use

    /// The bundle that is used now.
    var bundleInUse: StoredBundle.ID? { isBusy ? lastUsed : nil }
    /// The bundle that was used last.
    private var lastUsed: StoredBundle.ID?
    /// Whether a run, a text, a benchmark, a self-check, an evaluation or a federation is in progress or about to begin.
    var isBusy: Bool {
        isPreparing || controller.isRunning || chat.writing != nil || benchmark.running != nil
            || selfChecker.isRunning || evaluation.isRunning || federation.isOn
    }
    /// Whether one of them is about to begin: what it needs is read or tokenized.
    public private(set) var isPreparing = false

    // MARK: - Runs

    /// Frees the conversation's memory for a run. At a run's end, gives its files their storage policies.
    private func runChanged() {
        guard !controller.isRunning else { return chat.freeCaches() }
        applyStoragePolicies()
        if case .finished = controller.state { hasEnded = true }
    }

    private func applyStoragePolicies() {
        let folder = library.folder
        Task { await attempt { try await Task.detached { try folder.applyPoliciesToRuns() }.value } }
    }

    /// Whether a run has ended that the list does not show yet.
    private var hasEnded = false

    /// The progress of the current or last run; nil before the first.
    public var progress: RunProgress? {
        controller.settings.map { RunProgress(controller.log, steps: $0.steps) }
    }

    /// The last run, as the list has it, once it has ended.
    public var shownRun: StoredRun? {
        guard !controller.isRunning, let output = controller.settings?.output else { return nil }
        let id = URL(fileURLWithPath: output).lastPathComponent
        // An earlier look at the files may have found it in progress.
        return library.runs.first { $0.id == id && !$0.isBenchmark && $0.status != .running }
    }

    /// Whether there are examples of a run, or they can be written.
    public func canShowExamples(of run: StoredRun) -> Bool {
        run.adapters != nil && library.bundle(of: run) != nil && (run.log?.lastStep ?? 0) > 0
    }

    /// Writes two examples of what a run has learned, unless something else needs the model.
    ///
    /// - Parameter isAskedFor: whether a person waits for them.
    public func showExamples(of run: StoredRun, isAskedFor: Bool = true) {
        guard isFree, canShowExamples(of: run), let bundle = library.bundle(of: run) else { return }
        examples.start(run, bundle: bundle.url, isAskedFor: isAskedFor, loadTokenizer: loadTokenizer)
    }

    /// The run that the person wants to write with; nil for the latest.
    public var chosenRun: StoredRun.ID?
    /// The run whose adapters write; nil if there is none yet.
    package var writingRun: StoredRun? { library.trained.first { $0.id == chosenRun } ?? library.trained.first }
    /// The bundle that writes.
    public var writingBundle: StoredBundle? { writingRun.flatMap(library.bundle(of:)) ?? form.bundle }
    /// The runs that can write together with `writingRun`: the others of its model.
    public var secondRuns: [StoredRun] {
        guard let first = writingRun else { return [] }
        return library.trained.filter { $0.id != first.id && library.bundle(of: $0)?.id == writingBundle?.id }
    }
    /// The run that writes together with `writingRun`; nil for none. A run that is not one of `secondRuns` counts as none.
    public var secondRun: StoredRun.ID? {
        get { secondRuns.first { $0.id == chosenSecondRun }?.id }
        set { chosenSecondRun = newValue }
    }
    private var chosenSecondRun: StoredRun.ID?
    /// The one or two runs whose adapters write.
    public var writingRuns: [StoredRun] {
        let second = secondRun
        return [writingRun].compactMap { $0 } + secondRuns.filter { $0.id == second }
    }
    /// The strengths of the adapters of the first run and of the second, from 0 to 1.
    public var strengths: [Float] = [1, 1]

    /// Shows the tab *Try* with a run's adapters chosen alone and in full strength, and one of its examples as the prompt.
    public func openChat(with run: StoredRun) {
        (chosenRun, chosenSecondRun, strengths) = (run.id, nil, [1, 1])
        if chat.draft.prompt.isEmpty, let sample = examples.of(run).first {
            (chat.draft.prompt, chat.draft.isChat) = (sample.prompt, sample.isMessage)
        }
        tab = .tryIt
    }

    /// Whether the device is free for a run, a text, a benchmark, a self-check, an evaluation or a federation.
    public var isFree: Bool { !isBusy && refusal == nil }

    /// Reads the first record that a run with the form's settings would train, for the form to show. It first waits for a pause in the
    /// typing of a text, and ends with the caller's task.
    public func updatePreview() async {
        guard isFree else { return }
        await preview.read()
    }

    /// Measures the three methods with the form's length and rank.
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

    /// Checks the device with the form's bundle.
    public func checkDevice() {
        guard isFree, let bundle = form.bundle else { return }
        beginUsing(bundle.id)
        chat.freeCaches()
        selfChecker.start(
            .init(bundle: bundle.url.path), file: library.folder.newSelfCheck(bundle: bundle.name))
    }

    /// Begins what the app's arguments ask for: `--self-check`, perhaps with the name of a bundle after it, asks for a self-check.
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

    /// Whether the screen has to stay on.
    public var staysAwake: Bool {
        screen.staysAwake || selfChecker.isRunning || evaluation.isRunning || federation.isOn
    }

    /// Measures the base model, and the one with the adapters of `run`, on the records of a JSONL file.
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

    /// Has the base model, and the one with the adapters of the chosen runs, write a text each.
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

    /// Keeps a choice of the person: that one answer of a turn is better than the other, or that `corrected` is better than this answer.
    public func choose(_ side: SideBySideChat.Side, of turn: SideBySideChat.Turn.ID, corrected: String? = nil) async {
        await attempt { try choices.add(chat.choice(side, of: turn, corrected: corrected)) }
    }

    /// Runs `body`, which reads and tokenizes what work with `bundle` needs and then begins that work. Meanwhile nothing else can begin.
    func prepare(_ bundle: StoredBundle, _ body: () async throws -> Void) async {
        beginUsing(bundle.id)
        isPreparing = true
        defer { isPreparing = false }
        await attempt(body)
    }

    /// Marks a bundle as used, and ends what a person does not wait for: the examples of a run and the preview.
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
