import Foundation
import MeSPCore
import Observation

/// What a person fills in for the next run: a bundle, a text, and the settings.
@MainActor @Observable public final class TrainingForm {
    /// Where the text to train on comes from.
    public enum TextKind: Sendable, CaseIterable { case bundle, file, pasted }

    /// The bundle to train.
    public private(set) var bundle: StoredBundle?
    public var bundleID: StoredBundle.ID? {
        get { bundle?.id }
        set { select(library.bundles.first { $0.id == newValue }) }
    }
    /// The settings. The bundle, the output and the text are filled in when the run starts. The optimizer and the learning rate follow
    /// the bundle, the method and each other, as long as nobody has chosen a rate.
    public var settings = RunSettings(bundle: "", output: "") { didSet { followChoice(from: oldValue) } }
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

    /// Of the bundle that was chosen last.
    @ObservationIgnored private var architecture: Architecture?
    @ObservationIgnored private let library: Library
    @ObservationIgnored private let phone: any Phone

    init(library: Library, phone: any Phone) {
        (self.library, self.phone) = (library, phone)
    }

    /// Chooses the bundle to train, with the nearest settings that it has traces for.
    public func select(_ bundle: StoredBundle?) {
        self.bundle = bundle
        guard let manifest = bundle?.manifest else { return }
        if let architecture {
            if settings.learningRate == settings.defaultLearningRate(for: architecture) {
                settings.learningRate = settings.defaultLearningRate(for: manifest.architecture)
            }
        } else {
            settings.useDefaultUpdate(for: manifest.architecture)
        }
        architecture = manifest.architecture
        if !manifest.seqLens.contains(settings.seqLen) {
            settings.seqLen = manifest.seqLens.filter { $0 <= settings.seqLen }.max() ?? manifest.seqLens.min() ?? 1
        }
        if !manifest.ranks.contains(settings.rank) { settings.rank = manifest.ranks.first ?? 1 }
    }

    private func followChoice(from old: RunSettings) {
        guard let architecture, settings.learningRate == old.learningRate,
            old.learningRate == old.defaultLearningRate(for: architecture)
        else { return }
        if settings.method != old.method {
            settings.useDefaultUpdate(for: architecture)
        } else if settings.optimizer != old.optimizer {
            settings.learningRate = settings.defaultLearningRate(for: architecture)
        }
    }

    /// Chooses a bundle where there is none, or the one that was is no longer there: one for the GPU, which is faster.
    func refresh() {
        let usable = library.usableBundles
        let known = usable.first { $0.id == bundle?.id }
        if known == nil { select(usable.first { $0.manifest?.device == "gpu" } ?? usable.first) }
    }

    /// The predicted peak and whether it fits now, or why there can be no such run.
    public var fit: Result<DeviceFit, MeSPError> {
        guard let manifest = bundle?.manifest else {
            return .failure(MeSPError("Bring in a bundle first, by AirDrop, the Files app or tools/push.py."))
        }
        do {
            return .success(try DeviceFit(settings, manifest, available: phone.availableMemory))
        } catch {
            return .failure(MeSPError(error.localizedDescription))
        }
    }

    /// The text to tokenize; nil where the bundle's is wanted.
    ///
    /// - Throws: `MeSPError` where no file was chosen.
    func source() throws -> TextData.Source? {
        switch textKind {
        case .bundle: return nil
        case .file:
            guard let file else { throw MeSPError("Choose a text file first.") }
            return .file(file)
        case .pasted: return .text(pasted)
        }
    }
}
