import Foundation
import MeSPCore
import Observation

/// What the app does, over what it shows: its views only lay this out.
@MainActor @Observable public final class AppModel {
    /// Why the app can't train here; nil where it can.
    public static var refusal: String? {
        #if targetEnvironment(simulator)
            "MLX needs a GPU that the iOS simulator doesn't have: run the app on an iPhone or iPad."
        #else
            nil
        #endif
    }

    public let library: Library
    public let form: TrainingForm
    public let screen: Screen
    public let controller: RunController
    public let comparison: Comparison
    public let benchmark: Benchmark
    public let selfChecker: SelfChecker

    /// What went wrong last, in a sentence, until it is set to nil.
    public var problem: String?
    /// Setting it to false is reading it.
    public var hasProblem: Bool {
        get { problem != nil }
        set { if !newValue { problem = nil } }
    }
    /// How much of the text is tokenized, from 0 to 1; nil while none is being tokenized.
    public private(set) var tokenized: Double?
    /// Whether the form for a new run is shown, and not the run in progress or the last one.
    public var showsSetup = true

    @ObservationIgnored private let loadTokenizer: @Sendable (URL) async throws -> any TextTokenizer

    /// - Parameter loadTokenizer: reads the tokenizer in a bundle's folder.
    public init(
        phone: any Phone, folder: DocumentsFolder,
        loadTokenizer: @escaping @Sendable (URL) async throws -> any TextTokenizer
    ) {
        self.loadTokenizer = loadTokenizer
        library = Library(folder)
        form = TrainingForm(library: library, phone: phone)
        controller = RunController(phone: phone)
        screen = Screen(phone: phone, controller: controller)
        comparison = Comparison(phone: phone)
        benchmark = Benchmark(controller: controller)
        selfChecker = SelfChecker(phone: phone)
        refresh()
    }

    // MARK: - Files

    /// Looks for bundles and runs again.
    public func refresh() {
        library.refresh(
            running: controller.isRunning ? controller.settings.map { URL(fileURLWithPath: $0.output) } : nil)
        form.refresh()
    }

    /// Brings a bundle into the app, and chooses it.
    public func importBundle(at url: URL) async {
        await attempt {
            let bundle = try await library.importBundle(at: url)
            refresh()
            form.bundleID = bundle
        }
    }

    public func delete(_ bundle: StoredBundle) async {
        await attempt { try library.folder.delete(bundle) }
        refresh()
    }

    public func delete(_ run: StoredRun) async {
        await attempt { try library.folder.delete(run) }
        refresh()
    }

    // MARK: - Runs

    /// Whether the device is free for a run, a text, a benchmark or a self-check.
    public var isFree: Bool {
        !controller.isRunning && comparison.writing == nil && benchmark.running == nil && tokenized == nil
            && !selfChecker.isRunning && Self.refusal == nil
    }

    /// Whether a run with the form's settings can begin now.
    public var canStart: Bool { isFree && (try? form.fit.get().fits) == true }

    /// Tokenizes the text, where it is not the bundle's, and begins the run.
    public func start() async {
        guard canStart, let bundle = form.bundle else { return }
        let folder = library.folder.newRun(bundle: bundle.name, method: form.settings.method)
        var settings = form.settings
        (settings.bundle, settings.output, settings.resume) = (bundle.url.path, folder.path, false)
        await attempt {
            if let source = try form.source() {
                settings.data = try await tokenize(source, for: bundle, into: folder).path
            }
            controller.start(settings)
            showsSetup = false
        }
        if settings.data == nil, form.textKind != .bundle { try? FileManager.default.removeItem(at: folder) }
        refresh()
    }

    /// - Returns: the folder with the tokens.
    private func tokenize(_ source: TextData.Source, for bundle: StoredBundle, into run: URL) async throws -> URL {
        tokenized = 0
        defer { tokenized = nil }
        let data = TextData(
            tokenizer: try await loadTokenizer(bundle.url), length: form.settings.seqLen, answersOnly: form.answersOnly)
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
            controller.start(try library.folder.settingsToResume(run))
            showsSetup = false
        }
        refresh()
    }

    /// Measures the three methods with the form's length and rank.
    public func compareMethods(steps: Int) async {
        guard isFree, let bundle = form.bundle else { return }
        var settings = RunSettings(bundle: bundle.url.path, output: "")
        (settings.seqLen, settings.rank, settings.steps) = (form.settings.seqLen, form.settings.rank, steps)
        await benchmark.run(settings) { library.folder.newRun(bundle: bundle.name, method: $0) }
        refresh()
    }

    /// Checks the device with the form's bundle.
    public func checkDevice() {
        guard isFree, let bundle = form.bundle else { return }
        selfChecker.start(
            .init(bundle: bundle.url.path), file: library.folder.newSelfCheck(bundle: bundle.name))
    }

    /// Does what the app was started for: `--self-check`, perhaps with the name of a bundle behind it, begins a self-check.
    public func begin(arguments: [String]) {
        guard let place = arguments.firstIndex(of: "--self-check") else { return }
        if place + 1 < arguments.count {
            let name = arguments[place + 1]
            guard let bundle = library.usableBundles.first(where: { $0.id == name }) else {
                problem = "There is no bundle \(name) that can be used."
                return
            }
            form.select(bundle)
        }
        checkDevice()
    }

    /// Whether the screen is to stay on.
    public var staysAwake: Bool { screen.staysAwake || selfChecker.isRunning }

    /// Lets both models write, with the adapters of `run`.
    public func write(_ request: Comparison.Request, with run: StoredRun?) async {
        guard isFree, let bundle = run.flatMap(library.bundle(of:)) ?? form.bundle else { return }
        await attempt {
            let tokenizer = try await loadTokenizer(bundle.url)
            comparison.start(request, bundle: bundle.url, adapters: run?.adapters, tokenizer: tokenizer)
        }
    }

    private func attempt(_ body: () async throws -> Void) async {
        do {
            try await body()
        } catch {
            problem = error.localizedDescription
        }
    }
}
