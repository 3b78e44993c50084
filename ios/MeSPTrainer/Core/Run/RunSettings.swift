import Foundation
import MLX
import MeSPBundle
import MeSPFiles

/// Everything that a run depends on: the app's form and `mesp-engine`'s settings file.
///
/// The defaults are the paper's, with which a model learns slowly; ``useDefaultUpdate(for:)`` sets those of `mesp-train`.
public struct RunSettings: Codable, Sendable, Equatable {
    /// The bundle's folder.
    public var bundle: String
    /// A folder of tokens that `TextData` wrote, to train on; nil for the bundle's own text.
    public var data: String?
    /// The folder that gets `metrics.jsonl` and `adapters/`.
    public var output: String
    public var method: GradientMethod = .mesp
    /// Updates of the adapters; 0 for a run that evaluates and saves the adapters it would start from.
    public var steps: Int = 100
    /// Steps that others have taken before this run, as the rounds of a federation: the order of the data and every random number continue
    /// from there.
    public var firstStep: Int = 0
    /// Tokens in a sequence.
    public var seqLen: Int = 256
    public var rank: Int = 8
    public var alpha: Float = 16
    /// Scales the adapters' output by α / √rank instead of α / rank (rank-stabilized LoRA).
    public var rslora = false
    /// The type of the parameters; bfloat16 has stochastic rounding of the updates.
    public var loraDtype: LoRADtype = .float32
    /// The trained linear layers, by short names: `q`, `k`, `v`, `o`, `gate`, `up`, `down`, or where the model computes several
    /// in one, `qkv`, `gate_up`; nil for all. `experts` adds the experts of mixtures.
    public var projections: [String]?
    /// The number of blocks that are trained, the model's last; nil for all.
    public var numLayers: Int?
    /// Trains B alone, and leaves each A as it is (FFA-LoRA, arXiv:2403.12313).
    public var freezeA = false
    /// A folder of adapters to start from, as mlx-lm or PEFT writes it.
    public var adapters: String?

    /// The objective on preference data; nil for the mean loss of the counted targets.
    public var objective: Objective?
    /// β, the scale of an objective's rewards, or IPO's τ; nil for 0.1.
    public var beta: Float?
    /// γ, SimPO's margin; nil for 0.5.
    public var gamma: Float?
    /// The weights of good and bad answers in KTO; nil for 1.
    public var desirableWeight: Float?
    public var undesirableWeight: Float?

    /// The number of answers that are sampled to each prompt, to be rewarded (GRPO, arXiv:2402.03300); nil to train on the data's answers.
    public var groupSize: Int?
    /// The most tokens of a sampled answer.
    public var maxTokens: Int = 128
    /// The tokens that end a sampled answer, and count in its loss.
    public var stop: [Int] = []
    /// Leaves out GRPO's divisions by the deviation of a group's rewards and by an answer's length (Dr. GRPO, arXiv:2503.20783).
    public var drGrpo = false

    public var optimizer: OptimizerKind = .sgd
    public var learningRate: Float = 1e-4
    public var schedule: Schedule = .constant
    /// The steps over which the learning rate rises from 0.
    public var warmup: Int = 0
    /// μ, the momentum of SGD.
    public var momentum: Float = 0
    /// β₁, β₂ and ε of AdamW.
    public var beta1: Float = 0.9
    public var beta2: Float = 0.999
    public var epsilon: Float = 1e-8
    /// λ, the weight decay.
    public var weightDecay: Float = 0
    /// μ of FedProx (arXiv:1812.06127): μ (w − w₀) is added to the gradient, where w₀ are the run's initial adapters; nil for none.
    public var proximalMu: Float?
    /// The norm that the whole gradient is clipped to; nil for no limit.
    public var maxGradNorm: Float?
    /// DP-SGD (arXiv:1607.00133): the norm that each example's gradient is clipped to; nil for no differential privacy.
    public var dpClip: Float?
    /// The standard deviation of the noise on the sum of clipped gradients, as a multiple of `dpClip`.
    public var dpNoise: Float?
    /// Sequences of a batch. With `dpClip` the mean number of examples of a step.
    public var batchSize: Int = 1
    /// Batches of a step, whose loss is the mean over all their targets that count; with an objective the mean of their losses.
    public var gradAccumulationSteps: Int = 1
    /// Whether a step whose loss or gradient is not finite is undone, instead of ending the run.
    public var skipBadSteps = false
    public var seed: UInt64 = 0
    /// ε of MeZO's perturbation.
    public var mezoEpsilon: Float = 1e-3
    /// Held-out sequences of an evaluation; 0 for no evaluation.
    public var valBatches: Int = 25
    /// Steps between evaluations; 0 for one before the first step and one after the last only.
    public var evalEvery: Int = 0
    /// Evaluations without a lower held-out loss after which the run ends; 0 for never.
    public var earlyStopping: Int = 0
    /// Whether to evaluate the test split at the end.
    public var test = false
    /// The share of a run's sequences that are of `replay` instead of the training data, so that less is forgotten; nil for none.
    public var replayShare: Double?
    /// A folder of tokens, as `data` is one: older records, or what the model itself writes.
    public var replay: String?
    /// The most that the perplexity of `general` may rise, in percent: at the end the adapters get the strength that keeps to it, or none
    /// are kept; nil to keep them as they were trained.
    public var maxForgetting: Double?
    /// A folder of tokens, as `data` is one, of a text that the run is not about.
    public var general: String?
    /// Steps between saves of the adapters and of the state to resume from, which are also saved a minute after the start and then every
    /// three; 0 for one at the end only.
    public var saveEvery: Int = 100
    /// Whether to resume from the state in the output folder.
    public var resume = false
    /// The peak footprint to stay below, in megabytes (10⁶ bytes); nil for the default plan.
    public var memoryLimitMb: Double?
    /// The arrays that are kept in a file on disk instead of in memory; nil leaves it to the planner.
    public var offload: Offload?
    /// The order of a step's sequences through the model; nil leaves it to the planner.
    public var order: Order?
    /// Whether to report the plan and end.
    public var dryRun = false

    static let mostSteps = 1_000_000
    /// The most sequences of a step.
    static let maxSequences = 1 << 16
    /// Of the answers to a prompt.
    static let mostGroup = 1 << 10

    public enum OptimizerKind: String, Codable, Sendable, CaseIterable {
        case sgd, adamw
        /// AdamW with its moments in 8 bits.
        case adamw8bit
    }

    public enum Schedule: String, Codable, Sendable, CaseIterable { case constant, linear, cosine }

    public enum Offload: String, Codable, Sendable, CaseIterable {
        case none
        /// The block inputs, from the forward to the backward pass.
        case inputs
        /// Also the adapters' parameters, the optimizer's state and sums of gradients.
        case all
    }

    public enum Order: String, Codable, Sendable, CaseIterable {
        /// Each through all blocks, forward and backward, before the next.
        case sequences
        /// All through each block before the next block, forward and backward, so that its weights are read once a pass.
        case blocks
    }

    public enum LoRADtype: String, Codable, Sendable, CaseIterable {
        case float32, bfloat16

        var dtype: DType { self == .float32 ? .float32 : .bfloat16 }
    }

    /// The factor of the adapters' output.
    package var scale: Float { alpha / (rslora ? Float(rank).squareRoot() : Float(rank)) }

    /// Sequences of a step, or pairs or answers of an objective.
    var sequences: Int { batchSize * gradAccumulationSteps * (groupSize ?? 1) }

    /// Whether the initial adapters are kept: as the reference model's, or for FedProx.
    var keepsStart: Bool { adapters != nil && (objective?.hasReference == true || proximalMu != nil) }

    public init(bundle: String, output: String) {
        self.bundle = bundle
        self.output = output
    }

    // MARK: - Defaults that learn: `mesp/engine/settings.py` has the same, `docs/decisions.md` says why.

    /// Sets the default optimizer and learning rate for the method and the model, which learn in some hundred steps.
    public mutating func useDefaultUpdate(for architecture: Architecture) {
        optimizer = method == .mezo ? .sgd : .adamw8bit
        learningRate = defaultLearningRate(for: architecture)
    }

    /// The default learning rate for the method, the optimizer, the model and the objective, or sampled answers.
    public func defaultLearningRate(for architecture: Architecture) -> Float {
        let rate: Float
        switch (method, optimizer) {
        case (.mezo, _): return 1e-4
        case (_, .adamw), (_, .adamw8bit): rate = 0.007 / Float(architecture.hiddenSize).squareRoot()
        case (_, .sgd): rate = 0.1
        }
        return objective != nil ? rate / 10 : groupSize != nil ? rate / 3 : rate
    }

    /// Reads a settings file: snake-case JSON with `bundle` and `output`; a key that is absent has its default.
    public init(contentsOf url: URL) throws {
        guard let json = try? Data(contentsOf: url) else {
            throw MeSPError("Cannot read the settings file \(url.path).")
        }
        try self.init(
            json: try? JSONSerialization.jsonObject(with: json) as? [String: Any],
            from: "The settings file \(url.path) is")
    }

    /// - Parameter source: the beginning of a sentence, for an error: where the object is from
    package init(json given: [String: Any]?, from source: Sentence) throws {
        do {
            guard let given, given["bundle"] != nil, given["output"] != nil else {
                throw MeSPError("it is not a JSON object with a bundle and an output")
            }
            let json = try JSONSerialization.data(withJSONObject: Self.completed(given))
            self = try JSONDecoder.snakeCase.decode(RunSettings.self, from: json)
        } catch {
            throw MeSPError("\(source) not valid: \(error.plainSentence).")
        }
    }

    /// The settings of a JSON object, with the defaults of missing ones.
    static func completed(_ given: [String: Any]) throws -> [String: Any] {
        let defaults = try JSONEncoder.snakeCase.encode(RunSettings(bundle: "", output: ""))
        let keys = try JSONSerialization.jsonObject(with: defaults) as? [String: Any] ?? [:]
        return keys.merging(given) { $1 }
    }

    /// A JSON object whose `settings` are completed with defaults, so that files of earlier versions can be read.
    static func completed(in json: Data) throws -> Data {
        guard var keys = try JSONSerialization.jsonObject(with: json) as? [String: Any],
            let settings = keys["settings"] as? [String: Any]
        else { return json }
        keys["settings"] = try completed(settings)
        return try JSONSerialization.data(withJSONObject: keys)
    }
}

/// The method that computes gradients.
public enum GradientMethod: String, Codable, Sendable, CaseIterable {
    /// The structured backward pass, written by hand.
    case mesp
    /// The same loop over blocks, with gradients from automatic differentiation.
    case mebp
    /// Zeroth order: two forward passes with a seeded perturbation.
    case mezo

    /// Whether gradients come from a pass backward through the blocks, which reads their inputs.
    var hasBackwardPass: Bool { self != .mezo }

    /// Whether that pass reads intermediates, which a plan may keep.
    var readsIntermediates: Bool { self == .mesp }

    /// Whether a sequence may have several records: a block function, which MeBP differentiates, has no place for them.
    package var takesPacked: Bool { self != .mebp }
}
