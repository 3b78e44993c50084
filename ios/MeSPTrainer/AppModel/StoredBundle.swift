import Foundation
import MeSPBundle
import MeSPCore
import MeSPSentences

/// A bundle on the device.
public struct StoredBundle: Identifiable, Sendable {
    public let url: URL
    /// Whether the bundle came with the app.
    public let isIncluded: Bool
    /// The manifest; nil if the bundle can't be read.
    public let manifest: Manifest?
    /// The reason why the bundle can't be used; nil if it can.
    public let problem: Sentence?

    /// - Parameter gpuRefusal: the reason why no bundle for the GPU can be used here; nil if one can.
    init(url: URL, isIncluded: Bool, gpuRefusal: Sentence?) {
        // devicectl can put a folder into a folder of the same name.
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
    /// The folder's name without its extension. The model's name would be ambiguous, because a model may have a bundle for the CPU and one for the
    /// GPU.
    public var name: String { url.deletingPathExtension().lastPathComponent }

    /// The size of all files, in bytes.
    public var size: Int { manifest?.files.reduce(0) { $0 + $1.size } ?? 0 }

    /// A hint that an export for the GPU would suit a phone better; nil if there is none.
    public var advice: Sentence? {
        manifest?.device == .cpu ? "Runs on the CPU. For the GPU, export it with --device gpu." : nil
    }
}
