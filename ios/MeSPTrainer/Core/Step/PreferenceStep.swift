import MLX

/// The figures of a step or an evaluation on preference data besides its loss: means over its pairs or answers.
struct PreferenceFigures {
    /// The difference of the rewards of chosen or good answers and the others.
    var margin: Float?
    /// The share of pairs whose chosen answer has the higher reward; of single answers the share on the right side of β k.
    var accuracy: Float?
    var rewardChosen: Float?
    var rewardRejected: Float?
    /// An estimate of the divergence from π₀, in nats an answer: of KTO's its k, elsewhere the mean of log π / π₀ over the data's answers.
    var kl: Float?
}

extension Trainer {
    /// One update from some batches of preference data, as `step` makes one from sequences: a batch's loss is the mean over its pairs or
    /// answers. A gradient is the sum of each sequence's own, which the objective weights, so that one sequence's activations are there
    /// at a time. The weights of a pair depend on both answers: the rejected one runs forward before all else, and again for its gradient
    /// where the plan has no room for its block inputs.
    ///
    /// - Parameter batches: of each, pairs of a chosen and a rejected answer, one after the other, or single answers.
    func step(_ batches: [[JudgedAnswer]], number: Int, _ objective: Objective) throws -> StepResult {
        try takingBack {
            var record = Record()
            var norm: Float?
            if !settings.method.hasBackwardPass {
                let loss: Float
                (loss, norm) = try zerothOrderStep(number, of: batches.joined().map(\.example)) { moved in
                    record = Record()
                    for batch in batches {
                        try score(batch, objective, share: 1 / Float(batches.count), &record, parameters: moved)
                    }
                    return Float(record.loss)
                }
                record.loss = Double(loss)
            } else {
                sums?.reset()
                for batch in batches {
                    try backpropagate(batch, objective, share: 1 / Double(batches.count), &record)
                }
                norm = try updateFromSums(number, keys(number))
            }
            let inputTokens = batches.joined().reduce(0) { $0 + $1.example.inputCount }
            return StepResult(
                loss: Float(record.loss), tokens: record.tokens, inputTokens: inputTokens, gradientNorm: norm,
                preference: record.figures)
        }
    }

    /// One update from the pairs that were drawn, by `privateStep`. No pair's loss depends on another's.
    func step(
        drawn pairs: some Sequence<[JudgedAnswer]>, number: Int, _ objective: Objective, _ secret: SecretKey
    ) throws -> StepResult {
        var (record, inputTokens) = (Record(), 0)
        let (count, norm) = try privateStep(pairs, number, secret) { pair in
            try backpropagate(pair, objective, share: 1, &record)
            inputTokens += pair.reduce(0) { $0 + $1.example.inputCount }
        }
        return StepResult(
            loss: Float(record.loss / Double(max(count, 1))), tokens: record.tokens, inputTokens: inputTokens,
            gradientNorm: norm, preference: record.figures)
    }

    /// The mean loss of pairs or answers, and what it says of them.
    func evaluate(_ batch: [JudgedAnswer], _ objective: Objective) throws -> (loss: Float, PreferenceFigures) {
        var record = Record()
        try score(batch, objective, share: 1, &record)
        return (Float(record.loss), record.figures)
    }

    // MARK: - A batch

    /// Adds a batch's loss, times its share of the step's, to the record; forward passes only.
    private func score(
        _ batch: [JudgedAnswer], _ objective: Objective, share: Float, _ record: inout Record,
        parameters: (_ block: Int, _ lora: MLXArray) throws -> MLXArray = { $1 }
    ) throws {
        func answer(_ judged: JudgedAnswer) throws -> Answer {
            try self.answer(judged, loss: model.loss(judged.example, parameters: parameters), objective)
        }
        if objective.takesPairs {
            let part = Double(share) * 2 / Double(batch.count)
            let supervised = Self.supervisedTargets(batch)
            for index in stride(from: 0, to: batch.count, by: 2) {
                let (chosen, rejected) = (try answer(batch[index]), try answer(batch[index + 1]))
                let context = objective == .orpo ? batch[index].context : nil
                let pair = PairLoss(
                    objective, chosen: chosen, rejected: rejected, supervisedTargets: supervised, settings)
                record.add(pair, chosen, rejected, part: part)
                if let context {
                    record.loss += part * pair.context * Double(try model.loss(context, parameters: parameters))
                }
            }
        } else {
            let kl = AnswerLoss.kl(try mismatched(batch).map(answer))
            for judged in batch {
                let answer = try answer(judged)
                let answerLoss = AnswerLoss(answer, isGood: judged.isGood, kl: kl, settings)
                record.add(
                    answerLoss, answer, judged, kl: kl, beta: settings.beta, part: Double(share) / Double(batch.count))
            }
        }
        if !objective.hasReference { record.forgetRatios() }
    }

    /// As `score`, with each sequence's gradient, weighted, added to the sums.
    private func backpropagate(
        _ batch: [JudgedAnswer], _ objective: Objective, share: Double, _ record: inout Record
    ) throws {
        if objective.takesPairs {
            let supervised = Self.supervisedTargets(batch)
            for index in stride(from: 0, to: batch.count, by: 2) {
                try backpropagate(
                    chosen: batch[index], rejected: batch[index + 1], objective, supervisedTargets: supervised,
                    part: share * 2 / Double(batch.count), &record)
            }
        } else {
            let part = share / Double(batch.count)
            let others = try mismatched(batch).map {
                try answer($0, loss: model.loss($0.example), objective)
            }
            let kl = AnswerLoss.kl(others)
            for judged in batch {
                let reference = try reference(judged)
                var d = try forward([judged.example])
                d[0] = try {
                    let (loss, dy) = try head(d[0], judged.example, weight: 1)
                    let answer = Answer(
                        logProbability: -Double(loss), reference: reference, tokens: judged.example.counted.count)
                    let answerLoss = AnswerLoss(answer, isGood: judged.isGood, kl: kl, settings)
                    record.add(answerLoss, answer, judged, kl: kl, beta: settings.beta, part: part)
                    return Float(part * answerLoss.weight) * dy
                }()
                try backward(&d, update: gather)
            }
        }
        if !objective.hasReference { record.forgetRatios() }
    }

    private func backpropagate(
        chosen: JudgedAnswer, rejected: JudgedAnswer, _ objective: Objective, supervisedTargets: Double, part: Double,
        _ record: inout Record
    ) throws {
        // The rejected answer's gradient before it is weighted, which waits with its block inputs where the plan has room for these.
        var waiting: MLXArray?
        let rejectedLoss: Float
        if plan.keepsAnswer {
            (rejectedLoss, waiting) = try head(forward([rejected.example], first: 1)[0], rejected.example, weight: 1)
        } else {
            rejectedLoss = try model.loss(rejected.example)
        }
        let other = try answer(rejected, loss: rejectedLoss, objective)
        let reference = objective.hasReference ? try reference(chosen) : 0

        var d = try forward([chosen.example])
        var weight: Float = 0
        d[0] = try {
            let (loss, dy) = try head(d[0], chosen.example, weight: 1)
            let answer = Answer(
                logProbability: -Double(loss), reference: reference, tokens: chosen.example.counted.count)
            let pair = PairLoss(
                objective, chosen: answer, rejected: other, supervisedTargets: supervisedTargets, settings)
            record.add(pair, answer, other, part: part)
            weight = Float(part * pair.rejected)
            let weighted = Float(part * pair.chosen) * dy
            guard objective == .orpo, let context = chosen.context else { return weighted }
            let (contextLoss, contextDy) = try head(d[0], context, weight: 1)
            record.loss += part * pair.context * Double(contextLoss)
            return weighted + Float(part * pair.context) * contextDy
        }()
        try backward(&d, update: gather)

        if var d = waiting.take().map({ [weight * $0] }) {
            try backward(&d, first: 1, update: gather)
        } else {
            var d = try forward([rejected.example])
            d[0] = try head(d[0], rejected.example, weight: weight).dy
            try backward(&d, update: gather)
        }
    }

    /// The number of targets of a batch's chosen answers with their prompts, of each pair.
    private static func supervisedTargets(_ batch: [JudgedAnswer]) -> Double {
        let chosen = stride(from: 0, to: batch.count, by: 2).map { batch[$0] }
        let targets = chosen.reduce(0) { $0 + $1.example.counted.count + ($1.context?.counted.count ?? 0) }
        return Double(targets) / Double(chosen.count)
    }

    /// Each prompt of a batch with the answer of the record before it, the first with the last's.
    private func mismatched(_ batch: [JudgedAnswer]) -> [JudgedAnswer] {
        batch.indices.map { batch[$0].with(answerOf: batch[($0 + batch.count - 1) % batch.count]) }
    }

    // MARK: - Log-probabilities

    private func answer(_ judged: JudgedAnswer, loss: Float, _ objective: Objective) throws -> Answer {
        guard loss.isFinite else { throw try model.notFinite([judged.example]) }
        return Answer(
            logProbability: -Double(loss), reference: objective.hasReference ? try reference(judged) : 0,
            tokens: judged.example.counted.count)
    }

    /// log π₀ of an answer, computed once: π₀ is the model without adapters, or with those that the run began with.
    private func reference(_ judged: JudgedAnswer) throws -> Double {
        if let known = references[judged.source] { return Double(known) }
        let loss = try model.loss(judged.example) { [start] block, lora in
            try start?.read(block).asType(.float32) ?? MLXArray.zeros(like: lora)
        }
        guard loss.isFinite else { throw try model.notFinite([judged.example]) }
        references[judged.source] = -loss
        return Double(-loss)
    }
}

/// The sums over a step's pairs or answers.
private struct Record {
    var loss = 0.0
    private(set) var tokens = 0
    private var (chosen, rejected, ratios, right) = (0.0, 0.0, 0.0, 0.0)
    private var (chosenCount, rejectedCount, judged) = (0, 0, 0)
    private var kl: Double?
    private var hasRatios = true

    /// - Parameter part: the pair's share of the step's loss.
    mutating func add(_ pair: PairLoss, _ w: Answer, _ l: Answer, part: Double) {
        loss += part * pair.loss
        tokens += w.tokens + l.tokens
        chosen += pair.rewards.chosen
        rejected += pair.rewards.rejected
        ratios += (w.ratio + l.ratio) / 2
        right += pair.rewards.chosen > pair.rewards.rejected ? 1 : 0
        (chosenCount, rejectedCount, judged) = (chosenCount + 1, rejectedCount + 1, judged + 1)
    }

    mutating func add(
        _ answerLoss: AnswerLoss, _ answer: Answer, _ judged: JudgedAnswer, kl: Double, beta: Float?, part: Double
    ) {
        loss += part * answerLoss.loss
        tokens += answer.tokens
        self.judged += 1
        self.kl = (self.kl ?? 0) + part * kl
        right += (answer.ratio > kl) == judged.isGood ? 1 : 0
        if judged.isGood {
            (chosen, chosenCount) = (chosen + answerLoss.reward, chosenCount + 1)
        } else {
            (rejected, rejectedCount) = (rejected + answerLoss.reward, rejectedCount + 1)
        }
    }

    mutating func forgetRatios() { hasRatios = false }

    var figures: PreferenceFigures {
        func mean(_ sum: Double, _ count: Int) -> Float? { count > 0 ? Float(sum / Double(count)) : nil }
        let (chosen, rejected) = (mean(chosen, chosenCount), mean(rejected, rejectedCount))
        var figures = PreferenceFigures(rewardChosen: chosen, rewardRejected: rejected)
        figures.accuracy = mean(right, judged)
        figures.margin = chosen.flatMap { chosen in rejected.map { chosen - $0 } }
        figures.kl = kl.map { Float($0) } ?? (hasRatios ? mean(ratios, judged) : nil)
        return figures
    }
}
