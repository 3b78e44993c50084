import Foundation
import MLX

/// The update of a block's parameters from their gradient, as in `mlx.optimizers`, with the state that it keeps from step to step.
struct Optimizer {
    private let settings: RunSettings
    /// SGD's velocity, or AdamW's first moment m: a float32 vector `[P]` a block.
    var first: BlockArrays?
    /// AdamW's second moment v.
    var second: BlockArrays?

    /// - Parameter zeros: makes a vector of zeros for each block.
    init(_ settings: RunSettings, zeros: () throws -> BlockArrays) rethrows {
        self.settings = settings
        let count = Self.stateCount(settings)
        first = count > 0 ? try zeros() : nil
        second = count > 1 ? try zeros() : nil
    }

    /// How many numbers are kept for each parameter.
    static func stateCount(_ settings: RunSettings) -> Int {
        switch settings.optimizer {
        case .sgd: settings.momentum > 0 ? 1 : 0
        case .adamw: 2
        }
    }

    /// One update of a block's parameters:
    ///
    ///     SGD     g ← g + λ w,   m ← μ m + g,   w ← w − η m
    ///     AdamW   m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   w ← (1 − η λ) w − η m / (√v + ε)
    ///
    /// AdamW is without bias correction, MLX's default.
    /// - Parameters:
    ///   - w, g: parameters and gradient, float32 `[P]`
    ///   - rate: η
    mutating func update(_ w: MLXArray, _ g: MLXArray, block: Int, rate: Float) throws -> MLXArray {
        let s = settings
        switch s.optimizer {
        case .sgd:
            var m = s.weightDecay > 0 ? g + s.weightDecay * w : g
            if let previous = try first?.read(block) {
                m = s.momentum * previous + m
                try first?.write(m, block)
            }
            return w - rate * m
        case .adamw:
            guard let m0 = try first?.read(block), let v0 = try second?.read(block) else {
                preconditionFailure("AdamW was made without its moments")
            }
            let m = s.beta1 * m0 + (1 - s.beta1) * g
            let v = s.beta2 * v0 + (1 - s.beta2) * g.square()
            try first?.write(m, block)
            try second?.write(v, block)
            return w * (1 - rate * s.weightDecay) - rate * m / (v.sqrt() + s.epsilon)
        }
    }

    /// η of update `step` (from 0): linear from 0 over the warm-up, then as the schedule says to 0 at the end, as mlx-lm joins them.
    func learningRate(step: Int) -> Float {
        let s = settings
        let start = s.warmup > 0 ? s.warmup + 1 : 0
        guard step >= start else { return s.learningRate * Float(step) / Float(s.warmup) }
        let progress = Float(step - start) / Float(max(1, s.steps - start))
        switch s.schedule {
        case .constant: return s.learningRate
        case .linear: return s.learningRate * (1 - progress)
        case .cosine: return s.learningRate * 0.5 * (1 + cosf(.pi * progress))
        }
    }
}

/// `x` in bfloat16, rounded up or down at random, so that the expected value is x. To the nearest, an update below 1/256 of a parameter
/// would be lost.
///
/// A float32's upper 16 bits are the bfloat16 below it in magnitude; adding a uniform 16-bit number to the bits carries into them with the
/// probability that the lower 16 ask for.
/// - Parameter x: float32 `[P]`
func stochasticallyRounded(_ x: MLXArray, key: MLXArray) -> MLXArray {
    let noise = MLXRandom.randInt(low: 0, high: 1 << 16, x.shape, type: UInt32.self, key: key)
    let upper = (x.view(dtype: .uint32) + noise) >> 16
    return upper.asType(.uint16).view(dtype: .bfloat16)
}
