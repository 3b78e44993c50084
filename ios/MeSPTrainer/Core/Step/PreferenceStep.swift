import MLX
import MeSPBundle

/// The loss of a batch of preference data: the mean over its pairs or answers, times the batch's share of the step's loss.
///
/// A gradient is the sum of each sequence's own, which the objective weights, so that one sequence's activations are there at a time.
struct PreferenceBatch: StepLoss {
    /// Pairs of a chosen and a rejected answer, one after the other, or single answers.
    private let batch: [JudgedAnswer]
    private let objective: Objective
    private let share: Double
    /// ORPO's supervised loss is a mean over all targets of the batch's chosen answers and their prompts: how many those are for each pair.
    private var supervisedTargets = 0.0

    init(_ batch: [JudgedAnswer], _ objective: Objective, share: Double = 1) {
        (self.batch, self.objective, self.share) = (batch, objective, share)
        guard objective == .orpo else { return }
        let targets = pairs.reduce(0) { $0 + $1.chosen.example.counted.count + ($1.chosen.context?.counted.count ?? 0) }
        supervisedTargets = Double(targets) / Double(pairs.count)
    }

    var examples: [Example] { batch.map(\.example) }

    func score(
        _ trainer: Trainer, _ result: inout StepResult,
        parameters: (_ block: Int, _ lora: MLXArray) throws -> MLXArray
    ) throws {
        func loss(_ judged: JudgedAnswer) throws -> Float {
            try trainer.model.loss(judged.example, parameters: parameters)
        }
        let part = Double(Float(share)) / Double(count)
        if objective.takesPairs {
            for (chosen, rejected) in pairs {
                let pair = try pair(chosen, loss(chosen), rejected, loss(rejected), part, trainer, &result)
                if let context = pair.context > 0 ? chosen.context : nil {
                    result.sum += part * pair.context * Double(try trainer.model.loss(context, parameters: parameters))
                }
            }
        } else {
            let kl = try kl(trainer, loss)
            for judged in batch { _ = try single(judged, loss(judged), kl: kl, part, trainer, &result) }
        }
    }

    /// The mean loss of pairs or answers, and what it says of them.
    func evaluated(_ trainer: Trainer) throws -> StepResult {
        var result = StepResult()
        try score(trainer, &result) { $1 }
        return result
    }

    func backpropagate(_ trainer: Trainer, into sink: GradientSink, _ result: inout StepResult) throws {
        let part = share / Double(count)
        if objective.takesPairs {
            for (chosen, rejected) in pairs {
                try backpropagate(chosen: chosen, rejected: rejected, part: part, trainer, into: sink, &result)
            }
        } else {
            let kl = try kl(trainer) { try trainer.model.loss($0.example) }
            for judged in batch {
                _ = try reference(judged, trainer)  // before there are block inputs
                var sequences = try trainer.forward([judged.example])
                sequences[0].state = try {
                    let (loss, dy) = try trainer.head(sequences[0].state, judged.example, weight: 1)
                    let weight = try single(judged, loss, kl: kl, part, trainer, &result).weights[0]
                    return try trainer.clock.confirmed { Float(part * weight) * dy }
                }()
                try trainer.backward(&sequences, into: sink)
            }
        }
    }

    /// The weights of a pair depend on both answers: the rejected one runs forward before all else, and again for its gradient where the
    /// plan has no room for its block inputs.
    private func backpropagate(
        chosen: JudgedAnswer, rejected: JudgedAnswer, part: Double, _ trainer: Trainer, into sink: GradientSink,
        _ result: inout StepResult
    ) throws {
        // With its gradient before it is weighted, where the plan has room for its block inputs.
        var waiting = [InFlight]()
        let rejectedLoss: Float
        if trainer.plan.keepsAnswer {
            waiting = try trainer.forward([rejected.example], waits: true)
            (rejectedLoss, waiting[0].state) = try trainer.head(waiting[0].state, rejected.example, weight: 1)
        } else {
            rejectedLoss = try trainer.model.loss(rejected.example)
        }
        for judged in [rejected, chosen] { _ = try reference(judged, trainer) }  // before there are block inputs

        var sequences = try trainer.forward([chosen.example])
        var weight: Float = 0
        sequences[0].state = try {
            let y = sequences[0].state
            let (loss, dy) = try trainer.head(y, chosen.example, weight: 1)
            let pair = try pair(chosen, loss, rejected, rejectedLoss, part, trainer, &result)
            weight = Float(part * pair.weights[1])
            guard let context = pair.context > 0 ? chosen.context : nil else {
                return try trainer.clock.confirmed { Float(part * pair.weights[0]) * dy }
            }
            let (contextLoss, contextDy) = try trainer.head(y, context, weight: 1)
            result.sum += part * pair.context * Double(contextLoss)
            return try trainer.clock.confirmed {
                Float(part * pair.weights[0]) * dy + Float(part * pair.context) * contextDy
            }
        }()
        try trainer.backward(&sequences, into: sink)

        if waiting.isEmpty {
            sequences = try trainer.forward([rejected.example])
            sequences[0].state = try trainer.head(sequences[0].state, rejected.example, weight: weight).dy
            try trainer.backward(&sequences, into: sink)
        } else {
            waiting[0].state = try trainer.clock.confirmed { weight * waiting[0].state }
            try trainer.backward(&waiting, into: sink)
        }
    }

    // MARK: - Terms

    /// The number of pairs or answers.
    private var count: Int { objective.takesPairs ? batch.count / 2 : batch.count }

    private var pairs: [(chosen: JudgedAnswer, rejected: JudgedAnswer)] {
        stride(from: 0, to: batch.count, by: 2).map { (batch[$0], batch[$0 + 1]) }
    }

    /// The loss of a pair, from those of its answers' targets; added to a result.
    private func pair(
        _ chosen: JudgedAnswer, _ chosenLoss: Float, _ rejected: JudgedAnswer, _ rejectedLoss: Float, _ part: Double,
        _ trainer: Trainer, _ result: inout StepResult
    ) throws -> PreferenceLoss {
        let (w, l) = (try answer(chosen, chosenLoss, trainer), try answer(rejected, rejectedLoss, trainer))
        let pair = PreferenceLoss(
            objective, chosen: w, rejected: l, supervisedTargets: supervisedTargets, trainer.model.settings)
        result.add(pair, of: [w, l], part: part)
        return pair
    }

    /// The loss of a single answer, likewise.
    private func single(
        _ judged: JudgedAnswer, _ loss: Float, kl: Double, _ part: Double, _ trainer: Trainer,
        _ result: inout StepResult
    ) throws -> PreferenceLoss {
        let answer = try answer(judged, loss, trainer)
        let single = PreferenceLoss(answer, kl: kl, trainer.model.settings)
        result.add(single, of: [answer], kl: kl, part: part)
        return single
    }

    /// KTO's k, of each prompt of the batch with the answer of the record before it, the first with the last's.
    private func kl(_ trainer: Trainer, _ loss: (JudgedAnswer) throws -> Float) throws -> Double {
        let mismatched = batch.indices.map { batch[$0].with(answerOf: batch[($0 + batch.count - 1) % batch.count]) }
        return PreferenceLoss.kl(try mismatched.map { try answer($0, loss($0), trainer) })
    }

    private func answer(_ judged: JudgedAnswer, _ loss: Float, _ trainer: Trainer) throws -> Answer {
        guard loss.isFinite else { throw try trainer.model.notFinite([judged.example]) }
        return Answer(judged: judged, logProbability: -Double(loss), reference: try reference(judged, trainer))
    }

    private func reference(_ judged: JudgedAnswer, _ trainer: Trainer) throws -> Double? {
        objective.hasReference ? try trainer.reference.logProbability(judged, trainer.model) : nil
    }
}
