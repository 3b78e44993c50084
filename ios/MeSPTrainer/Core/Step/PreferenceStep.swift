import MLX
import MeSPBundle

/// The loss of a batch of preference data: the mean over its pairs or answers, times the batch's share of the step's loss.
///
/// The gradient is the weighted sum of the sequences' gradients, so only one sequence's activations are in memory at a time.
struct PreferenceBatch: StepLoss {
    /// Pairs of a chosen and a rejected answer in alternating order, or single answers.
    private let batch: [PreferenceAnswer]
    private let objective: Objective
    private let batchShare: Double
    /// The number of targets in the batch's chosen answers and their prompts, divided by the number of pairs. ORPO's supervised loss is a mean over
    /// these targets.
    private var supervisedTargets = 0.0

    init(_ batch: [PreferenceAnswer], _ objective: Objective, share: Double = 1) {
        (self.batch, self.objective, batchShare) = (batch, objective, share)
        guard objective == .orpo else { return }
        let targets = pairs.reduce(0) { $0 + $1.chosen.example.counted.count + ($1.chosen.context?.counted.count ?? 0) }
        supervisedTargets = Double(targets) / Double(pairs.count)
    }

    var examples: [Example] { batch.map(\.example) }

    func score(
        _ trainer: Trainer, _ result: inout StepResult,
        parameters: (_ block: Int, _ lora: MLXArray) throws -> MLXArray
    ) throws {
        func loss(_ answer: PreferenceAnswer) throws -> Float {
            try trainer.model.loss(answer.example, parameters: parameters)
        }
        let share = Double(Float(batchShare)) / Double(count)
        if objective.takesPairs {
            for (chosen, rejected) in pairs {
                let terms = try pair(chosen, loss(chosen), rejected, loss(rejected), share, trainer, &result)
                if let context = terms.context > 0 ? chosen.context : nil {
                    result.sum +=
                        share * terms.context * Double(try trainer.model.loss(context, parameters: parameters))
                }
            }
        } else {
            let k = try kl(trainer, loss)
            for answer in batch { _ = try single(answer, loss(answer), kl: k, share, trainer, &result) }
        }
    }

    func evaluated(_ trainer: Trainer) throws -> StepResult {
        var result = StepResult()
        try score(trainer, &result) { $1 }
        return result
    }

    func backpropagate(_ trainer: Trainer, into sink: GradientSink, _ result: inout StepResult) throws {
        let share = batchShare / Double(count)
        if objective.takesPairs {
            for (chosen, rejected) in pairs {
                try backpropagate(chosen: chosen, rejected: rejected, share: share, trainer, into: sink, &result)
            }
        } else {
            let k = try kl(trainer) { try trainer.model.loss($0.example) }
            for answer in batch {
                _ = try reference(answer, trainer)  // before block inputs take memory
                var sequences = try trainer.forward([answer.example])
                sequences[0].residual = try {
                    let (loss, dy) = try trainer.head(sequences[0].residual, answer.example, weight: 1)
                    let weight = try single(answer, loss, kl: k, share, trainer, &result).weights[0]
                    return try trainer.work.confirmed { Float(share * weight) * dy }
                }()
                try trainer.backward(&sequences, into: sink)
            }
        }
    }

    /// The weights depend on both answers, so the rejected answer runs forward first. Without memory for its block inputs, it runs forward twice.
    private func backpropagate(
        chosen: PreferenceAnswer, rejected: PreferenceAnswer, share: Double, _ trainer: Trainer,
        into sink: GradientSink,
        _ result: inout StepResult
    ) throws {
        var waiting = [BlockwiseModel.SequenceContext]()
        let rejectedLoss: Float
        if trainer.plan.keepsAnswer {
            waiting = try trainer.forward([rejected.example], waits: true)
            (rejectedLoss, waiting[0].residual) = try trainer.head(waiting[0].residual, rejected.example, weight: 1)
        } else {
            rejectedLoss = try trainer.model.loss(rejected.example)
        }
        for answer in [rejected, chosen] { _ = try reference(answer, trainer) }  // before block inputs take memory

        var sequences = try trainer.forward([chosen.example])
        var weight: Float = 0
        sequences[0].residual = try {
            let y = sequences[0].residual
            let (loss, dy) = try trainer.head(y, chosen.example, weight: 1)
            let terms = try pair(chosen, loss, rejected, rejectedLoss, share, trainer, &result)
            weight = Float(share * terms.weights[1])
            guard let context = terms.context > 0 ? chosen.context : nil else {
                return try trainer.work.confirmed { Float(share * terms.weights[0]) * dy }
            }
            let (contextLoss, contextDy) = try trainer.head(y, context, weight: 1)
            result.sum += share * terms.context * Double(contextLoss)
            return try trainer.work.confirmed {
                Float(share * terms.weights[0]) * dy + Float(share * terms.context) * contextDy
            }
        }()
        try trainer.backward(&sequences, into: sink)

        if waiting.isEmpty {
            sequences = try trainer.forward([rejected.example])
            sequences[0].residual = try trainer.head(sequences[0].residual, rejected.example, weight: weight).dy
            try trainer.backward(&sequences, into: sink)
        } else {
            waiting[0].residual = try trainer.work.confirmed { weight * waiting[0].residual }
            try trainer.backward(&waiting, into: sink)
        }
    }

    // MARK: - Terms

    private var count: Int { objective.takesPairs ? batch.count / 2 : batch.count }

    private var pairs: [(chosen: PreferenceAnswer, rejected: PreferenceAnswer)] {
        stride(from: 0, to: batch.count, by: 2).map { (batch[$0], batch[$0 + 1]) }
    }

    private func pair(
        _ chosen: PreferenceAnswer, _ chosenLoss: Float, _ rejected: PreferenceAnswer, _ rejectedLoss: Float,
        _ share: Double,
        _ trainer: Trainer, _ result: inout StepResult
    ) throws -> PreferenceLoss {
        let scored = (
            chosen: try probability(chosen, chosenLoss, trainer),
            rejected: try probability(rejected, rejectedLoss, trainer)
        )
        let pair = PreferenceLoss(
            objective, chosen: scored.chosen, rejected: scored.rejected, supervisedTargets: supervisedTargets,
            trainer.model.settings)
        result.add(pair, of: [scored.chosen, scored.rejected], share: share)
        return pair
    }

    private func single(
        _ answer: PreferenceAnswer, _ loss: Float, kl: Double, _ share: Double, _ trainer: Trainer,
        _ result: inout StepResult
    ) throws -> PreferenceLoss {
        let scored = try probability(answer, loss, trainer)
        let single = PreferenceLoss(scored, kl: kl, trainer.model.settings)
        result.add(single, of: [scored], kl: kl, share: share)
        return single
    }

    /// Returns KTO's k. Each prompt of the batch is combined with the answer of the record before, and the first prompt with the last answer.
    private func kl(_ trainer: Trainer, _ loss: (PreferenceAnswer) throws -> Float) throws -> Double {
        let mismatched = batch.indices.map { batch[$0].with(answerOf: batch[($0 + batch.count - 1) % batch.count]) }
        return PreferenceLoss.kl(try mismatched.map { try probability($0, loss($0), trainer) })
    }

    private func probability(_ answer: PreferenceAnswer, _ loss: Float, _ trainer: Trainer) throws -> AnswerProbability
    {
        guard loss.isFinite else { throw try trainer.model.notFinite([answer.example]) }
        return AnswerProbability(
            answer: answer, logProbability: -Double(loss), reference: try reference(answer, trainer))
    }

    private func reference(_ answer: PreferenceAnswer, _ trainer: Trainer) throws -> Double? {
        objective.hasReference ? try trainer.reference.logProbability(answer, trainer.model) : nil
    }
}
