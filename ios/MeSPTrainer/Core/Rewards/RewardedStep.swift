import MeSPBundle
import MeSPSentences

/// A step on answers that are sampled to prompts from the model as it is, and rewarded.
struct RewardedStep {
    let trainer: Trainer
    /// Of the answers that are written together, in bytes.
    let cacheLimit: Int
    /// Gets the answers to each prompt, and returns a number for each.
    let reward: ([AnswerGroup]) throws -> [[Float]]

    /// - Parameters:
    ///   - prompts: sequences of the data; see `sampleAnswers`.
    ///   - lengths: how long sequences may be, in tokens, ascending.
    func step(_ prompts: [Example], size: Int, lengths: [Int], number: Int) throws -> StepResult {
        let (start, settings) = (ContinuousClock.now, trainer.model.settings)
        let (groups, answers) = try trainer.model.sampleAnswers(
            to: prompts, groupSize: size, lengths: lengths, number: number, cacheLimit: cacheLimit)
        let seconds = (.now - start) / .seconds(1)
        let rewards = try reward(groups)
        guard rewards.count == groups.count,
            rewards.allSatisfy({ $0.count == size && $0.allSatisfy(\.isFinite) })
        else {
            throw MeSPError("The rewards must be a finite number for each of the \(size) answers to each prompt.")
        }
        let share = 1 / Float(groups.count)
        var (parts, loss) = ([Trainer.WeightedExample](), Float(0))
        for (answers, rewards) in zip(answers, rewards) {
            let group = groupLoss(
                rewards: rewards, tokens: answers.map(\.counted.count),
                longest: settings.drGrpo ? settings.maxTokens : nil)
            loss += share * group.loss
            parts += zip(answers, group.weights).map { (example: $0, weight: share * $1) }
        }
        // An answer without a weight has no gradient. Where no answer has one, the update is the optimizer's for a gradient of 0.
        let weighted = parts.filter { $0.weight != 0 }
        let supervised = SequenceLoss(weighted.isEmpty ? Array(parts.prefix(1)) : weighted)
        var result = try takeStep(trainer, [supervised], number: number)
        let all = rewards.joined()
        (result.sum, result.reward) = (Double(loss), all.reduce(0, +) / Float(all.count))
        result.sampledTokens = parts.reduce(0) { $0 + $1.example.counted.count }
        result.samplingSeconds = seconds
        return result
    }
}

/// The weights of a group's answers in the gradient: group relative policy optimization (GRPO, arXiv:2402.03300) and its form without
/// the two divisions that favour short and easy answers (Dr. GRPO, arXiv:2503.20783).
///
///     GRPO        Aᵢ = (rᵢ − mean r) / (std r + 10⁻⁴)     ℒ = −1/G Σᵢ Aᵢ / nᵢ Σₜ πₜ / sg(πₜ)
///     Dr. GRPO    Aᵢ = rᵢ − mean r                        ℒ = −1/G Σᵢ Aᵢ / n_max Σₜ πₜ / sg(πₜ)
///
/// for the rewards r of G answers of n tokens to one prompt, the probability π of each token, and sg, which stops the gradient. The
/// answers are sampled from the model that is updated, so that π / sg(π) is 1 and its derivative that of log π.
///
/// - Parameters:
///   - rewards: of a group's answers, at least two.
///   - tokens: how many tokens each has.
///   - longest: n_max of Dr. GRPO; nil for GRPO.
/// - Returns: ℒ, and of each answer ∂ℒ / ∂(−log π) of its tokens.
private func groupLoss(rewards: [Float], tokens: [Int], longest: Int?) -> (loss: Float, weights: [Float]) {
    // In float64 the mean of equal rewards is exact, and their advantages are 0.
    let count = Double(rewards.count)
    let mean = rewards.reduce(0) { $0 + Double($1) } / count
    let centred = rewards.map { Double($0) - mean }
    let weights: [Float]
    if let longest {
        weights = centred.map { Float($0) / (Float(longest) * Float(count)) }
    } else {
        // Of a sample, as in TRL.
        let deviation = (centred.reduce(0) { $0 + $1 * $1 } / (count - 1)).squareRoot()
        weights = zip(centred, tokens).map { Float($0 / (deviation + 1e-4)) / (Float($1) * Float(count)) }
    }
    return (zip(weights, tokens).reduce(0) { $0 - $1.0 * Float($1.1) }, weights)
}
