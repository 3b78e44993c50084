import Foundation
import MeSP
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPSentences

extension AppModel {
    public var canStart: Bool { isFree && (try? form.fit.get().fits) == true }

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

    public func startTraining() async {
        guard canStart, let bundle = form.bundle else { return }
        let folder = library.folder.newRun(bundle: bundle.name, method: form.settings.method)
        var settings = form.settingsToStart
        settings.output = folder.path
        var hasBegun = false
        textNotices = []
        await prepare(bundle) {
            let source = try form.source()
            // The system's dialog makes the app inactive, which would pause a run. So the app asks before the run begins.
            await notificationDisplay?.askPermission()
            if let source {
                settings.data = try await tokenize(source, for: bundle, into: folder).path
            }
            if let general = form.generalText {
                settings.general = try await tokenize(
                    general, for: bundle, into: folder, named: TextData.generalName,
                    length: TextData.generalLength
                ).path
                settings.maxForgetting = TrainingForm.mostForgetting
            }
            try settings.countSteps()
            controller.start(settings)
            hasBegun = true
            showsSetup = false
        }
        if !hasBegun { try? FileManager.default.removeItem(at: folder) }
        await refresh()
    }

    /// Tokenizes the text, except the bundle's own, and takes part in the federation until the person leaves it.
    ///
    /// Call this only after the person has agreed to `Federation.agreement`.
    public func joinFederation() async {
        guard isFree, let bundle = form.bundle else { return }
        await prepare(bundle) {
            let folder = try library.folder.makeFederationFolder()
            var text: URL?
            if let source = try form.source() { text = try await tokenize(source, for: bundle, into: folder) }
            try await federation.join(with: bundle, data: text, folder: folder)
        }
        await refresh()
    }

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
}
