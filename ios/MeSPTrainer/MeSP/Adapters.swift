import Foundation
import MeSPFiles
import MeSPSentences

/// Trained LoRA adapters in a folder.
///
/// The folder has `adapters.safetensors` and `adapter_config.json`, which mlx-swift-lm and mlx-lm load. The subfolder `peft` has the same adapters in
/// PEFT's format. The matrices are float32.
public struct Adapters: Sendable, Equatable {
    /// The folder. A later run that finishes removes this folder. To keep the adapters, copy them with ``write(to:)``.
    public let url: URL

    /// Names a folder of adapters.
    public init(url: URL) { self.url = url }

    /// Copies the adapters to `folder`. Creates `folder` if it does not exist. Replaces a folder that is empty or has adapters.
    ///
    /// - Throws: ``FineTuningError`` if `folder` has other contents or cannot be written, or if a later run has removed the adapters. Then `folder`
    ///   stays unchanged.
    public func write(to folder: URL) throws {
        let parent = folder.deletingLastPathComponent()
        let (partial, former) = (parent.hidden(".partial"), parent.hidden(".former"))
        let files = FileManager.default
        let isThere = files.fileExists(atPath: folder.path)
        let names = isThere ? (try? files.contentsOfDirectory(atPath: folder.path)) : []
        guard let names, names.isEmpty || names.contains("adapter_config.json") else {
            throw FineTuningError("\(folder.path) is no folder of adapters, and is not replaced; choose another.")
        }
        guard url.hasAdapters else {
            throw FineTuningError(
                "The adapters in \(url.path) are no longer there: a later run has finished; take its adapters.")
        }
        defer { try? files.removeItem(at: partial) }
        do {
            try makeFolder(parent)
            try files.copyItem(at: url, to: partial)
            if isThere { try files.moveItem(at: folder, to: former) }
            do { try files.moveItem(at: partial, to: folder) } catch {
                if isThere { try files.moveItem(at: former, to: folder) }
                throw error
            }
            try? files.removeItem(at: former)
        } catch {
            throw FineTuningError("Cannot write the adapters to \(folder.path): \(error.plainSentence).")
        }
    }
}

extension URL {
    var hasAdapters: Bool {
        ["adapters.safetensors", "adapter_config.json", "peft/adapter_model.safetensors", "peft/adapter_config.json"]
            .allSatisfy { FileManager.default.fileExists(atPath: appendingPathComponent($0).path) }
    }

    fileprivate func hidden(_ name: String) -> URL { appendingPathComponent("\(name)-\(UUID().uuidString)") }
}
