import MLX
import MeSPBundle

/// A loss that a step takes the gradient of, alone or as one of several, whose sum is the step's.
package protocol StepLoss {
    /// Hands its gradient to a sink, in one backward pass of the trainer's or several, and adds the loss to a record.
    func backpropagate(_ trainer: Trainer, into sink: GradientSink, _ record: inout StepRecord) throws

    /// Adds the loss to a record; forward passes only.
    ///
    /// - Parameter parameters: gives the parameters to take, where a block has any.
    func score(
        _ trainer: Trainer, _ record: inout StepRecord,
        parameters: (_ block: Int, _ lora: MLXArray) throws -> MLXArray
    ) throws

    /// The sequences that it is of.
    var examples: [Example] { get }
}

/// The supervised loss: the sum of the losses of the sequences' counted targets, each times its sequence's weight.
package struct SequenceLoss: StepLoss {
    let parts: [Trainer.Part]

    init(parts: [Trainer.Part]) { self.parts = parts }

    /// The mean over all the sequences' counted targets.
    package init(_ examples: [Example]) {
        let weight = 1 / Float(examples.reduce(0) { $0 + $1.counted.count })
        parts = examples.map { (example: $0, weight: weight) }
    }

    package var examples: [Example] { parts.map(\.example) }

    /// One after the other, sequences take the memory of one and of a sum of gradients, however many they are; by blocks, of all their block
    /// inputs, and unless the update needs all gradients at once, of one block's sum.
    package func backpropagate(_ trainer: Trainer, into sink: GradientSink, _ record: inout StepRecord) throws {
        for group in trainer.plan.order == .blocks ? [parts] : parts.map({ [$0] }) {
            record.add(try trainer.backpropagate(group, into: sink), of: group)
        }
    }

    package func score(
        _ trainer: Trainer, _ record: inout StepRecord,
        parameters: (_ block: Int, _ lora: MLXArray) throws -> MLXArray
    ) throws {
        for part in parts {
            record.add(part.weight * (try trainer.model.loss(part.example, parameters: parameters)), of: [part])
        }
    }
}

/// One update from the sum of some losses, by the method of the settings.
func takeStep(_ trainer: Trainer, _ losses: [some StepLoss], number: Int) throws -> StepResult {
    try trainer.model.settings.method.hasBackwardPass
        ? trainer.step(losses, number: number) : MeZO(trainer: trainer).step(losses, number: number)
}

package struct StepResult {
    /// Nats a token.
    package var loss: Float
    /// The targets that counted.
    var tokens: Int
    /// The inputs up to each sequence's last target that counted.
    var inputTokens: Int
    /// ‖∂loss/∂lora‖₂ over all blocks, before clipping; of DP-SGD the mean of the examples'. nil where it isn't clipped.
    var gradientNorm: Float?

    // Of preference data, the means over its pairs or answers.

    /// The difference of the rewards of chosen or good answers and the others.
    var margin: Float?
    /// The share of pairs whose chosen answer has the higher reward; of single answers the share on the right side of β k.
    var accuracy: Float?
    var rewardChosen: Float?
    var rewardRejected: Float?
    /// An estimate of the divergence from π₀, in nats an answer: of KTO's its k, elsewhere the mean of log π / π₀ over the data's answers.
    var kl: Float?

    // Of answers that were sampled.

    /// The mean over all answers.
    var reward: Float?
    /// The answers', with those that end them.
    var sampledTokens: Int?
    /// The time that sampling took.
    var samplingSeconds: Double?
}

/// The sums over a step's sequences, pairs or answers.
package struct StepRecord {
    var loss = 0.0
    private var (tokens, inputTokens) = (0, 0)
    private var (chosen, rejected, ratios, right) = (0.0, 0.0, 0.0, 0.0)
    private var (chosenCount, rejectedCount, judged) = (0, 0, 0)
    private var kl: Double?
    private var hasRatios = false

    /// Adds some sequences and their loss, in float32.
    mutating func add(_ loss: Float, of parts: [Trainer.Part]) {
        self.loss = Double(Float(self.loss) + loss)
        tokens += parts.reduce(0) { $0 + $1.example.counted.count }
        inputTokens += parts.reduce(0) { $0 + $1.example.inputCount }
    }

    /// Adds a pair or a single answer.
    ///
    /// - Parameter part: its share of the step's loss.
    mutating func add(_ preference: PreferenceLoss, of answers: [Answer], kl: Double? = nil, part: Double) {
        loss += part * preference.loss
        for (answer, reward) in zip(answers, preference.rewards) {
            tokens += answer.tokens
            if answer.isGood {
                (chosen, chosenCount) = (chosen + reward, chosenCount + 1)
            } else {
                (rejected, rejectedCount) = (rejected + reward, rejectedCount + 1)
            }
        }
        ratios += answers.reduce(0) { $0 + $1.ratio } / Double(answers.count)
        right += preference.isRight ? 1 : 0
        judged += 1
        if let kl { self.kl = (self.kl ?? 0) + part * kl }
    }

    /// Ends a batch of pairs or answers.
    mutating func end(_ batch: [JudgedAnswer], _ objective: Objective) {
        inputTokens += batch.reduce(0) { $0 + $1.example.inputCount }
        hasRatios = objective.hasReference
    }

    func result(gradientNorm: Float? = nil) -> StepResult {
        func mean(_ sum: Double, _ count: Int) -> Float? { count > 0 ? Float(sum / Double(count)) : nil }
        let (chosen, rejected) = (mean(chosen, chosenCount), mean(rejected, rejectedCount))
        return StepResult(
            loss: Float(loss), tokens: tokens, inputTokens: inputTokens, gradientNorm: gradientNorm,
            margin: chosen.flatMap { chosen in rejected.map { chosen - $0 } }, accuracy: mean(right, judged),
            rewardChosen: chosen, rewardRejected: rejected,
            kl: kl.map { Float($0) } ?? (hasRatios ? mean(ratios, judged) : nil))
    }
}
