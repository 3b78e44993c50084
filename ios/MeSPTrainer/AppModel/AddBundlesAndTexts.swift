import Foundation
import MeSP
import MeSPBundle
import MeSPCore
import MeSPSentences

extension AppModel {
    /// Opens a file from another app: imports a bundle, or chooses any other file as the text to train on.
    public func open(_ url: URL) async {
        if url.isBundle {
            tab = .bundles
            await importBundle(at: url)
        } else {
            (tab, showsSetup) = (.train, true)
            await chooseText(at: url)
        }
    }

    public func chooseText(at url: URL) async {
        await attempt {
            _ = try TextFileKind(of: url)
            form.file = try await library.copyText(at: url)
        }
    }

    /// Imports a bundle and chooses it. For a model in MLX's format, asks the person first, and converts it into a bundle if the person agrees.
    public func importBundle(at url: URL) async {
        await attempt {
            let bundle = try await library.importBundle(at: url) { name, size, notices in
                await withCheckedContinuation {
                    importRequest = ImportRequest(name: name, size: size, notices: notices, answer: $0)
                }
            }
            guard let bundle else { return }
            await refresh()
            form.bundleID = bundle
        }
    }

    struct ImportRequest {
        let name: String
        let size: Int
        let notices: [Sentence]
        let answer: CheckedContinuation<Bool, Never>
    }

    /// Whether the app asks to convert a model. The setter does nothing; call `answerImport` instead.
    public var asksToImport: Bool {
        get { importRequest != nil }
        set {}
    }

    public var importQuestion: [Sentence] {
        guard let importRequest else { return [] }
        return [
            "\(importRequest.name) is rewritten into a bundle of \(importRequest.size.megabytes). The folder that you chose stays as it is."
        ] + importRequest.notices
    }

    public func answerImport(_ isWanted: Bool) {
        importRequest?.answer.resume(returning: isWanted)
        importRequest = nil
    }

    public func lookUp() async { await attempt { try await downloads.lookUp() } }

    public func download() async { await addAndSelect { try await downloads.download() } }

    /// Downloads the repository over any network. Call this only after the person has agreed to the cost.
    public func downloadNow() async { await addAndSelect { try await downloads.downloadNow() } }

    /// Resumes a download that was in progress when the app was terminated. Returns when it has ended or the caller's task is cancelled.
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
