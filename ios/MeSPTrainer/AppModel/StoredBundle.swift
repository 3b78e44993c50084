import Foundation
import MeSPBundle
import MeSPCore
import MeSPSentences

/// A bundle in the store.
public struct StoredBundle: Identifiable, Sendable {
    public let url: URL
    /// Whether it came with the app.
    public let isIncluded: Bool
    /// nil where the bundle can't be read.
    public let manifest: Manifest?
    /// Why it can't be used.
    public let problem: Sentence?

    /// - Parameter gpuRefusal: why no bundle for the GPU can be used here; nil where one can.
    init(url: URL, isIncluded: Bool, gpuRefusal: Sentence?) {
        // devicectl can put a folder into one of its name.
        let nested = url.appendingPathComponent(url.lastPathComponent)
        let url = FileManager.default.fileExists(atPath: nested.path) ? nested : url
        (self.url, self.isIncluded) = (url, isIncluded)
        do {
            let manifest = try ModelBundle(url: url, checksums: false).manifest
            problem = manifest.device == .gpu ? gpuRefusal : nil
            self.manifest = manifest
        } catch {
            manifest = nil
            problem =
                "\(error.localizedDescription.replacingOccurrences(of: url.path, with: url.lastPathComponent))"
        }
    }

    public var id: String { url.lastPathComponent }
    /// The folder's: one model may be here twice, for the CPU and for the GPU.
    public var name: String { url.deletingPathExtension().lastPathComponent }

    /// The size of all its files, in bytes.
    public var size: Int { manifest?.files.reduce(0) { $0 + $1.size } ?? 0 }

    /// A hint that another export would suit a phone better.
    public var advice: Sentence? {
        manifest?.device == .cpu ? "Runs on the CPU. For the GPU, export it with --device gpu." : nil
    }
}
