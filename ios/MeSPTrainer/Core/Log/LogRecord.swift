import Foundation
import MeSPBundle
import MeSPFiles

/// One line of `metrics.jsonl`. See `docs/formats.md` for the fields.
public enum LogRecord: Sendable {
    case start(Start)
    case plan(Plan, Prediction)
    case step(Step)
    case eval(Eval)
    case event(Event)
    case strength(Strength)
    case end(End)

    public struct Start: Codable, Sendable {
        public var version: String
        public var mlxVersion: String
        public var device: Backend
        public var host: String
        public var model: Model
        public var settings: RunSettings
        /// nil if there is none, or nobody knows.
        public var battery: Battery?
        public var thermalState: String?

        public struct Model: Codable, Sendable {
            public var name: String
            public var id: String
            public var layers: Int
        }
    }
    /// The run that a plan is for, and its predicted memory.
    public struct Prediction: Codable, Sendable {
        public var method: GradientMethod
        public var seqLen: Int
        public var rank: Int
        public var predictedPeakBytes: Int
        public var leastPeakBytes: Int
        public var metalBytes: Int?
        public var mappedBytes: Int
        public var readWeightBytes: Int?
        public var examples: Int?
    }
    public struct Step: Codable, Sendable {
        public var step: Int
        public var loss: Float
        public var seconds: Double
        public var forwardSeconds: Double
        public var lossSeconds: Double
        public var backwardSeconds: Double
        public var tokens: Int
        public var inputTokens: Int?
        public var gradNorm: Float?
        public var learningRate: Float
        public var footprintBytes: Int
        public var footprintPeakBytes: Int
        public var mlxActiveBytes: Int
        public var mlxPeakBytes: Int
        public var mlxCacheBytes: Int
        public var writtenBytes: Int
        public var thermalState: String
        /// The number of sequences that were replayed; nil where none ever are.
        public var replayed: Int?
        // Of a step on preference data.
        public var margin: Float?
        public var accuracy: Float?
        public var rewardChosen: Float?
        public var rewardRejected: Float?
        public var kl: Float?
        // Of a step on answers that were sampled.
        public var reward: Float?
        public var sampledTokens: Int?
        public var samplingSeconds: Double?
    }
    public struct Eval: Codable, Sendable {
        public var step: Int
        public var split: String
        public var loss: Float
        public var tokens: Int
        // On preference data.
        public var margin: Float?
        public var accuracy: Float?
    }
    public struct Event: Codable, Sendable {
        public var event: String
        public var message: Sentence

        package init(event: String, message: Sentence) { (self.event, self.message) = (event, message) }
    }
    /// The strength that the adapters were given at the end, 0 where none were kept; losses before the run and with them, nats a token.
    public struct Strength: Codable, Sendable {
        public var step: Int
        public var strength: Float
        public var lossBefore: Float
        public var lossAfter: Float
        public var generalBefore: Float
        public var generalAfter: Float
    }
    public struct End: Codable, Sendable {
        public var reason: Reason
        public var step: Int
        public var seconds: Double
        public var footprintPeakBytes: Int
        public var battery: Battery?
        public var thermalState: String?

        public enum Reason: String, Codable, Sendable { case finished, stopped, failed }
    }

    private var body: (type: String, fields: any Encodable) {
        switch self {
        case .start(let fields): ("start", fields)
        case .plan(let plan, let prediction): ("plan", JoinedObject(plan, prediction))
        case .step(let fields): ("step", fields)
        case .eval(let fields): ("eval", fields)
        case .event(let fields): ("event", fields)
        case .strength(let fields): ("strength", fields)
        case .end(let fields): ("end", fields)
        }
    }

    /// The record as one line of JSON with a line feed, stamped with the present time.
    func line() throws -> Data {
        let encoder = JSONEncoder.snakeCase
        encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
        let (type, fields) = body
        let head = ["type": type, "time": Date.now.formatted(.iso8601)]
        return try encoder.encode(JoinedObject(head, fields)) + Data("\n".utf8)
    }
}

extension LogRecord {
    /// A line of a log: the record, nil for a type that this version does not know, and its time.
    package static func read(_ line: Data) throws -> (LogRecord?, Date) {
        struct Head: Decodable {
            let type: String
            let time: Date
        }
        let decoder = JSONDecoder.snakeCase
        decoder.dateDecodingStrategy = .iso8601
        let head = try decoder.decode(Head.self, from: line)
        func fields<T: Decodable>(_: T.Type) throws -> T { try decoder.decode(T.self, from: line) }
        let record: LogRecord? =
            switch head.type {
            case "start": .start(try decoder.decode(Start.self, from: RunSettings.completed(in: line)))
            case "plan": .plan(try fields(Plan.self), try fields(Prediction.self))
            case "step": .step(try fields(Step.self))
            case "eval": .eval(try fields(Eval.self))
            case "event": .event(try fields(Event.self))
            case "strength": .strength(try fields(Strength.self))
            case "end": .end(try fields(End.self))
            default: nil
            }
        return (record, head.time)
    }
}
