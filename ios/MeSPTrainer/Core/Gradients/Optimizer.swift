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
}
