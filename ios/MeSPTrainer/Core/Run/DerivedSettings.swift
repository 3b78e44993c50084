import MLX
import MeSPBundle

extension RunSettings {
    package var scale: Float { Float(Double(alpha) / (rslora ? Double(rank).squareRoot() : Double(rank))) }

    var sequences: Int { batchSize * gradAccumulationSteps * (groupSize ?? 1) }

    var processor: Processor { (device ?? .standard).processor }

    /// Whether steps need formulas, because block functions have no inputs for dropout masks and DoRA's magnitudes.
    var needsFormulas: Bool { dropout > 0 || dora }

    var keepsStart: Bool { adapters != nil && (objective?.hasReference == true || proximalMu != nil) }
}

extension RunSettings.LoRADtype {
    var dtype: DType { self == .float32 ? .float32 : .bfloat16 }
}

extension GradientMethod {
    var hasBackwardPass: Bool { self != .mezo }

    var readsIntermediates: Bool { self == .mesp }

    package var takesPacked: Bool { self != .mebp }
}

extension Objective {
    var takesPairs: Bool { self != .kto }

    var hasReference: Bool { self == .dpo || self == .ipo || self == .kto }
}
