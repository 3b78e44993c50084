import Foundation
import MeSPBundle
import MeSPCore
import MeSPSentences

/// A bundle on the device.
public struct StoredBundle: Identifiable, Sendable {
    public let url: URL
    /// Whether the bundle is part of the app.
    public let isIncluded: Bool
    /// The manifest, or nil if the bundle cannot be read.
    public let manifest: Manifest?
    /// The reason why the bundle cannot be used, or nil.
    public let problem: Sentence?

    /// - Parameter gpuRefusal: the reason why this device cannot use bundles for the GPU, or nil if it can.
    init(url: URL, isIncluded: Bool, gpuRefusal: Sentence?) {
        // devicectl can copy a folder into an existing folder of the same name.
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
    /// The folder's name without its extension. Unlike the model's name, it tells a CPU bundle from a GPU bundle of the same model.
    public var name: String { url.deletingPathExtension().lastPathComponent }

    /// The total size of the files in the manifest, in bytes.
    public var size: Int { manifest?.files.reduce(0) { $0 + $1.size } ?? 0 }

    /// The advice to export a CPU bundle for the GPU, or nil for other bundles.
    public var advice: Sentence? {
        manifest?.device == .cpu ? "Runs on the CPU. For the GPU, export it with --device gpu." : nil
    }
}
