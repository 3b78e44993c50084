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
        _ trainer: Trainer, _ record: inout StepRecord,
        parameters: (_ block: Int, _ lora: MLXArray) throws -> MLXArray
    ) throws {
        let (model, share) = (trainer.model, Double(Float(share)))
        func answer(_ judged: JudgedAnswer) throws -> Answer {
            try self.answer(judged, loss: model.loss(judged.example, parameters: parameters), trainer)
        }
        if objective.takesPairs {
            let part = share * 2 / Double(batch.count)
            for (chosen, rejected) in pairs {
                let (w, l) = (try answer(chosen), try answer(rejected))
                let pair = PreferenceLoss(
                    objective, chosen: w, rejected: l, supervisedTargets: supervisedTargets, model.settings)
                record.add(pair, of: [w, l], part: part)
                if objective == .orpo, let context = chosen.context {
                    record.loss += part * pair.context * Double(try model.loss(context, parameters: parameters))
                }
            }
        } else {
            let kl = PreferenceLoss.kl(try mismatched.map(answer))
            for judged in batch {
                let answer = try answer(judged)
                let loss = PreferenceLoss(answer, kl: kl, model.settings)
                record.add(loss, of: [answer], kl: kl, part: share / Double(batch.count))
            }
        }
        record.end(batch, objective)
    }

    /// The mean loss of pairs or answers, and what it says of them.
    func evaluated(_ trainer: Trainer) throws -> StepResult {
        var record = StepRecord()
        try score(trainer, &record) { $1 }
        return record.result()
    }

    func backpropagate(_ trainer: Trainer, into sink: GradientSink, _ record: inout StepRecord) throws {
        if objective.takesPairs {
            for (chosen, rejected) in pairs {
                let part = share * 2 / Double(batch.count)
                try backpropagate(chosen: chosen, rejected: rejected, part: part, trainer, into: sink, &record)
            }
        } else {
            let (model, part) = (trainer.model, share / Double(batch.count))
            let kl = PreferenceLoss.kl(try mismatched.map { try answer($0, loss: model.loss($0.example), trainer) })
            for judged in batch {
                _ = try trainer.reference.logProbability(judged, model)  // before there are block inputs
                var sequences = try trainer.forward([judged.example])
                sequences[0].state = try {
                    let (loss, dy) = try trainer.head(sequences[0].state, judged.example, weight: 1)
                    let answer = try answer(judged, loss: loss, trainer)
                    let answerLoss = PreferenceLoss(answer, kl: kl, model.settings)
                    record.add(answerLoss, of: [answer], kl: kl, part: part)
                    return try trainer.clock.confirmed { Float(part * answerLoss.weights[0]) * dy }
                }()
                try trainer.backward(&sequences, into: sink)
            }
        }
        record.end(batch, objective)
    }

    /// The weights of a pair depend on both answers: the rejected one runs forward before all else, and again for its gradient where the
    /// plan has no room for its block inputs.
    private func backpropagate(
        chosen: JudgedAnswer, rejected: JudgedAnswer, part: Double, _ trainer: Trainer, into sink: GradientSink,
        _ record: inout StepRecord
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
        let other = try answer(rejected, loss: rejectedLoss, trainer)
        if objective.hasReference {  // before there are block inputs
            _ = try trainer.reference.logProbability(chosen, trainer.model)
        }

        var sequences = try trainer.forward([chosen.example])
        var weight: Float = 0
        sequences[0].state = try {
            let y = sequences[0].state
            let (loss, dy) = try trainer.head(y, chosen.example, weight: 1)
            let answer = try answer(chosen, loss: loss, trainer)
            let pair = PreferenceLoss(
                objective, chosen: answer, rejected: other, supervisedTargets: supervisedTargets,
                trainer.model.settings)
            record.add(pair, of: [answer, other], part: part)
            weight = Float(part * pair.weights[1])
            guard objective == .orpo, let context = chosen.context else {
                return try trainer.clock.confirmed { Float(part * pair.weights[0]) * dy }
            }
            let (contextLoss, contextDy) = try trainer.head(y, context, weight: 1)
            record.loss += part * pair.context * Double(contextLoss)
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
            waiting[0].state = try trainer.clock.confirmed { [dy = waiting[0].state] in weight * dy }
            try trainer.backward(&waiting, into: sink)
        }
    }

    private var pairs: [(chosen: JudgedAnswer, rejected: JudgedAnswer)] {
        stride(from: 0, to: batch.count, by: 2).map { (batch[$0], batch[$0 + 1]) }
    }

    /// Each prompt of a batch with the answer of the record before it, the first with the last's.
    private var mismatched: [JudgedAnswer] {
        batch.indices.map { batch[$0].with(answerOf: batch[($0 + batch.count - 1) % batch.count]) }
    }

    private func answer(_ judged: JudgedAnswer, loss: Float, _ trainer: Trainer) throws -> Answer {
        guard loss.isFinite else { throw try trainer.model.notFinite([judged.example]) }
        return Answer(
            logProbability: -Double(loss),
            reference: objective.hasReference ? try trainer.reference.logProbability(judged, trainer.model) : 0,
            tokens: judged.example.counted.count, isGood: judged.isGood)
    }
}
