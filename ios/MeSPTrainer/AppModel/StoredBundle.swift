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

    init(url: URL, isIncluded: Bool) {
        // devicectl can copy a folder into an existing folder of the same name.
        let nested = url.appendingPathComponent(url.lastPathComponent)
        let url = FileManager.default.fileExists(atPath: nested.path) ? nested : url
        (self.url, self.isIncluded) = (url, isIncluded)
        do {
            manifest = try ModelBundle(url: url, checksums: false).manifest
            problem = nil
        } catch {
            manifest = nil
            problem =
                "\(error.localizedDescription.replacingOccurrences(of: url.path, with: url.lastPathComponent))"
        }
    }

    public var id: String { url.lastPathComponent }
    /// The folder's name without its extension.
    public var name: String { url.deletingPathExtension().lastPathComponent }

    /// The total size of the files in the manifest, in bytes.
    public var size: Int { manifest?.files.reduce(0) { $0 + $1.size } ?? 0 }
}
