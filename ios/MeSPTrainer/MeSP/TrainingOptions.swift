import Foundation
import MeSPBundle
import MeSPCore

/// A limit of the memory that training may take.
///
/// A run adapts to the limit: it recomputes intermediates and computes matrix products in smaller parts. A lower limit makes steps slower and changes
/// the losses only by rounding. ``FineTuner/predictedPeak(_:)`` predicts the peak of a run.
public struct MemoryLimit: Sendable, Equatable {
    let megabytes: Double?

    /// The system's limit for the process. On iOS it is the memory that the system still grants the process when training begins.
    public static let system = MemoryLimit(megabytes: nil)

    /// Returns a limit of `count` · 10⁶ bytes, in addition to the process's memory when training begins.
    ///
    /// If the limit is too low, the run is refused with a ``FineTuningError`` that names a sufficient limit.
    public static func megabytes(_ count: Double) -> MemoryLimit { MemoryLimit(megabytes: count) }
}

/// The options of a training run.
///
/// A run refuses a value out of range with a ``FineTuningError`` that names the option.
public struct TrainingOptions: Sendable, Equatable {
    /// The number of updates of the adapters, at least 1.
    public var steps: Int
    /// The number of passes over the training data, which then decides how many steps a run has. nil: a run has ``steps``.
    public var epochs: Double?
    /// The memory that training may take.
    public var memory: MemoryLimit
    /// The sequence length, in tokens. nil: the longest length up to 256 for which the bundle has functions, or the shortest if all are longer.
    public var sequenceLength: Int?
    /// The rank r of the adapters. nil: 8, or the bundle's first rank if it has no functions for 8.
    public var rank: Int?
    /// The processor that computes. A run keeps its processor when it is continued. nil: the GPU if MLX can use it, otherwise the CPU.
    public var device: Backend?
    /// The learning rate of AdamW with 8-bit moments. nil: 0.007 / √d for hidden size d, and a tenth of this for choices.
    public var learningRate: Float?
    /// The number of sequences, or choices, in an update, at least 1. They are computed one after another.
    public var batchSize = 1
    /// Whether the loss covers answers only. Plain text has no answers, so its loss covers all tokens.
    public var trainsAnswersOnly = true
    /// Whether conversations, choices and records that cannot be trained are left out. ``TrainingPreview/leftOut`` and ``TrainingUpdate/leftOut`` list
    /// them. Otherwise one of them refuses the run.
    public var leavesOutInvalidRecords = false
    /// The number of steps between two measurements of the held-out loss. 0: only at the beginning and the end.
    public var evaluationInterval = 0
    /// The maximum rise of the perplexity on an English text, in percent. At the end the run scales its adapters down to stay below this limit. nil:
    /// no limit.
    public var maxForgetting: Double?
    /// The folder of the adapters to start from, in the format of mlx-lm, mlx-swift-lm or PEFT. nil: new adapters with B = 0.
    public var initialAdapters: URL?
    /// The dropout probability of the adapters' inputs, from 0 to below 1.
    public var dropout: Float = 0
    /// Whether to train the magnitudes of weight rows separately (DoRA). It cannot be combined with ``maxForgetting``.
    public var usesDoRA = false
    /// The seed for the order of sequences, the initial matrices A and dropout.
    public var seed: UInt64 = 0

    /// Creates options. Set the other options as properties.
    ///
    /// - Parameters:
    ///   - steps: the number of updates of the adapters, at least 1.
    ///   - memory: the memory that training may take.
    ///   - sequenceLength: the sequence length, in tokens; nil for the default of ``sequenceLength``.
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
    /// Returns the settings of a run with these options, without settings of the data.
    ///
    /// - Throws: `MeSPError` if an option is out of range, or the bundle does not support it.
    func settings(_ bundle: URL, _ manifest: Manifest, output: URL = URL(fileURLWithPath: "")) throws -> RunSettings {
        try check()
        var settings = RunSettings(bundle: bundle.path, output: output.path)
        settings.takeNearest(in: manifest)
        (settings.steps, settings.epochs) = (steps, epochs)
        settings.memoryLimitMb = memory.megabytes
        settings.seqLen = sequenceLength ?? settings.seqLen
        settings.rank = rank ?? settings.rank
        settings.learningRate = learningRate
        settings.device = device
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

    /// Throws an error if an option is out of range. The error names the property.
    private func check() throws {
        try require(steps > 0, "steps", "at least 1")
        try require(epochs.map { $0 > 0 && $0.isFinite } ?? true, "epochs", "a finite number above 0")
        try require(sequenceLength ?? 1 > 0, "sequenceLength", "at least 1")
        try require(rank ?? 1 > 0, "rank", "at least 1")
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
    /// Replaces a sequence length without functions by the longest shorter length with functions, or else by the shortest. Replaces a rank without
    /// functions by the first rank with functions.
    package mutating func takeNearest(in manifest: Manifest) {
        if !manifest.seqLens.contains(seqLen) {
            seqLen = manifest.seqLens.filter { $0 <= seqLen }.max() ?? manifest.seqLens.min() ?? 1
        }
        if !manifest.ranks.contains(rank) { rank = manifest.ranks.first ?? 1 }
    }
}
