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
            parts += zip(answers, group.weights).map { Part(example: $0, weight: share * $1) }
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
