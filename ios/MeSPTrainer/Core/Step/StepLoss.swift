import MLX
import MeSPBundle

/// A loss that a step takes the gradient of, alone or as one of several, whose sum is the step's.
package protocol StepLoss {
    /// Hands its gradient to a sink, in one backward pass of the trainer's or several, and adds the loss to a result.
    func backpropagate(_ trainer: Trainer, into sink: GradientSink, _ result: inout StepResult) throws

    /// Adds the loss to a result; forward passes only.
    ///
    /// - Parameter parameters: gives the parameters to take, where a block has any.
    func score(
        _ trainer: Trainer, _ result: inout StepResult,
        parameters: (_ block: Int, _ lora: MLXArray) throws -> MLXArray
    ) throws

    /// The sequences that it is of.
    var examples: [Example] { get }
}

/// The supervised loss: the sum of the losses of the sequences' counted targets, each times its sequence's weight.
package struct SequenceLoss: StepLoss {
    let weighted: [Trainer.WeightedExample]

    init(_ weighted: [Trainer.WeightedExample]) { self.weighted = weighted }

    /// The mean over all the sequences' counted targets.
    package init(_ examples: [Example]) {
        let weight = 1 / Float(examples.reduce(0) { $0 + $1.counted.count })
        weighted = examples.map { (example: $0, weight: weight) }
    }

    package var examples: [Example] { weighted.map(\.example) }

    /// One after the other, sequences take the memory of one and of a sum of gradients, however many they are; by blocks, of all their block
    /// inputs, and unless the update needs all gradients at once, of one block's sum.
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

/// One update from the sum of some losses, by the method of the settings.
///
/// - Throws: `NotFinite`. With `skipBadSteps` nothing has changed then.
package func takeStep(_ trainer: Trainer, _ losses: [some StepLoss], number: Int) throws -> StepResult {
    try trainer.updates.undoingFailure {
        try trainer.model.settings.method.hasBackwardPass
            ? trainer.step(losses, number: number) : MeZO(trainer: trainer).step(losses, number: number)
    }
}

/// The loss and the other measures of a step, or of an evaluation.
package struct StepResult {
    /// The sum of the losses, times their shares.
    var sum = 0.0
    /// Nats a token.
    package var loss: Float { Float(sum) }
    /// The targets that counted.
    private(set) var tokens = 0
    /// The inputs up to each sequence's last target that counted.
    private(set) var inputTokens = 0
    /// ‖∂ℒ/∂lora‖₂ over all blocks, before clipping; of DP-SGD the mean of the examples'. nil where it isn't clipped.
    var gradientNorm: Float?

    // Of preference data, the means over its pairs or answers.

    /// The difference of the rewards of chosen or good answers and the others.
    var margin: Float? { rewardChosen.flatMap { chosen in rewardRejected.map { chosen - $0 } } }
    /// The share of pairs whose chosen answer has the higher reward; of single answers the share on the right side of β k.
    var accuracy: Float? { right.value }
    var rewardChosen: Float? { chosen.value }
    var rewardRejected: Float? { rejected.value }
    /// An estimate of the divergence from π₀, in nats an answer: of KTO's its k, elsewhere the mean of log π / π₀ over the data's answers.
    var kl: Float? { k.map { Float($0) } ?? ratios.value }

    // Of answers that were sampled.

    /// The mean over all answers.
    var reward: Float?
    /// The answers', with those that end them.
    var sampledTokens: Int?
    /// The time that sampling took.
    var samplingSeconds: Double?

    private struct Mean {
        private var (sum, count) = (0.0, 0)
        var value: Float? { count > 0 ? Float(sum / Double(count)) : nil }
        mutating func add(_ number: Double) { (sum, count) = (sum + number, count + 1) }
    }

    private var (chosen, rejected, ratios, right) = (Mean(), Mean(), Mean(), Mean())
    private var k: Double?

    /// Adds some sequences and their loss, in float32.
    mutating func add(_ loss: Float, of weighted: [Trainer.WeightedExample]) {
        sum = Double(self.loss + loss)
        for each in weighted { count(each.example) }
    }

    /// Adds a pair or a single answer.
    ///
    /// - Parameters:
    ///   - kl: KTO's k
    ///   - share: its part of the step's loss
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
