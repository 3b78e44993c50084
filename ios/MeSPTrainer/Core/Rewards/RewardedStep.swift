import MeSPBundle

extension Trainer {
    /// One update from groups of answers that were sampled from the model as it is.
    ///
    /// - Parameters:
    ///   - groups: of each prompt the answers as sequences.
    ///   - rewards: of each answer.
    ///   - seconds: how long sampling took.
    func step(_ groups: [[Example]], rewards: [[Float]], number: Int, seconds: Double) throws -> StepResult {
        let longest = settings.drGrpo ? settings.maxTokens : nil
        let share = 1 / Float(groups.count)
        var (parts, loss) = ([Part](), Float(0))
        for (answers, rewards) in zip(groups, rewards) {
            let group = groupLoss(rewards: rewards, tokens: answers.map(\.counted.count), longest: longest)
            loss += share * group.loss
            parts += zip(answers, group.weights).map { (example: $0, weight: share * $1) }
        }
        // An answer without a weight has no gradient. Where no answer has one, the update is the optimizer's for a gradient of 0.
        let weighted = parts.filter { $0.weight != 0 }
        var result = try step(weighted.isEmpty ? Array(parts.prefix(1)) : weighted, number: number)
        result.loss = loss
        let all = rewards.joined()
        result.reward = all.reduce(0, +) / Float(all.count)
        (result.sampledTokens, result.samplingSeconds) = (
            parts.reduce(0) { $0 + $1.example.counted.count }, seconds
        )
        return result
    }
}

/// The weights of a group's answers in the gradient: group relative policy optimization (GRPO, arXiv:2402.03300) and its form without
/// the two divisions that favour short and easy answers (Dr. GRPO, arXiv:2503.20783).
///
///     GRPO        Aᵢ = (rᵢ − mean r) / (std r + 10⁻⁴)     L = −1/G Σᵢ Aᵢ / |yᵢ| Σₜ πₜ / sg(πₜ)
///     Dr. GRPO    Aᵢ = rᵢ − mean r                        L = −1/G Σᵢ Aᵢ / |y|max Σₜ πₜ / sg(πₜ)
///
/// for the rewards r of G answers y to one prompt, the probability π of each token, and sg, which stops the gradient. The answers are
/// sampled from the model that is updated, so that π / sg(π) is 1 and its derivative that of log π.
///
/// - Parameters:
///   - rewards: of a group's answers, at least two.
///   - tokens: how many tokens each has.
///   - longest: |y|max of Dr. GRPO; nil for GRPO.
/// - Returns: L, and of each answer ∂L / ∂(−log π) of its tokens.
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
