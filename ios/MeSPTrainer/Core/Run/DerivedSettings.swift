import MLX

// What follows from a run's settings.

extension RunSettings {
    /// The factor of the adapters' output.
    package var scale: Float { alpha / (rslora ? Float(rank).squareRoot() : Float(rank)) }

    /// Sequences of a step, or pairs or answers of an objective.
    var sequences: Int { batchSize * gradAccumulationSteps * (groupSize ?? 1) }

    /// Whether no block function is called: they have no inputs for masks and magnitudes.
    var needsFormulas: Bool { dropout > 0 || dora }

    /// Whether the initial adapters are kept: as the reference model's, or for FedProx.
    var keepsStart: Bool { adapters != nil && (objective?.hasReference == true || proximalMu != nil) }
}

extension RunSettings.LoRADtype {
    var dtype: DType { self == .float32 ? .float32 : .bfloat16 }
}

extension GradientMethod {
    /// Whether gradients come from a pass backward through the blocks, which reads their inputs.
    var hasBackwardPass: Bool { self != .mezo }

    /// Whether that pass reads intermediates, which a plan may keep.
    var readsIntermediates: Bool { self == .mesp }

    /// Whether a sequence may have several records: a block function, which MeBP differentiates, has no place for them.
    package var takesPacked: Bool { self != .mebp }
}

extension Objective {
    /// Whether the data must be pairs of answers.
    var takesPairs: Bool { self != .kto }

    /// Whether answers are compared with π₀, the model as it was when the run began.
    var hasReference: Bool { self == .dpo || self == .ipo || self == .kto }
}
