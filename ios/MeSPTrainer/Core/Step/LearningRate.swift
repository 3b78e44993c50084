import Foundation

extension RunSettings {
    /// η of update `step` (from 0): linear from 0 over the warm-up, then as the schedule says to 0 at the end, as mlx-lm joins them.
    func learningRate(step: Int) -> Float {
        let start = warmup > 0 ? warmup + 1 : 0
        guard step >= start else { return learningRate * Float(step) / Float(warmup) }
        let progress = Float(step - start) / Float(max(1, steps - start))
        switch schedule {
        case .constant: return learningRate
        case .linear: return learningRate * (1 - progress)
        case .cosine: return learningRate * 0.5 * (1 + cosf(.pi * progress))
        }
    }
}
