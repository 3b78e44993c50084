import Foundation
import MeSPBundle
import MeSPCore

/// The most memory that training may take.
///
/// A run chooses its plan by the limit: how much of a matrix it computes at once, what it keeps and what it recomputes. A lower limit makes
/// steps slower, and the losses stay the same but for rounding. ``FineTuner/predictedPeak(_:)`` says what a run would take.
public struct MemoryLimit: Sendable, Equatable {
    let megabytes: Double?

    /// The memory that the system allows the process at the moment when training begins.
    public static let system = MemoryLimit(megabytes: nil)

    /// A peak of `count` · 10⁶ bytes beside what the process has when training begins.
    ///
    /// A run that cannot keep it is refused before it begins, by a ``FineTuningError`` with the least that it needs.
    public static func megabytes(_ count: Double) -> MemoryLimit { MemoryLimit(megabytes: count) }
}

/// The options of a training run. The defaults learn within some hundred steps.
///
/// A value that is out of range is refused when a run begins, by a ``FineTuningError`` with the option's name.
public struct TrainingOptions: Sendable, Equatable {
    /// The number of updates of the adapters, at least 1.
    public var steps: Int
    /// The memory that a step may take. A limit that cannot be kept is refused before training begins.
    public var memory: MemoryLimit
    /// The tokens of a sequence, one of the lengths that the bundle was exported for. nil: the longest of these up to 256.
    public var sequenceLength: Int?
    /// The rank r of the adapters, one of those that the bundle was exported for. nil: 8, or the bundle's first.
    public var rank: Int?
    /// The learning rate of AdamW with moments in 8 bits. nil: 0.007 / √d of a model of hidden size d, and a tenth of it for choices.
    public var learningRate: Float?
    /// The sequences, or choices, of an update, at least 1. They are computed one after another.
    public var batchSize = 1
    /// Whether only answers are in the loss, of data that has some.
    public var trainsAnswersOnly = true
    /// The number of steps between two measurements of the held-out loss. 0: at the beginning and the end alone.
    public var evaluationInterval = 0
    /// The most that perplexity on a page of English may rise, in percent. The adapters are weakened as much as that takes. nil: no limit.
    public var maxForgetting: Double?
    /// Adapters to go on from: a folder as mlx-lm, mlx-swift-lm or PEFT writes it. nil: B = 0, the model as it is.
    public var initialAdapters: URL?
    /// The probability, below 1, with which a step leaves out each input of an adapter (LoRA dropout).
    public var dropout: Float = 0
    /// Whether to train the length of each output's weights apart from their direction (DoRA). It excludes ``maxForgetting``.
    public var usesDoRA = false
    /// The seed of the order of sequences, of the initial A and of the inputs that are left out.
    public var seed: UInt64 = 0

    /// Makes the options that are mostly set; the others are variables.
    ///
    /// - Parameters:
    ///   - steps: the number of updates of the adapters, at least 1.
    ///   - memory: the memory that a step may take.
    ///   - sequenceLength: the tokens of a sequence, one of the lengths that the bundle was exported for; nil for ``sequenceLength``'s default.
    ///   - rank: the rank r of the adapters, one of those that the bundle was exported for; nil for ``rank``'s default.
    ///   - learningRate: the learning rate of AdamW; nil for ``learningRate``'s default.
    public init(
        steps: Int = 100, memory: MemoryLimit = .system, sequenceLength: Int? = nil, rank: Int? = nil,
        learningRate: Float? = nil
    ) {
        (self.steps, self.memory, self.sequenceLength) = (steps, memory, sequenceLength)
        (self.rank, self.learningRate) = (rank, learningRate)
    }
}

extension TrainingOptions {
    /// The settings of a run of `bundle` with these options, but for the data.
    ///
    /// - Throws: `MeSPError` about an option that is out of range, or that the bundle was not exported for.
    func settings(_ bundle: URL, _ manifest: Manifest, output: URL = URL(fileURLWithPath: "")) throws -> RunSettings {
        try check()
        var settings = RunSettings(bundle: bundle.path, output: output.path)
        settings.takeNearest(in: manifest)
        settings.steps = steps
        settings.memoryLimitMb = memory.megabytes
        settings.seqLen = sequenceLength ?? settings.seqLen
        settings.rank = rank ?? settings.rank
        settings.learningRate = learningRate
        settings.batchSize = batchSize
        settings.evalEvery = evaluationInterval
        settings.adapters = initialAdapters?.path
        settings.dropout = dropout
        settings.dora = usesDoRA
        settings.seed = seed
        try settings.check()
        try manifest.check(settings)
        return settings
    }

    /// Throws a sentence about an option that is out of range, by the name that it has here.
    private func check() throws {
        try require(steps > 0, "steps", "at least 1")
        try require(memory.megabytes.map { $0 > 0 } ?? true, "memory", "above 0 megabytes")
        try require(memory.megabytes.map(\.isFinite) ?? true, "memory", "a finite number")
        try require(learningRate.map { $0 > 0 && $0.isFinite } ?? true, "learningRate", "a finite number above 0")
        try require(batchSize > 0, "batchSize", "at least 1")
        try require(evaluationInterval >= 0, "evaluationInterval", "at least 0")
        try require(maxForgetting.map { $0 > 0 && $0.isFinite } ?? true, "maxForgetting", "a finite number above 0")
        try require(maxForgetting == nil || !usesDoRA, "maxForgetting", "nil with usesDoRA")
    }
}

extension RunSettings {
    /// Takes the length and the rank that `manifest` has, nearest to the present ones.
    package mutating func takeNearest(in manifest: Manifest) {
        if !manifest.seqLens.contains(seqLen) {
            seqLen = manifest.seqLens.filter { $0 <= seqLen }.max() ?? manifest.seqLens.min() ?? 1
        }
        if !manifest.ranks.contains(rank) { rank = manifest.ranks.first ?? 1 }
    }
}
