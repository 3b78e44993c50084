import Foundation
import MeSP
import MeSPBundle
import MeSPCore
import MeSPSentences

/// How bundles and texts come into the app: from other apps, from files that the person chooses, and from the Hub.
extension AppModel {
    /// Takes what another app hands over: a bundle, or any other file as a text to train on.
    public func open(_ url: URL) async {
        if url.isBundle {
            tab = .bundles
            await importBundle(at: url)
        } else {
            (tab, showsSetup) = (.train, true)
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

    /// Brings a bundle into the app, and chooses it. A model in MLX's format becomes a bundle, after the person has confirmed that.
    public func importBundle(at url: URL) async {
        await attempt {
            let bundle = try await library.importBundle(at: url) { name, size, notices in
                await withCheckedContinuation { importRequest = ImportRequest(name, size, notices, $0) }
            }
            guard let bundle else { return }
            await refresh()
            form.bundleID = bundle
        }
    }

    /// A model that the person has chosen, and the bundle that it would become.
    struct ImportRequest {
        let name: String
        let size: Int
        let notices: [Sentence]
        let answer: CheckedContinuation<Bool, Never>

        init(_ name: String, _ size: Int, _ notices: [Sentence], _ answer: CheckedContinuation<Bool, Never>) {
            (self.name, self.size, self.notices, self.answer) = (name, size, notices, answer)
        }
    }

    /// Whether the question is shown whether to rewrite a model. Setting it changes nothing: `answerImport` does.
    public var asksToImport: Bool {
        get { importRequest != nil }
        set {}
    }

    /// The facts to know before the decision.
    public var importQuestion: [Sentence] {
        guard let importRequest else { return [] }
        return [
            "\(importRequest.name) is rewritten into a bundle of \(importRequest.size.megabytes). The folder that you chose stays as it is."
        ] + importRequest.notices
    }

    /// Answers whether the model is to be rewritten.
    public func answerImport(_ isWanted: Bool) {
        importRequest?.answer.resume(returning: isWanted)
        importRequest = nil
    }

    /// Looks up what is on the Hub.
    public func lookUp() async { await attempt { try await downloads.lookUp() } }

    /// Downloads the bundle or the model that was looked up, and chooses its bundle.
    public func download() async { await addAndSelect { try await downloads.download() } }

    /// Downloads what was looked up over any network: the person has agreed to the cost.
    public func downloadNow() async { await addAndSelect { try await downloads.downloadNow() } }

    /// Resumes the download during which the app was ended, and returns when the download has ended or the caller's task is cancelled. Of a
    /// download in progress it waits for the end.
    public func finishDownload() async {
        let work = Task { await addAndSelect { try await downloads.resume() } }
        repeat { try? await Task.sleep(for: .milliseconds(100)) } while downloads.progress != nil && !Task.isCancelled
        if !Task.isCancelled { await work.value }
    }

    private func addAndSelect(_ add: () async throws -> StoredBundle?) async {
        await attempt {
            guard let bundle = try await add() else { return }
            await refresh()
            form.bundleID = bundle.id
        }
    }
}
