import MLX
import MeSPBundle

/// A loss that a step differentiates. The step's loss is the sum of one or several losses.
package protocol StepLoss {
    func backpropagate(_ trainer: Trainer, into sink: GradientSink, _ result: inout StepResult) throws

    func score(
        _ trainer: Trainer, _ result: inout StepResult,
        parameters: (_ block: Int, _ lora: MLXArray) throws -> MLXArray
    ) throws

    var examples: [Example] { get }
}

package struct SequenceLoss: StepLoss {
    let weighted: [Trainer.WeightedExample]

    init(_ weighted: [Trainer.WeightedExample]) { self.weighted = weighted }

    package init(_ examples: [Example]) {
        let weight = 1 / Float(examples.reduce(0) { $0 + $1.counted.count })
        weighted = examples.map { (example: $0, weight: weight) }
    }

    package var examples: [Example] { weighted.map(\.example) }

    /// Passes the gradient to a sink. The sequences go through the model one after the other or, with the order `blocks`, together.
    package func backpropagate(_ trainer: Trainer, into sink: GradientSink, _ result: inout StepResult) throws {
        for group in trainer.plan.order == .blocks ? [weighted] : weighted.map({ [$0] }) {
            result.add(try trainer.backpropagate(group, into: sink), of: group)
        }
    }

    package func score(
        _ trainer: Trainer, _ result: inout StepResult,
        parameters: (_ block: Int, _ lora: MLXArray) throws -> MLXArray
    ) throws {
        for each in weighted {
            result.add(each.weight * (try trainer.model.loss(each.example, parameters: parameters)), of: [each])
        }
    }
}

/// Performs one update from the sum of some losses, by the method of the settings.
///
/// - Throws: for example `CancellationError` from a block boundary, or `NotFinite`. With `skipBadSteps`, the parameters and the optimizer's state are
///   restored before `NotFinite` is thrown.
package func takeStep(_ trainer: Trainer, _ losses: [some StepLoss], number: Int) throws -> StepResult {
    try trainer.updates.undoingFailure {
        try trainer.model.settings.method.hasBackwardPass
            ? trainer.step(losses, number: number) : trainer.stepByMeZO(losses, number: number)
    }
}

package struct StepResult {
    /// The sum of the losses, each times its share of the step's loss.
    var sum = 0.0
    /// The loss of the step. A supervised loss is in nats per token.
    package var loss: Float { Float(sum) }
    private(set) var tokens = 0
    private(set) var inputTokens = 0
    /// The norm of the gradient over all blocks before clipping, or with DP-SGD the mean of the examples' norms; nil if the gradient is not clipped.
    var gradientNorm: Float?

    // Measures of preference data: means over its pairs or answers.

    /// The mean reward of chosen or good answers minus the mean reward of rejected or bad answers.
    var margin: Float? { rewardChosen.flatMap { chosen in rewardRejected.map { chosen - $0 } } }
    /// The share of pairs whose chosen answer has the higher reward, or of single answers whose reward is on the right side of KTO's β k.
    var accuracy: Float? { right.value }
    var rewardChosen: Float? { chosen.value }
    var rewardRejected: Float? { rejected.value }
    /// An estimate of the KL divergence from the reference model, in nats per answer: KTO's k, or the mean of log π / π₀; nil without a reference
    /// model.
    var kl: Float? { k.map { Float($0) } ?? ratios.value }

    var reward: Float?
    /// The number of tokens in the answers, including their end tokens.
    var sampledTokens: Int?
    var samplingSeconds: Double?

    private struct Mean {
        private var (sum, count) = (0.0, 0)
        var value: Float? { count > 0 ? Float(sum / Double(count)) : nil }
        mutating func add(_ number: Double) { (sum, count) = (sum + number, count + 1) }
    }

    private var (chosen, rejected, ratios, right) = (Mean(), Mean(), Mean(), Mean())
    private var k: Double?

    mutating func add(_ loss: Float, of weighted: [Trainer.WeightedExample]) {
        sum = Double(self.loss + loss)
        for each in weighted { count(each.example) }
    }

    mutating func add(_ preference: PreferenceLoss, of answers: [AnswerProbability], kl: Double? = nil, share: Double) {
        sum += share * preference.loss
        for (scored, reward) in zip(answers, preference.rewards) {
            count(scored.answer.example)
            if scored.answer.isGood { chosen.add(reward) } else { rejected.add(reward) }
        }
        if answers[0].reference != nil { ratios.add(answers.reduce(0) { $0 + $1.ratio } / Double(answers.count)) }
        right.add(preference.isRight ? 1 : 0)
        if let kl { k = (k ?? 0) + share * kl }
    }

    private mutating func count(_ example: Example) {
        tokens += example.counted.count
        inputTokens += example.inputCount
    }
}
