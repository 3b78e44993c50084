import Foundation
import MLX
import MeSPBundle

/// SGD and AdamW are those of `mlx.optimizers`.
struct Optimizer {
    private let settings: RunSettings
    var first: BlockArrays?
    var second: BlockArrays?
    private let maps: (first: DynamicQuantization, second: DynamicQuantization)?

    init(
        _ settings: RunSettings,
        zeros: (_ shape: (_ parameters: Int) -> [Int], _ dtype: DType) throws -> BlockArrays
    ) rethrows {
        self.settings = settings
        let state = Self.state(settings)
        first = state.count > 0 ? try zeros(state.shape, state.dtype) : nil
        second = state.count > 1 ? try zeros(state.shape, state.dtype) : nil
        maps =
            settings.effectiveOptimizer == .adamw8bit
            ? (DynamicQuantization(signed: true), DynamicQuantization(signed: false)) : nil
    }

    static func state(_ settings: RunSettings) -> (count: Int, shape: (_ parameters: Int) -> [Int], dtype: DType) {
        switch settings.effectiveOptimizer {
        case .sgd: (settings.momentum > 0 ? 1 : 0, { [$0] }, .float32)
        case .adamw: (2, { [$0] }, .float32)
        case .adamw8bit: (2, DynamicQuantization.shape, .uint8)
        }
    }

    struct Update {
        var w: MLXArray
        let first, second: MLXArray?

        var arrays: [MLXArray] { [w] + [first, second].compactMap { $0 } }
    }

    /// Returns one update of a block's parameters:
    ///
    ///     SGD     g ← g + λ w,   m ← μ m + g,   w ← w − η m
    ///     AdamW   m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   w ← (1 − η λ) w − η m / (√v + ε)
    ///
    /// With LoRA+ each parameter has its own rate η f. AdamW has no bias correction, as by default in MLX. 8-bit AdamW updates w with the unrounded m
    /// and v.
    /// - Parameters:
    ///   - w, g: parameters and gradient, float32 `[P]`
    ///   - factors: f, float32 `[P]`; nil for 1
    func update(_ w: MLXArray, _ g: MLXArray, block: Int, rate: Float, factors: MLXArray?) throws -> Update {
        let s = settings
        func scaled(_ step: MLXArray) -> MLXArray { factors.map { $0 * step } ?? step }
        switch s.effectiveOptimizer {
        case .sgd:
            var m = s.weightDecay > 0 ? g + s.weightDecay * w : g
            let previous = try first?.read(block)
            if let previous { m = s.momentum * previous + m }
            return Update(w: w - scaled(rate * m), first: previous == nil ? nil : m, second: nil)
        case .adamw, .adamw8bit:
            guard var m = try first?.read(block), var v = try second?.read(block) else {
                preconditionFailure("AdamW was made without its moments")
            }
            if let maps {
                m = maps.first.dequantized(m, count: g.size)
                v = maps.second.dequantized(v, count: g.size)
            }
            m = Float(s.beta1) * m + Float(1 - s.beta1) * g
            v = Float(s.beta2) * v + Float(1 - s.beta2) * g.square()
            let decay = rate * s.weightDecay
            let decayed = factors.map { w * (1 - decay * $0) } ?? w * (1 - decay)
            let new = decayed - scaled(rate * m / (v.sqrt() + s.epsilon))
            return Update(w: new, first: maps?.first.quantized(m) ?? m, second: maps?.second.quantized(v) ?? v)
        }
    }

    mutating func keep(_ update: Update, block: Int) throws {
        if let m = update.first { try first?.write(m, block) }
        if let v = update.second { try second?.write(v, block) }
    }
}

extension RunSettings {
    /// Returns the learning rate η of update `step`, counted from 0. η rises linearly from 0 during the warm-up, and then follows the schedule, as in
    /// mlx-lm.
    func learningRate(step: Int, of architecture: Architecture) -> Float {
        let rate = Double(effectiveLearningRate(for: architecture))
        let start = warmup > 0 ? warmup + 1 : 0
        guard step >= start else { return Float(rate * Double(step) / Double(warmup)) }
        let progress = Double(step - start) / Double(max(1, steps - start))
        switch schedule {
        case .constant: return Float(rate)
        case .linear: return Float(rate * (1 - progress))
        case .cosine: return Float(rate * 0.5 * (1 + cos(.pi * progress)))
        }
    }
}
