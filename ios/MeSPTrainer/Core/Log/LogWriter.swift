import Foundation

/// `metrics.jsonl` in a run's output folder: a line a record, handed to the system at once.
struct LogWriter {
    private let file: FileHandle
    private let url: URL

    static func url(in folder: URL) -> URL { folder.appendingPathComponent("metrics.jsonl") }

    /// Whether the log was shorter than `resumeAt`, as a power failure can leave it: it goes on after its last whole line then.
    let lostLines: Bool

    /// Starts the log in `folder`, which must not hold a run already; or goes on with the one that is there, after its first `resumeAt`
    /// bytes.
    init(folder: URL, resumeAt: UInt64? = nil) throws {
        url = Self.url(in: folder)
        let flags = resumeAt == nil ? O_CREAT | O_EXCL : 0
        let descriptor = open(url.path, O_RDWR | O_APPEND | O_CLOEXEC | flags, 0o644)
        guard descriptor >= 0 else {
            throw errno == EEXIST
                ? MeSPError("\(folder.path) already holds a run; resume it or choose another output folder.")
                : MeSPError("Cannot write \(url.path): \(String(cString: strerror(errno))).")
        }
        file = FileHandle(fileDescriptor: descriptor, closeOnDealloc: true)
        guard let resumeAt else {
            lostLines = false
            return
        }
        lostLines = try file.seekToEnd() < resumeAt
        if lostLines {
            try file.seek(toOffset: 0)
            let lines = try file.readToEnd() ?? Data()
            let end = lines.lastIndex(of: UInt8(ascii: "\n")).map { $0 + 1 } ?? 0
            try file.truncate(atOffset: UInt64(end))
            return
        }
        var lineFeed = UInt8(ascii: "\n")
        let atLineEnd = resumeAt == 0 || pread(descriptor, &lineFeed, 1, off_t(clamping: resumeAt) - 1) == 1
        guard atLineEnd, lineFeed == UInt8(ascii: "\n") else {
            throw MeSPError(
                "\(url.path) is not as it was when the state was saved; start the run again in another folder.")
        }
        try file.truncate(atOffset: resumeAt)
    }

    /// The log's length in bytes.
    func length() throws -> UInt64 { try file.seekToEnd() }

    func append(_ line: Data) throws {
        do {
            try file.write(contentsOf: line)
        } catch {
            throw MeSPError("Cannot write \(url.path): \(error.plainSentence).")
        }
    }
}
