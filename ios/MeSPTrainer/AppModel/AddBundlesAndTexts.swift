import Foundation
import MeSP
import MeSPBundle
import MeSPCore

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

    /// Brings a bundle into the app, and chooses it.
    public func importBundle(at url: URL) async {
        await attempt {
            let bundle = try await library.importBundle(at: url)
            await refresh()
            form.bundleID = bundle
        }
    }

    /// Looks up a bundle on the Hub.
    public func lookUp() async { await attempt { try await downloads.lookUp() } }

    /// Downloads the bundle that was looked up, and chooses it.
    public func download() async { await addAndSelect { try await downloads.download() } }

    /// Downloads the bundle that was looked up over any network: the person has agreed to the cost.
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
