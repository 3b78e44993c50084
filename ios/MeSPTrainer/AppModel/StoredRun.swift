import Foundation
import MeSPBundle
import MeSPCore
import MeSPSentences

public struct StoredRun: Identifiable, Sendable {
    public enum Status: Sendable, Equatable {
        case running, finished, stopped, failed
        case interrupted
        case unreadable(Sentence)
    }

    public let url: URL
    public let status: Status
    public let log: LogOutline?
    public let date: Date

    init(url: URL, isRunning: Bool) {
        self.url = url
        let values = try? url.resourceValues(forKeys: [.creationDateKey, .contentModificationDateKey])
        date = values?.creationDate ?? values?.contentModificationDate ?? .distantPast
        do {
            let log = try LogOutline(folder: url)
            self.log = log
            status =
                switch log.end {
                case _ where isRunning: .running
                case .finished: .finished
                case .stopped: .stopped
                case .failed: .failed
                case nil: .interrupted
                }
        } catch {
            log = nil
            status = isRunning ? .running : .unreadable(error.plainSentence)
        }
    }

    public var id: String { url.lastPathComponent }
    public var name: String { id }
    package var isBenchmark: Bool { url.pathExtension == DocumentsFolder.benchmark }

    public var adapters: URL? { existing("adapters") }

    /// Whether the run can continue. An interrupted run without a saved state starts again from the beginning.
    public var canResume: Bool {
        switch status {
        case .running, .finished, .unreadable: false
        case .stopped, .failed: existing("state.safetensors") != nil && log?.start != nil
        case .interrupted: log?.start != nil
        }
    }

    /// Copies the log, the last adapters and the best adapters into `folder`, whose old contents are deleted. Training data is not copied.
    public func export(to folder: URL) throws {
        try explaining {
            try? FileManager.default.removeItem(at: folder)
            try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
            for name in ["metrics.jsonl", "adapters", "best"] {
                if let file = existing(name) {
                    try FileManager.default.copyItem(at: file, to: folder.appendingPathComponent(name))
                }
            }
        } as: {
            "\(self.name) cannot be copied: \($0)."
        }
    }

    private func existing(_ name: String) -> URL? {
        let url = url.appendingPathComponent(name)
        return FileManager.default.fileExists(atPath: url.path) ? url : nil
    }
}
