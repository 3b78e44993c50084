import Foundation
import MLX

/// One line of `metrics.jsonl`. See `docs/architecture.md` for the fields.
public enum Record: Sendable {
    case start(Start)
    case plan(Plan)
    case step(Step)
    case eval(Eval)
    case event(Event)
    case end(End)

    public struct Start: Codable, Sendable {
        public var version: String
        public var mlxVersion: String
        public var device: String
        public var host: String
        public var model: Model
        public var settings: RunSettings

        public struct Model: Codable, Sendable {
            public var name: String
            public var id: String
            public var layers: Int
        }
    }
    public struct Plan: Codable, Sendable {
        public var method: Method
        public var seqLen: Int
        public var rank: Int
        public var tileBytes: Int
        public var keptBlocks: Int
        public var offload: RunSettings.Offload
        public var predictedPeakBytes: Int
        public var leastPeakBytes: Int
        public var mappedBytes: Int
    }
    public struct Step: Codable, Sendable {
        public var step: Int
        public var loss: Float
        public var seconds: Double
        public var forwardSeconds: Double
        public var lossSeconds: Double
        public var backwardSeconds: Double
        public var tokens: Int
        public var gradNorm: Float?
        public var learningRate: Float
        public var footprintBytes: Int
        public var footprintPeakBytes: Int
        public var mlxActiveBytes: Int
        public var mlxPeakBytes: Int
        public var mlxCacheBytes: Int
        public var writtenBytes: Int
        public var thermalState: String
    }
    public struct Eval: Codable, Sendable {
        public var step: Int
        public var split: String
        public var loss: Float
        public var tokens: Int
    }
    public struct Event: Codable, Sendable {
        public var event: String
        public var message: String
    }
    public struct End: Codable, Sendable {
        public var reason: Reason
        public var step: Int
        public var seconds: Double
        public var footprintPeakBytes: Int

        public enum Reason: String, Codable, Sendable { case finished, stopped, failed }
    }

    private var body: (type: String, fields: any Encodable) {
        switch self {
        case .start(let fields): ("start", fields)
        case .plan(let fields): ("plan", fields)
        case .step(let fields): ("step", fields)
        case .eval(let fields): ("eval", fields)
        case .event(let fields): ("event", fields)
        case .end(let fields): ("end", fields)
        }
    }

    /// The record as one line of JSON with a line feed, stamped with the present time.
    func line() throws -> Data {
        struct Line: Encodable {
            let type: String
            let time: String
            let fields: any Encodable

            func encode(to encoder: any Encoder) throws {
                var container = encoder.container(keyedBy: Key.self)
                try container.encode(type, forKey: .type)
                try container.encode(time, forKey: .time)
                try fields.encode(to: encoder)
            }
            enum Key: String, CodingKey { case type, time }
        }
        let encoder = JSONEncoder()
        encoder.keyEncodingStrategy = .convertToSnakeCase
        encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
        let (type, fields) = body
        return try encoder.encode(Line(type: type, time: Date.now.formatted(.iso8601), fields: fields))
            + Data("\n".utf8)
    }
}

/// `metrics.jsonl` in a run's output folder: a line a record, handed to the system at once.
struct MetricLog {
    private let file: FileHandle
    private let url: URL

    static func url(in folder: URL) -> URL { folder.appendingPathComponent("metrics.jsonl") }

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
        if let resumeAt {
            var lineFeed = UInt8(ascii: "\n")
            let atLineEnd = resumeAt == 0 || pread(descriptor, &lineFeed, 1, off_t(clamping: resumeAt) - 1) == 1
            guard atLineEnd, lineFeed == UInt8(ascii: "\n") else {
                throw MeSPError(
                    "\(url.path) is not as it was when the state was saved; start the run again in another folder.")
            }
            try file.truncate(atOffset: resumeAt)
        }
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
