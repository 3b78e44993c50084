import Foundation
import MeSPFiles
import MeSPSentences

package struct LogWriter {
    private let file: FileHandle
    private let url: URL

    package static func url(in folder: URL) -> URL { folder.appendingPathComponent("metrics.jsonl") }

    /// Whether some lines in the first `resumeAt` bytes of a continued log were lost or damaged. Damaged lines were removed.
    let lostLines: Bool
    let isEmpty: Bool

    /// Creates the log in `folder`, which must not contain a log.
    init(folder: URL, resumeAt: UInt64? = nil) throws {
        let url = Self.url(in: folder)
        self.url = url
        guard let resumeAt else {
            do {
                file = try Self.open(url, O_CREAT | O_EXCL)
            } catch let error as MeSPError {
                guard FileManager.default.fileExists(atPath: url.path) else { throw error }
                throw MeSPError("\(folder.path) already holds a run; resume it or choose another output folder.")
            }
            (lostLines, isEmpty) = (false, true)
            return
        }
        let opened = try Self.open(url)
        let end = Int(clamping: resumeAt)
        guard let log = mapped(opened.fileDescriptor) else {
            throw MeSPError("Cannot write \(url.path): \(lastError()).")
        }
        let lines = Self.wholeRecords(log.prefix(end))
        let length = lines.reduce(0) { $0 + $1.count }
        (lostLines, isEmpty) = (length < end, lines.isEmpty)
        guard lostLines else {
            file = opened
            try file.truncate(atOffset: resumeAt)
            return
        }
        try writing(url) { try writeWhole(url) { file in for line in lines { try file.write(contentsOf: line) } } }
        file = try Self.open(url)
    }

    private static func open(_ url: URL, _ flags: Int32 = 0) throws -> FileHandle {
        try writing(url) {
            FileHandle(fileDescriptor: try openRegularFile(url, O_RDWR | O_APPEND | flags), closeOnDealloc: true)
        }
    }

    /// Returns the complete records as lines with line feeds.
    private static func wholeRecords(_ log: Data) -> [Data] {
        var (lines, rest) = ([Data](), log)
        while let lineFeed = rest.firstIndex(of: UInt8(ascii: "\n")) {
            let line = rest[...lineFeed]
            if (try? LogRecord.read(line)) != nil { lines.append(line) }
            rest = rest[(lineFeed + 1)...]
        }
        guard let first = lines.first, case .start? = try? LogRecord.read(first).0 else { return [] }
        return lines
    }

    /// Writes all lines so far to the disk.
    ///
    /// - Returns: the log's length in bytes.
    func synchronize() throws -> UInt64 {
        try writing(url) {
            guard MeSPFiles.synchronize(file.fileDescriptor) == 0 else { throw MeSPError("\(lastError())") }
            return try file.seekToEnd()
        }
    }

    func append(_ line: Data) throws { try writing(url) { try file.write(contentsOf: line) } }
}
