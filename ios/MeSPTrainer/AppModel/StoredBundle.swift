import Foundation
import MeSPBundle
import MeSPCore
import MeSPSentences

public struct StoredBundle: Identifiable, Sendable {
    public let url: URL
    public let isIncluded: Bool
    public let manifest: Manifest?
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
    public var name: String { url.deletingPathExtension().lastPathComponent }

    public var size: Int { manifest?.files.reduce(0) { $0 + $1.size } ?? 0 }
}
