import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

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
        package var version: String
        package var mlxVersion: String
        package var device: Backend
        package var host: String
        package var model: Model
        package var settings: RunSettings
        package var battery: Battery?
        package var thermalState: String?

        package struct Model: Codable, Sendable {
            package var name: String
            package var id: String
            package var layers: Int
            package var weights: String?
        }
    }
    public struct Prediction: Codable, Sendable {
        package var method: GradientMethod
        package var seqLen: Int
        package var rank: Int
        public var predictedPeakBytes: Int
        package var leastPeakBytes: Int
        package var metalBytes: Int?
        package var mappedBytes: Int
        package var readWeightBytes: Int?
        /// Whether the run calls the bundle's block functions; otherwise formulas compute all passes.
        package var callsFunctions: Bool?
        package var steps: Int?
        package var examples: Int?
    }
    public struct Step: Codable, Sendable {
        public var step: Int
        public var loss: Float
        package var seconds: Double
        package var forwardSeconds: Double
        package var lossSeconds: Double
        package var backwardSeconds: Double
        package var tokens: Int
        package var inputTokens: Int?
        package var gradNorm: Float?
        package var learningRate: Float
        package var footprintBytes: Int
        public var footprintPeakBytes: Int
        package var mlxActiveBytes: Int
        package var mlxPeakBytes: Int
        package var mlxCacheBytes: Int
        package var writtenBytes: Int
        public var thermalState: String
        package var replayed: Int?
        package var margin: Float?
        package var accuracy: Float?
        package var rewardChosen: Float?
        package var rewardRejected: Float?
        package var kl: Float?
        package var reward: Float?
        package var sampledTokens: Int?
        package var samplingSeconds: Double?
    }
    public struct Eval: Codable, Sendable {
        public var step: Int
        public var split: String
        public var loss: Float
        package var tokens: Int
        package var margin: Float?
        package var accuracy: Float?
    }
    public struct Event: Codable, Sendable {
        package var event: String
        package var message: Sentence

        package init(event: String, message: Sentence) { (self.event, self.message) = (event, message) }
    }
    /// The strength of the adapters that was chosen at the end of a run: an additional factor of their outputs, see `chosenStrength`. It is 0 if no
    /// strength within the limit lowered the held-out loss. The losses are in nats per token.
    public struct Strength: Codable, Sendable {
        package var step: Int
        package var strength: Float
        package var lossBefore: Float
        package var lossAfter: Float
        package var generalBefore: Float
        package var generalAfter: Float
        /// KL(base ‖ model) on the general text, in nats per token.
        package var generalKl: Float?
    }
    public struct End: Codable, Sendable {
        package var reason: Reason
        package var step: Int
        package var seconds: Double
        package var footprintPeakBytes: Int
        package var battery: Battery?
        package var thermalState: String?

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

    func line() throws -> Data {
        let encoder = JSONEncoder.snakeCase
        encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
        let (type, fields) = body
        let head = ["type": type, "time": Date.now.formatted(.iso8601)]
        return try encoder.encode(JoinedObject(head, fields)) + Data("\n".utf8)
    }
}

extension LogRecord {
    /// Reads a line of a log, and returns its record and time. The record is nil for a type that this version does not know.
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
