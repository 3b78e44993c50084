import Foundation
import MeSPCore
import MeSPFiles
import MeSPSentences

/// The outline of a run, read from the beginning and the end of its log.
public struct LogOutline: Sendable {
    package let start: LogRecord.Start?
    public let lastStep: Int
    /// The loss of the last finished step; nil if the part of the log that was read has no step.
    public let lastLoss: Float?
    package let end: LogRecord.End.Reason?

    private static let piece = 1 << 16

    /// Reads the log in a run's folder. Ignores an incomplete last line.
    package init(folder: URL) throws {
        let url = LogWriter.url(in: folder)
        guard let opened = try? openRegularFile(url, O_RDONLY) else {
            throw MeSPError("\(folder.path) holds no run: there is no metrics.jsonl in it.")
        }
        let file = FileHandle(fileDescriptor: opened, closeOnDealloc: true)
        let newline = UInt8(ascii: "\n")
        let size = try file.seekToEnd()
        try file.seek(toOffset: 0)
        let head = try file.read(upToCount: Self.piece) ?? Data()
        let first = head.prefix { $0 != newline }
        var tail = head
        if size > head.count {
            try file.seek(toOffset: size - UInt64(Self.piece))
            tail = try file.read(upToCount: Self.piece) ?? Data()
            tail = tail.drop { $0 != newline }  // the rest of a line
        }

        do {
            if first.isEmpty || first.endIndex == head.endIndex && (try? LogRecord.read(first)) == nil {
                start = nil  // empty, or one incomplete line
            } else if case .start(let record)? = try LogRecord.read(first).0 {
                start = record
            } else {
                start = nil
            }
        } catch {
            throw MeSPError("Line 1 of \(url.path) is not a log record.")
        }

        var (step, loss, reason) = (Int?.none, Float?.none, LogRecord.End.Reason?.none)
        let lines = tail.split(separator: newline)
        for (index, line) in lines.enumerated().reversed() where loss == nil {
            let record: LogRecord?
            do {
                record = try LogRecord.read(line).0
            } catch {
                if index == lines.count - 1, line.endIndex == tail.endIndex { continue }
                throw MeSPError("The end of \(url.path) is not that of a log.")
            }
            switch record {
            case .step(let record): (step, loss) = (max(step ?? 0, record.step), record.loss)
            case .end(let end):
                step = end.step
                if index == lines.count - 1 { reason = end.reason }
            case .eval(let eval): step = max(step ?? 0, eval.step)
            default: break
            }
        }
        (lastStep, lastLoss, end) = (step ?? 0, loss, reason)
    }
}
