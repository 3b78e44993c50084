import MeSPBundle

// The defaults of the optimizer and the learning rate. `exporter/mesp/settings/optimizer_defaults.py` must have the same rule.

extension RunSettings {
    package var effectiveOptimizer: OptimizerKind { optimizer ?? (method == .mezo ? .sgd : .adamw8bit) }

    package func effectiveLearningRate(for architecture: Architecture) -> Float {
        learningRate ?? defaultLearningRate(for: architecture)
    }

    package func defaultLearningRate(for architecture: Architecture) -> Float {
        let rate: Double
        switch (method, effectiveOptimizer) {
        case (.mezo, _): return Self.paperLearningRate
        case (_, .adamw), (_, .adamw8bit): rate = 0.007 / Double(architecture.hiddenSize).squareRoot()
        case (_, .sgd): rate = 0.1
        }
        return Float(objective != nil ? rate / 10 : groupSize != nil ? rate / 3 : rate)
    }

    package mutating func usePaperUpdate() { (optimizer, learningRate) = (.sgd, Self.paperLearningRate) }

    private static let paperLearningRate: Float = 1e-4

    mutating func setDefaultUpdate(for architecture: Architecture) {
        (optimizer, learningRate) = (effectiveOptimizer, effectiveLearningRate(for: architecture))
    }
}
