import Foundation

/// Everything that a run depends on: the app's form and `mesp-engine`'s settings file.
public struct RunSettings: Codable, Sendable, Equatable {
    /// The bundle's folder.
    public var bundle: String
    /// The folder that gets `metrics.jsonl` and `adapters/`.
    public var output: String
    public var method: Method = .mesp
    public var steps: Int = 100
    /// Tokens in a sequence.
    public var seqLen: Int = 256
    public var rank: Int = 8
    public var alpha: Float = 16
    public var learningRate: Float = 1e-4
    public var optimizer: Optimizer = .sgd
    public var seed: UInt64 = 0
    /// ε of MeZO's perturbation.
    public var mezoEpsilon: Float = 1e-3
    /// Held-out sequences of an evaluation; 0 for no evaluation.
    public var valBatches: Int = 25
    /// Steps between evaluations; 0 for one before the first step and one after the last only.
    public var evalEvery: Int = 0
    /// Steps between saves of the adapters; 0 for one at the end only.
    public var saveEvery: Int = 100
    /// The peak footprint to stay below, in megabytes (10⁶ bytes); nil for the default plan.
    public var memoryLimitMb: Double?
    /// Whether the block inputs wait for the backward pass in a file on disk; nil leaves it to the planner.
    public var offload: Bool?
    /// Report the plan and end.
    public var dryRun = false

    public enum Optimizer: String, Codable, Sendable { case sgd }

    public init(bundle: String, output: String) {
        self.bundle = bundle
        self.output = output
    }

    /// Reads a settings file (snake-case JSON, every key present).
    public init(contentsOf url: URL) throws { self = try readSettings(url) }

    /// Throws a sentence about the first setting that is out of range.
    public func check() throws {
        func require(_ condition: Bool, _ name: String, _ wanted: String) throws {
            guard condition else { throw MeSPError("\(name) must be \(wanted).") }
        }
        try require(steps >= 1, "steps", "at least 1")
        try require(seqLen >= 1, "seq_len", "at least 1")
        try require(rank >= 1, "rank", "at least 1")
        try require(alpha.isFinite && alpha > 0, "alpha", "a positive number")
        try require(learningRate.isFinite && learningRate > 0, "learning_rate", "a positive number")
        try require(mezoEpsilon.isFinite && mezoEpsilon > 0, "mezo_epsilon", "a positive number")
        try require(valBatches >= 0, "val_batches", "0 or more")
        try require(evalEvery >= 0, "eval_every", "0 or more")
        try require(saveEvery >= 0, "save_every", "0 or more")
        try require(memoryLimitMb ?? 1 > 0 && memoryLimitMb ?? 1 < 1e9, "memory_limit_mb", "a positive number")
    }
}

func readSettings<Settings: Decodable>(_ url: URL) throws -> Settings {
    guard let json = try? Data(contentsOf: url) else {
        throw MeSPError("Cannot read the settings file \(url.path).")
    }
    let decoder = JSONDecoder()
    decoder.keyDecodingStrategy = .convertFromSnakeCase
    do {
        return try decoder.decode(Settings.self, from: json)
    } catch {
        throw MeSPError("The settings file \(url.path) is not valid: \(error.plainSentence).")
    }
}
