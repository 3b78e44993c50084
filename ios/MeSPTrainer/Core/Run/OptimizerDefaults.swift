import MeSPBundle

// If a run's settings name no optimizer or no learning rate, the run has the defaults below. With the defaults a model learns in a few hundred steps;
// `docs/decisions.md` says why. `exporter/mesp/settings/optimizer_defaults.py` has the same rule for `mesp train`.

extension RunSettings {
    /// The optimizer that is set, or the default of the method.
    package var effectiveOptimizer: OptimizerKind { optimizer ?? (method == .mezo ? .sgd : .adamw8bit) }

    /// Returns the learning rate that is set, or the default.
    package func effectiveLearningRate(for architecture: Architecture) -> Float {
        learningRate ?? defaultLearningRate(for: architecture)
    }

    /// Returns the default learning rate for the method, the optimizer, the model, and the objective or sampled answers.
    package func defaultLearningRate(for architecture: Architecture) -> Float {
        let rate: Float
        switch (method, effectiveOptimizer) {
        case (.mezo, _): return Self.paperLearningRate
        case (_, .adamw), (_, .adamw8bit): rate = 0.007 / Float(architecture.hiddenSize).squareRoot()
        case (_, .sgd): rate = 0.1
        }
        return objective != nil ? rate / 10 : groupSize != nil ? rate / 3 : rate
    }

    /// Sets the paper's optimizer and learning rate, with which a model learns slowly. A settings file that names no optimizer or learning rate has
    /// the paper's.
    package mutating func usePaperUpdate() { (optimizer, learningRate) = (.sgd, Self.paperLearningRate) }

    private static let paperLearningRate: Float = 1e-4

    /// Sets the defaults if nothing is set, so that the log and the saved state name them.
    mutating func setDefaultUpdate(for architecture: Architecture) {
        (optimizer, learningRate) = (effectiveOptimizer, effectiveLearningRate(for: architecture))
    }
}
