import Foundation
import MeSP
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSentences
import Observation

@MainActor @Observable public final class TrainingForm {
    public enum TextKind: Sendable, CaseIterable { case bundle, file, pasted, choices }

    public private(set) var bundle: StoredBundle?
    public var bundleID: StoredBundle.ID? {
        get { bundle?.id }
        // An identifier that is not of a usable bundle changes nothing.
        set { select(newValue == nil ? nil : library.usableBundles.first { $0.id == newValue } ?? bundle) }
    }
    /// The run's settings. Some of them are set only when the run starts, for example the bundle and the output. If the person chooses no optimizer
    /// or learning rate, the run uses the defaults.
    public var settings = RunSettings(bundle: "", output: "") {
        // Each method has its own default optimizer. A new method therefore resets the chosen optimizer, unless the person also chose a learning
        // rate.
        didSet { if settings.method != oldValue.method, settings.learningRate == nil { settings.optimizer = nil } }
    }
    public var optimizer: RunSettings.OptimizerKind {
        get { settings.effectiveOptimizer }
        set { settings.optimizer = newValue }
    }
    private var defaultRate: Float? { bundle?.manifest.map { settings.defaultLearningRate(for: $0.architecture) } }
    public var hasLimit: Bool {
        get { settings.memoryLimitMb != nil }
        set { settings.memoryLimitMb = newValue ? limit : nil }
    }
    public var clips: Bool {
        get { settings.maxGradNorm != nil }
        set { settings.maxGradNorm = newValue ? 1 : nil }
    }
    public var startingRun: StoredRun.ID?
    public var startingRuns: [StoredRun] {
        library.trained.filter {
            library.bundle(of: $0)?.id == bundle?.id && $0.log?.start?.settings.rank == settings.rank
        }
    }
    public var projections: [String] { bundle?.manifest?.architecture.trainableNames ?? [] }
    /// The short names of the projections trained by default.
    private var standard: [String] { bundle?.manifest?.architecture.projectionNames ?? [] }
    /// Whether a projection is trained. The last trained projection cannot be removed.
    public subscript(trains name: String) -> Bool {
        get { (settings.projections ?? standard).contains(name) }
        set {
            var chosen = Set(settings.projections ?? standard)
            if newValue { chosen.insert(name) } else { chosen.remove(name) }
            guard !chosen.isEmpty else { return }
            let names = projections.filter(chosen.contains)
            settings.projections = names == standard ? nil : names
        }
    }
    private var unreadable = [NumberField: String]()
    /// The typed text, shown while it still equals the setting's value.
    private var typed = [NumberField: String]()
    /// A number of the settings as text. Each keystroke takes effect, because a number pad has no Return key to end editing.
    public subscript(text field: NumberField) -> String {
        get {
            if let text = unreadable[field] { return text }
            if let text = typed[field],
                TypedNumber.value(text, isWhole: field.isWhole).map(Float.init) == self[field].map(Float.init)
            {
                return text
            }
            return self[field].map { TypedNumber.text($0, isWhole: field.isWhole) } ?? ""
        }
        set {
            guard let value = TypedNumber.value(newValue, isWhole: field.isWhole) else {
                unreadable[field] = newValue
                return
            }
            (unreadable[field], typed[field]) = (nil, newValue)
            self[field] = value
        }
    }

    private subscript(field: NumberField) -> Double? {
        get {
            switch field {
            case .steps: Double(settings.steps)
            case .epochs: settings.epochs
            case .learningRate: (settings.learningRate ?? defaultRate).map(Double.init)
            case .limit: limit
            case .batchSize: Double(settings.batchSize)
            case .accumulation: Double(settings.gradAccumulationSteps)
            case .clipping: Double(settings.maxGradNorm ?? 1)
            case .warmup: Double(settings.warmup)
            }
        }
        set {
            guard let newValue else { return }
            switch field {
            case .steps: settings.steps = Int(whole: newValue)
            case .epochs: settings.epochs = newValue
            case .learningRate: settings.learningRate = Float(newValue) == defaultRate ? nil : Float(newValue)
            case .limit: limit = newValue
            case .batchSize: settings.batchSize = Int(whole: newValue)
            case .accumulation: settings.gradAccumulationSteps = Int(whole: newValue)
            case .clipping: settings.maxGradNorm = Float(newValue)
            case .warmup: settings.warmup = Int(whole: newValue)
            }
        }
    }
    /// Whether the run's length is given as passes over the data.
    public var countsEpochs: Bool {
        get { settings.epochs != nil }
        set { (settings.epochs, unreadable[.epochs]) = (newValue ? 3 : nil, nil) }
    }
    public var limit = 100.0 { didSet { if hasLimit { settings.memoryLimitMb = limit } } }
    public var textKind = TextKind.bundle { didSet { settings.objective = textKind == .choices ? .dpo : nil } }
    public var file: URL? { didSet { if file != nil { textKind = .file } } }
    public var pasted = ""
    public var answersOnly = true
    /// Whether the run limits forgetting by weakening or dropping the adapters if necessary.
    public var keepsKnowledge = true
    /// The allowed rise of the perplexity on a general text, in percent.
    static let mostForgetting = 3.0

    @ObservationIgnored private let library: Library
    @ObservationIgnored private let monitor: any DeviceMonitor

    init(library: Library, monitor: any DeviceMonitor) {
        (self.library, self.monitor) = (library, monitor)
    }

    public func select(_ bundle: StoredBundle?) {
        self.bundle = bundle
        guard let manifest = bundle?.manifest else { return }
        settings.takeNearest(in: manifest)
        settings.projections = settings.projections.flatMap { chosen in
            let known = projections.filter { chosen.contains($0) }
            return known.isEmpty || known == standard ? nil : known
        }
    }

    func refresh() {
        let usable = library.usableBundles
        let known = usable.first { $0.id == bundle?.id }
        if known == nil { select(usable.first) }
    }

    public var fit: Result<MemoryFit, MeSPError> {
        guard let manifest = bundle?.manifest else {
            return .failure(
                MeSPError("Add a model first, under Models: from the Hugging Face Hub, the Files app or by AirDrop."))
        }
        if let (field, text) = unreadable.min(by: { $0.key.rawValue < $1.key.rawValue }) {
            let typed: Sentence = text.isEmpty ? "nothing" : "\(text)"
            return .failure(MeSPError("\(field.name): \(typed) is not a valid number."))
        }
        // 0 steps are valid for the engine, which then only evaluates.
        guard settings.steps > 0 else { return .failure(MeSPError("Steps must be at least 1.")) }
        guard settings.epochs ?? 1 > 0 else { return .failure(MeSPError("Epochs must be above 0.")) }
        do {
            return .success(try MemoryFit(settings, manifest, available: monitor.availableMemory))
        } catch {
            return .failure(MeSPError(error.plainSentence))
        }
    }

    var settingsToStart: RunSettings {
        var settings = settings
        settings.bundle = bundle?.url.path ?? ""
        settings.adapters = startingRuns.first { $0.id == startingRun }?.adapters?.path
        settings.resume = false
        return settings
    }

    var generalText: TextData.Source? {
        guard keepsKnowledge, settings.objective == nil, settings.valBatches > 0, let bundle,
            textKind != .bundle || bundle.manifest?.data?["valid"].map({ holdsSequence($0) }) == true,
            FileManager.default.fileExists(atPath: bundle.url.appendingPathComponent("tokenizer.json").path)
        else { return nil }
        return TextData.generalText
    }

    private func holdsSequence(_ tokens: Manifest.Tokens) -> Bool {
        tokens.examples.map { $0.count > 0 } ?? (tokens.tokens > settings.seqLen)
    }

    public var lesson: Sentence? {
        guard let bundle else { return nil }
        switch textKind {
        // Bundles that are part of the app contain Python's reference manual.
        case .bundle where bundle.isIncluded:
            return "A small demo model learns to write like the reference manual of the Python language."
        case .bundle: return "\(bundle.name) learns the text in its bundle."
        case .file:
            guard let file else { return "Choose a text file that \(bundle.name) is to learn, under More." }
            return (try? TextFileKind(of: file)) == .text
                ? "\(bundle.name) learns to write like \(file.lastPathComponent)."
                : "\(bundle.name) learns the records of \(file.lastPathComponent)."
        case .pasted: return "\(bundle.name) learns to write like the text that you paste under More."
        case .choices: return "\(bundle.name) learns which answers you like, from your choices under Try It."
        }
    }

    func source() throws -> TextData.Source? {
        switch textKind {
        case .bundle: return nil
        case .file:
            guard let file else { throw MeSPError("Choose a text file first.") }
            return .file(file)
        case .pasted: return .text(pasted)
        case .choices: return .choices(try library.folder.choices.all())
        }
    }
}
