import Foundation
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPDownload
import MeSPFederation
import MeSPSelfCheck
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
    public let screen: Screen
    public let controller: RunController
    public let comparison: Comparison
    public let choices: Choices
    public let benchmark: Benchmark
    public let selfChecker: SelfChecker
    public let evaluation: Evaluation
    public let examples: LearnedExamples
    public let preview: DataPreview
    public let downloads: Downloads
    public let federation: Federation

    /// The parts of the app.
    public enum Place: Sendable { case train, write, runs, bundles, compare }
    /// The part that is shown. Leaving the chat lets go of what the models have read of it.
    public var place = Place.train { didSet { if place != .write { comparison.letGo() } } }
    /// The last problem, in a sentence, until it is set to nil.
    public var problem: Sentence?
    /// Setting it to false is reading it.
    public var hasProblem: Bool {
        get { problem != nil }
        set { if !newValue { problem = nil } }
    }
    /// The part of the text that is tokenized, from 0 to 1; nil while no text is being tokenized.
    public private(set) var tokenized: Double?
    /// Notices on the text of the last run, once it is tokenized: what was left out, added or cut.
    public private(set) var textNotices = [Sentence]()
    /// Whether the form for a new run is shown, and not the run in progress or the last one.
    public var showsSetup = true
    /// The run that the app was ended in, to continue, until the person has decided.
    public var interrupted: StoredRun? {
        guard !controller.isRunning, let run = library.runs.first(where: { !$0.isBenchmark }),
            run.status == .interrupted, run.canResume,
            run.id != leftAlone, library.bundle(of: run) != nil
        else { return nil }
        return run
    }
    /// The run that the person does not want to continue now.
    private var leftAlone: StoredRun.ID?

    @ObservationIgnored private let phone: any Phone
    @ObservationIgnored private let loadTokenizer: @Sendable (URL) async throws -> any TextTokenizer
    /// A run to look at where nothing can be trained.
    @ObservationIgnored private let recording: URL?
    @ObservationIgnored private let board: (any NoticeBoard)?
    @ObservationIgnored private var notices: Notices?
    @ObservationIgnored private var glances: Glances?
    @ObservationIgnored private var background: BackgroundTraining?

    /// - Parameters:
    ///   - display: the screen that is dimmed in the night.
    ///   - scheduler: what gives time in the background; nil where nothing does.
    ///   - board: what shows messages to a person who has left the app.
    ///   - glanceBoard: what shows the run on the lock screen; nil where nothing does.
    ///   - network: the network that the device uses; nil where nobody knows it.
    ///   - refusal: why nothing can be trained here; nil where it can.
    ///   - openDownload: the download of a repository.
    ///   - openNode: the node of a federation for a server's address, its folder, the most bytes of a message and the networks that may be
    ///     used.
    ///   - recording: the folder of a run to look at where nothing can be trained.
    ///   - loadTokenizer: reads the tokenizer in a bundle's folder.
    public init(
        phone: any Phone, folder: DocumentsFolder, display: (any Display)? = nil,
        scheduler: (any BackgroundScheduler)? = nil, board: (any NoticeBoard)? = nil,
        glanceBoard: (any GlanceBoard)? = nil, network: (any NetworkPath)? = nil,
        refusal: Sentence? = MLXSupport.refusal, recording: URL? = nil,
        openDownload: @escaping @Sendable (String) throws -> BundleDownload = { try BundleDownload(repository: $0) },
        openNode: @escaping @Sendable (URL, URL, Int, URLSessionConfiguration) throws -> SuperNode = {
            try SuperNode(server: $0, folder: $1, mostBytes: $2, configuration: $3)
        },
        loadTokenizer: @escaping @Sendable (URL) async throws -> any TextTokenizer
    ) {
        (self.board, self.refusal, self.recording) = (board, refusal, recording)
        (self.phone, self.loadTokenizer) = (phone, loadTokenizer)
        library = Library(folder)
        form = TrainingForm(library: library, phone: phone)
        controller = RunController(phone: phone)
        screen = Screen(phone: phone, controller: controller, display: display)
        comparison = Comparison(phone: phone, folder: folder)
        choices = Choices(folder)
        benchmark = Benchmark(controller: controller)
        selfChecker = SelfChecker(phone: phone)
        evaluation = Evaluation(phone: phone)
        examples = LearnedExamples(phone: phone)
        preview = DataPreview(form: form, choices: choices, loadTokenizer: loadTokenizer)
        downloads = Downloads(folder: folder, phone: phone, network: network, open: openDownload)
        federation = Federation(phone: phone, controller: controller, open: openNode)
        controller.observers.append { [weak self] in self?.runChanged() }
        notices = board.map { Notices(controller: controller, phone: phone, board: $0) }
        glances = glanceBoard.map { Glances(controller: controller, phone: phone, board: $0) }
        background = scheduler.map {
            BackgroundTraining(
                controller: controller, phone: phone, scheduler: $0,
                // A server asks for the runs of a federation.
                isStartedByPerson: { [weak self] in self?.federation.isOn == false },
                resume: { [weak self] in await self?.resumeInBackground($0) ?? false })
        }
    }

    // MARK: - Files

    /// Looks for bundles and runs again.
    public func refresh() async {
        // Also what a process that was ended has left.
        if !library.hasLooked { keepRuns() }
        await attempt {
            try await library.refresh(
                running: controller.isRunning ? controller.settings.map { URL(fileURLWithPath: $0.output) } : nil)
        }
        form.refresh()
        // The system may have started the app while the phone is locked, when choices can't be read. They are read again in front.
        do { try choices.refresh() } catch { if phone.scene == .active { problem = error.plainSentence } }
        if hasEnded, let run = shownRun {
            hasEnded = false
            showExamples(of: run, isAskedFor: false)
        }
    }

    /// Takes what another app hands over: a bundle, or any other file as a text to train on.
    public func open(_ url: URL) async {
        if url.isBundle {
            place = .bundles
            await importBundle(at: url)
        } else {
            (place, showsSetup) = (.train, true)
            await chooseText(at: url)
        }
    }

    /// Copies a text file into the app, as access to it may end, and chooses it as the text to train on.
    public func chooseText(at url: URL) async {
        await attempt {
            _ = try TextFileKind(of: url)
            form.file = try await library.copyText(at: url)
        }
    }

    /// Brings a bundle into the app, and chooses it.
    public func importBundle(at url: URL) async {
        await attempt {
            let bundle = try await library.importBundle(at: url)
            await refresh()
            form.bundleID = bundle
        }
    }

    /// Looks up a bundle on the Hub.
    public func lookUp() async { await attempt { try await downloads.look() } }

    /// Downloads the bundle that was looked up, and chooses it.
    public func download() async { await choose { try await downloads.download() } }

    /// Downloads what was looked up, over any network, as the person has decided.
    public func downloadNow() async { await choose { try await downloads.downloadNow() } }

    /// Goes on with the download that the app was ended in, and returns when it has ended or the caller's task is cancelled. Where it is
    /// in progress already, this only waits.
    public func finishDownload() async {
        let work = Task { await choose { try await downloads.goOn() } }
        repeat { try? await Task.sleep(for: .milliseconds(100)) } while downloads.progress != nil && !Task.isCancelled
        if !Task.isCancelled { await work.value }
    }

    private func choose(_ bring: () async throws -> StoredBundle?) async {
        await attempt {
            guard let bundle = try await bring() else { return }
            await refresh()
            form.bundleID = bundle.id
        }
    }

    /// The item whose deletion is to be confirmed.
    public enum Deletion {
        case bundle(StoredBundle)
        case run(StoredRun)
        case choice(Choice)
        case conversation
    }

    /// The item that is deleted when the person confirms; nil while nothing is asked.
    public private(set) var deletion: Deletion?
    /// Setting it to false is deciding against it.
    public var asksToDelete: Bool {
        get { deletion != nil }
        set { if !newValue { deletion = nil } }
    }

    /// The facts to know before the decision.
    public var deletionQuestion: Sentence {
        switch deletion {
        case .bundle(let bundle):
            let runs = library.runs.filter { !$0.isBenchmark && library.bundle(of: $0)?.id == bundle.id }.count
            let question: Sentence = "Delete \(bundle.name)? It takes \(bundle.size.megabytes)."
            return switch runs {
            case 0: question
            case 1: "\(question). A run needs it to resume or to generate text."
            default: "\(question). \(runs) runs need it to resume or to generate text."
            }
        case .run(let run): return "Delete \(run.name)? Its log and adapters cannot be recovered."
        case .choice: return "Delete this choice? It cannot be recovered."
        case .conversation: return "Begin a new conversation? This one is deleted."
        case nil: return ""
        }
    }

    /// Asks whether to delete something, unless it is in use.
    public func askToDelete(_ wanted: Deletion) {
        switch wanted {
        case .bundle(let bundle) where bundle.id == bundleInUse:
            problem = "\(bundle.name) is in use; delete it when that has ended."
        case .run(let run) where run.status == .running || isWritten(run):
            problem = "\(run.name) is in progress; stop it first."
        default: deletion = wanted
        }
    }

    /// Deletes what the person was asked about.
    public func confirmDeletion() async {
        guard let confirmed = deletion else { return }
        deletion = nil
        askToDelete(confirmed)  // it may be in use by now
        guard deletion != nil else { return }
        deletion = nil
        await attempt {
            switch confirmed {
            case .bundle(let bundle):
                examples.stop()
                comparison.letGo()  // another may get its name
                try library.folder.delete(bundle)
            case .run(let run):
                examples.stop()
                try library.folder.delete(run)
            case .choice(let choice): try choices.remove([choice.id])
            case .conversation: comparison.clear()
            }
        }
        await refresh()
    }

    /// The bundle that is used now.
    private var bundleInUse: StoredBundle.ID? { isBusy ? lastUsed : nil }
    /// The bundle that was used last.
    private var lastUsed: StoredBundle.ID?
    /// Whether a run, a text, a benchmark, a self-check, an evaluation or a federation is in progress or about to begin.
    private var isBusy: Bool {
        isPreparing || controller.isRunning || comparison.writing != nil || benchmark.running != nil
            || selfChecker.isRunning || evaluation.isRunning || federation.isOn
    }
    /// Whether one of them is about to begin: what it needs is read or tokenized.
    public private(set) var isPreparing = false

    private func isWritten(_ run: StoredRun) -> Bool {
        controller.isRunning && controller.settings.map { URL(fileURLWithPath: $0.output).lastPathComponent } == run.id
    }

    // MARK: - Runs

    /// A run needs the memory of a conversation; at its end its files are kept as they are to be, beside the main thread.
    private func runChanged() {
        guard !controller.isRunning else { return comparison.letGo() }
        keepRuns()
        if case .finished = controller.state { hasEnded = true }
    }

    private func keepRuns() {
        let folder = library.folder
        Task { await attempt { try await Task.detached { try folder.keepRuns() }.value } }
    }

    /// Whether a run has ended that the list does not have yet.
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
    public var writingRun: StoredRun? { library.trained.first { $0.id == chosenRun } ?? library.trained.first }
    /// The bundle that writes.
    public var writingBundle: StoredBundle? { writingRun.flatMap(library.bundle(of:)) ?? form.bundle }

    /// Shows where to write with a run's adapters, with a prompt to begin with.
    public func tryOut(_ run: StoredRun) {
        chosenRun = run.id
        if comparison.draft.prompt.isEmpty, let sample = examples.of(run).first {
            (comparison.draft.prompt, comparison.draft.isChat) = (sample.prompt, sample.isMessage)
        }
        place = .write
    }

    /// Whether the device is free for a run, a text, a benchmark, a self-check, an evaluation or a federation.
    public var isFree: Bool { !isBusy && refusal == nil }

    /// Whether a run with the form's settings can begin now.
    public var canStart: Bool { isFree && (try? form.fit.get().fits) == true }

    /// Reads what a run with the form's settings would train first, to look at. It waits for a text that is being typed, and ends with the
    /// caller's task.
    public func lookAtData() async {
        guard isFree else { return }
        await preview.read()
    }

    /// Why a run with the form's settings can't begin now, and what to do; nil where it can, or before it is known.
    public var startProblem: Sentence? {
        guard refusal == nil, library.hasLooked, !isPreparing else { return nil }
        if isBusy { return "The model is in use; wait until that has ended, or stop it." }
        switch form.fit {
        case .failure(let error): return error.sentence
        case .success(let fit):
            guard let available = fit.available, !fit.fits else { return nil }
            return
                "Training takes \(fit.predictedPeak.megabytes), and the phone would give \(available.megabytes): under More, set a limit or choose shorter sequences."
        }
    }

    /// Tokenizes the text, where it is not the bundle's, and begins the run.
    public func start() async {
        guard canStart, let bundle = form.bundle else { return }
        let folder = library.folder.newRun(bundle: bundle.name, method: form.settings.method)
        var settings = form.settingsToStart
        settings.output = folder.path
        var hasBegun = false
        textNotices = []
        await prepare(bundle) {
            let source = try form.source()
            // While the system asks, the app is not in front, and a run would wait.
            await board?.askPermission()
            if let source {
                settings.data = try await tokenize(source, for: bundle, into: folder).path
            }
            if let general = form.generalText {
                settings.general = try await tokenize(
                    general, for: bundle, into: folder, named: TextData.generalName, length: 64
                ).path
                settings.maxForgetting = TrainingForm.mostForgetting
            }
            controller.start(settings)
            hasBegun = true
            showsSetup = false
        }
        if !hasBegun { try? FileManager.default.removeItem(at: folder) }
        await refresh()
    }

    /// Tokenizes the text, where it is not the bundle's, and takes part in the federation until it is left. The person has agreed.
    public func takePart() async {
        guard isFree, let bundle = form.bundle else { return }
        await prepare(bundle) {
            let folder = try library.folder.makeFederationFolder()
            var text: URL?
            if let source = try form.source() { text = try await tokenize(source, for: bundle, into: folder) }
            try await federation.join(with: bundle, data: text, folder: folder)
        }
        await refresh()
    }

    /// - Returns: the folder with the tokens.
    private func tokenize(
        _ source: TextData.Source, for bundle: StoredBundle, into run: URL, named name: String = TextData.folderName,
        length: Int? = nil
    ) async throws -> URL {
        tokenized = 0
        defer { tokenized = nil }
        let data = TextData(
            tokenizer: try await loadTokenizer(bundle.url), length: length ?? form.settings.seqLen,
            answersOnly: form.answersOnly)
        let folder = run.appendingPathComponent(name)
        let (progress, sender) = AsyncStream.makeStream(of: Double.self, bufferingPolicy: .bufferingNewest(1))
        let work = Task.detached {
            defer { sender.finish() }
            return try data.write(source, to: folder) { sender.yield($0) }.sentences
        }
        for await part in progress { tokenized = part }
        let notices = try await work.value
        if name == TextData.folderName { textNotices = notices }
        return folder
    }

    /// Goes on with a run from its last saved state.
    public func resume(_ run: StoredRun) async {
        guard isFree else { return }
        await attempt {
            let settings = try library.folder.settingsToResume(run)
            use(URL(fileURLWithPath: settings.bundle).lastPathComponent)
            controller.start(settings)
            (place, showsSetup) = (.train, false)
        }
        await refresh()
    }

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

    /// Goes on with the run that the app was ended in, or leaves it in the list.
    public func decide(_ run: StoredRun, goOn: Bool) async {
        if goOn { await resume(run) } else { leftAlone = run.id }
    }

    /// - Returns: whether there is a run to continue in such a time.
    private func resumeInBackground(_ grant: BackgroundGrant) async -> Bool {
        await refresh()
        guard let run = interrupted, run.log?.start?.device == .cpu || grant == .continuedOnGPU else { return false }
        await resume(run)
        return controller.isRunning
    }

    /// Measures the three methods with the form's length and rank.
    public func compareMethods(steps: Int) async {
        guard isFree, let bundle = form.bundle else { return }
        use(bundle.id)
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
        use(bundle.id)
        comparison.letGo()
        selfChecker.start(
            .init(bundle: bundle.url.path), file: library.folder.newSelfCheck(bundle: bundle.name))
    }

    /// Does what the app was started for: `--self-check`, perhaps with the name of a bundle behind it, begins a self-check.
    public func begin(arguments: [String]) {
        guard let place = arguments.firstIndex(of: "--self-check") else { return }
        if place + 1 < arguments.count {
            let name = arguments[place + 1]
            guard let bundle = library.usableBundles.first(where: { $0.id == name }) else {
                problem = "There is no usable bundle \(name)."
                return
            }
            form.select(bundle)
        }
        checkDevice()
    }

    /// Whether the screen is to stay on.
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

    /// Lets both models write, with the adapters of `run`.
    public func write(_ request: Comparison.Request, with run: StoredRun?) async {
        guard isFree, let bundle = run.flatMap(library.bundle(of:)) ?? form.bundle else { return }
        await prepare(bundle) {
            let tokenizer = try await loadTokenizer(bundle.url)
            comparison.start(request, bundle: bundle.url, adapters: run?.adapters, tokenizer: tokenizer)
        }
    }

    /// Keeps that the person likes one answer of a turn better than the other, or better than it what they wrote in its place.
    public func choose(_ side: Comparison.Side, of turn: Comparison.Turn.ID, corrected: String? = nil) async {
        await attempt { try choices.keep(comparison.choice(side, of: turn, corrected: corrected)) }
    }

    /// Begins something with `bundle`: the device and the bundle are taken while `body` reads and tokenizes what that needs.
    private func prepare(_ bundle: StoredBundle, _ body: () async throws -> Void) async {
        use(bundle.id)
        isPreparing = true
        defer { isPreparing = false }
        await attempt(body)
    }

    /// Begins to use a bundle. The examples of a run leave the device to what the person wants.
    private func use(_ bundle: StoredBundle.ID) {
        lastUsed = bundle
        examples.stop()
        preview.letGo()
    }

    private func attempt(_ body: () async throws -> Void) async {
        do {
            try await body()
        } catch {
            problem = error.plainSentence
        }
    }
}
