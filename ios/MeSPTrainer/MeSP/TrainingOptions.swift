import Foundation
import MeSPBundle
import MeSPCore

/// A limit of the memory that training may take.
///
/// A run chooses its plan by the limit. The plan says how much of a matrix the run computes at once, which intermediates it keeps and which it
/// recomputes. A lower limit makes steps slower and changes the losses only by rounding. ``FineTuner/predictedPeak(_:)`` predicts the peak of a run.
public struct MemoryLimit: Sendable, Equatable {
    let megabytes: Double?

    /// The memory that the system still allows the process when training begins.
    public static let system = MemoryLimit(megabytes: nil)

    /// Returns a limit of `count` · 10⁶ bytes above the memory that the process has when training begins.
    ///
    /// A run that cannot keep the limit is refused before it begins, with a ``FineTuningError`` that names a limit that suffices.
    public static func megabytes(_ count: Double) -> MemoryLimit { MemoryLimit(megabytes: count) }
}

/// The options of a training run. With the defaults, a model learns within a few hundred steps.
///
/// A value out of range is refused when a run begins, with a ``FineTuningError`` that names the option.
public struct TrainingOptions: Sendable, Equatable {
    /// The number of updates of the adapters, at least 1.
    public var steps: Int
    /// The memory that training may take. A limit that cannot be kept is refused before training begins.
    public var memory: MemoryLimit
    /// The number of tokens in a sequence: a length that the bundle was exported for. nil: the longest of these lengths that is at most 256, or the
    /// shortest length if all are longer.
    public var sequenceLength: Int?
    /// The rank r of the adapters: a rank that the bundle was exported for. nil: 8, or the bundle's first rank if it has no 8.
    public var rank: Int?
    /// The learning rate of AdamW, whose moments have 8 bits. nil: 0.007 / √d for hidden size d, and a tenth of this for choices.
    public var learningRate: Float?
    /// The number of sequences, or choices, in an update, at least 1. A run computes the sequences one after another.
    public var batchSize = 1
    /// Whether the loss covers answers only. It has no effect on plain text, which has no answers.
    public var trainsAnswersOnly = true
    /// The number of steps between two measurements of the held-out loss. 0: measured at the beginning and the end only.
    public var evaluationInterval = 0
    /// The maximum rise of perplexity on a page of English, in percent. The run scales its adapters down until the rise is below this limit. nil: no
    /// limit.
    public var maxForgetting: Double?
    /// The adapters to start from: a folder in the format of mlx-lm, mlx-swift-lm or PEFT. nil: the run starts from the unchanged model, with B = 0.
    public var initialAdapters: URL?
    /// The probability, below 1, that a step drops an input of an adapter (LoRA dropout).
    public var dropout: Float = 0
    /// Whether to train the length of each row of a weight matrix apart from the row's direction (DoRA). A run with DoRA cannot have
    /// ``maxForgetting``.
    public var usesDoRA = false
    /// The seed of the random numbers for the order of sequences, the initial matrices A and dropout.
    public var seed: UInt64 = 0

    /// Creates options. Set the remaining options as properties.
    ///
    /// - Parameters:
    ///   - steps: the number of updates of the adapters, at least 1.
    ///   - memory: the memory that training may take.
    ///   - sequenceLength: the number of tokens in a sequence; nil for the default of ``sequenceLength``.
    ///   - rank: the rank r of the adapters; nil for the default of ``rank``.
    ///   - learningRate: the learning rate of AdamW; nil for the default of ``learningRate``.
    public init(
        steps: Int = 100, memory: MemoryLimit = .system, sequenceLength: Int? = nil, rank: Int? = nil,
        learningRate: Float? = nil
    ) {
        (self.steps, self.memory, self.sequenceLength) = (steps, memory, sequenceLength)
        (self.rank, self.learningRate) = (rank, learningRate)
    }
}

extension TrainingOptions {
    /// Returns the settings of a run of `bundle` with these options. The settings of the data are not set yet.
    ///
    /// - Throws: `MeSPError` if an option is out of range, or if the bundle was not exported for an option's value.
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

    /// Throws an error if an option is out of range. The error names the Swift property.
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
    /// Replaces a sequence length that `manifest` lacks with the longest shorter length in `manifest`, or else with its shortest length. Replaces a
    /// rank that `manifest` lacks with the first rank in `manifest`.
    package mutating func takeNearest(in manifest: Manifest) {
        if !manifest.seqLens.contains(seqLen) {
            seqLen = manifest.seqLens.filter { $0 <= seqLen }.max() ?? manifest.seqLens.min() ?? 1
        }
        if !manifest.ranks.contains(rank) { rank = manifest.ranks.first ?? 1 }
    }
}
