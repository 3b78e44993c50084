import MLX

// Values that are derived from a run's settings.

extension RunSettings {
    /// The factor of the adapters' output.
    package var scale: Float { alpha / (rslora ? Float(rank).squareRoot() : Float(rank)) }

    /// The number of a step's sequences; with an objective, of its pairs or answers.
    var sequences: Int { batchSize * gradAccumulationSteps * (groupSize ?? 1) }

    /// Whether all blocks run by formulas. Block functions have no inputs for dropout's masks and DoRA's magnitudes.
    var needsFormulas: Bool { dropout > 0 || dora }

    /// Whether the initial adapters are kept, for the reference model or for FedProx.
    var keepsStart: Bool { adapters != nil && (objective?.hasReference == true || proximalMu != nil) }
}

extension RunSettings.LoRADtype {
    var dtype: DType { self == .float32 ? .float32 : .bfloat16 }
}

extension GradientMethod {
    /// Whether gradients come from a backward pass through the blocks, which reads their inputs.
    var hasBackwardPass: Bool { self != .mezo }

    /// Whether the backward pass reads intermediates, which a plan may keep.
    var readsIntermediates: Bool { self == .mesp }

    /// Whether a sequence may have several records. The block function that MeBP differentiates has no input for the records.
    package var takesPacked: Bool { self != .mebp }
}

extension Objective {
    /// Whether the data must be pairs of answers.
    var takesPairs: Bool { self != .kto }

    /// Whether answers are compared with π₀, the model at the beginning of the run.
    var hasReference: Bool { self == .dpo || self == .ipo || self == .kto }
}
