import MeSPBundle
import MeSPSentences

extension Trainer {
    /// Performs one update from the rewards of answers that are sampled to the prompts, `size` to each.
    ///
    /// - Parameter cacheLimit: the maximum size of the caches of the answers that are generated together, in bytes
    func rewardedStep(
        _ prompts: [Example], size: Int, lengths: [Int], number: Int, cacheLimit: Int,
        _ reward: ([AnswerGroup]) throws -> [[Float]]
    ) throws -> StepResult {
        let (start, settings) = (ContinuousClock.now, model.settings)
        let (groups, answers) = try model.sampleAnswers(
            to: prompts, groupSize: size, lengths: lengths, number: number, cacheLimit: cacheLimit)
        let seconds = (.now - start) / .seconds(1)
        let rewards = try reward(groups)
        guard rewards.count == groups.count,
            rewards.allSatisfy({ $0.count == size && $0.allSatisfy(\.isFinite) })
        else {
            throw MeSPError("The rewards must be a finite number for each of the \(size) answers to each prompt.")
        }
        let share = 1 / Float(groups.count)
        var (parts, loss) = ([WeightedExample](), 0.0)
        for (answers, rewards) in zip(answers, rewards) {
            let group = groupLoss(
                rewards: rewards, tokens: answers.map(\.counted.count),
                longest: settings.drGrpo ? settings.maxTokens : nil)
            loss += Double(share) * group.loss
            parts += zip(answers, group.weights).map { (example: $0, weight: share * $1) }
        }
        // Answers of weight 0 have no gradient. If all weights are 0, one answer is kept for an update with a gradient of 0.
        let weighted = parts.filter { $0.weight != 0 }
        let supervised = SequenceLoss(weighted.isEmpty ? Array(parts.prefix(1)) : weighted)
        var result = try takeStep(self, [supervised], number: number)
        let all = rewards.joined()
        (result.sum, result.reward) = (loss, Float(all.reduce(0) { $0 + Double($1) } / Double(all.count)))
        result.sampledTokens = parts.reduce(0) { $0 + $1.example.counted.count }
        result.samplingSeconds = seconds
        return result
    }
}

/// Returns the loss of a group of answers, and their weights in the gradient, for GRPO (arXiv:2402.03300) or Dr. GRPO (arXiv:2503.20783):
///
///     GRPO        Aᵢ = (rᵢ − mean r) / (std r + 10⁻⁴)     ℒ = −1/G Σᵢ Aᵢ / nᵢ Σₜ πₜ / sg(πₜ)
///     Dr. GRPO    Aᵢ = rᵢ − mean r                        ℒ = −1/G Σᵢ Aᵢ / n_max Σₜ πₜ / sg(πₜ)
///
/// r are the rewards of the G answers to one prompt, n is the number of an answer's tokens, π is the probability of a token, and sg stops the
/// gradient. The value of π / sg(π) is 1, and its gradient is the gradient of log π.
///
/// - Parameters:
///   - rewards: the rewards of a group's answers, at least two
///   - longest: n_max of Dr. GRPO; nil for GRPO
/// - Returns: ℒ, and ∂ℒ / ∂(−log π) of each answer's tokens.
func groupLoss(rewards: [Float], tokens: [Int], longest: Int?) -> (loss: Double, weights: [Float]) {
    // In float64 the mean of equal float32 rewards is exact, so that their advantages are 0, and no difference of rewards overflows.
    let count = Double(rewards.count)
    let mean = rewards.reduce(0) { $0 + Double($1) } / count
    let centred = rewards.map { Double($0) - mean }
    let weights: [Double]
    if let longest {
        weights = centred.map { $0 / (Double(longest) * count) }
    } else {
        // The sample standard deviation, as in TRL.
        let deviation = (centred.reduce(0) { $0 + $1 * $1 } / (count - 1)).squareRoot()
        weights = zip(centred, tokens).map { $0 / (deviation + 1e-4) / (Double($1) * count) }
    }
    return (zip(weights, tokens).reduce(0) { $0 - $1.0 * Double($1.1) }, weights.map { Float($0) })
}
