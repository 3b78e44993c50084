import MLX

extension Trainer {
    /// One update from some batches of preference data: a batch's loss is the mean over its pairs or answers, the step's that of its
    /// batches. A gradient is the sum of each sequence's own, which the objective weights, so that one sequence's activations are there
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
                sums?.beginSums()
                for batch in batches {
                    try backpropagate(batch, objective, share: 1 / Double(batches.count), &record)
                }
                norm = try updateFromSums(number, try keys(number))
            }
            return record.result(gradientNorm: norm)
        }
    }

    /// One update from the pairs that were drawn, by `privateStep`. No pair's loss depends on another's.
    func step(
        drawn pairs: some Sequence<[JudgedAnswer]>, number: Int, _ objective: Objective, _ secret: SecretKey
    ) throws -> StepResult {
        var record = Record()
        let (count, norm) = try privateStep(pairs, number, secret) { pair in
            try backpropagate(pair, objective, share: 1, &record)
        }
        record.loss /= Double(max(count, 1))
        return record.result(gradientNorm: norm)
    }

    /// The mean loss of pairs or answers, and what it says of them.
    func evaluate(_ batch: [JudgedAnswer], _ objective: Objective) throws -> StepResult {
        var record = Record()
        try score(batch, objective, share: 1, &record)
        return record.result()
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
                let pair = PreferenceLoss(
                    objective, chosen: chosen, rejected: rejected, supervisedTargets: supervised, settings)
                record.add(pair, of: [chosen, rejected], part: part)
                if let context {
                    record.loss += part * pair.context * Double(try model.loss(context, parameters: parameters))
                }
            }
        } else {
            let kl = PreferenceLoss.kl(try mismatched(batch).map(answer))
            for judged in batch {
                let answer = try answer(judged)
                record.add(
                    PreferenceLoss(answer, kl: kl, settings), of: [answer], kl: kl,
                    part: Double(share) / Double(batch.count))
            }
        }
        record.end(batch, objective)
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
            let kl = PreferenceLoss.kl(others)
            for judged in batch {
                _ = try reference(judged)  // before there are block inputs
                var d = try forward([judged.example])
                d[0] = try {
                    let (loss, dy) = try head(d[0], judged.example, weight: 1)
                    let answer = try answer(judged, loss: loss, objective)
                    let answerLoss = PreferenceLoss(answer, kl: kl, settings)
                    record.add(answerLoss, of: [answer], kl: kl, part: part)
                    return try clock.confirmed { Float(part * answerLoss.weights[0]) * dy }
                }()
                try backward(&d, update: gather)
            }
        }
        record.end(batch, objective)
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
        if objective.hasReference { _ = try reference(chosen) }  // before there are block inputs

        var d = try forward([chosen.example])
        var weight: Float = 0
        d[0] = try {
            let (loss, dy) = try head(d[0], chosen.example, weight: 1)
            let answer = try answer(chosen, loss: loss, objective)
            let pair = PreferenceLoss(
                objective, chosen: answer, rejected: other, supervisedTargets: supervisedTargets, settings)
            record.add(pair, of: [answer, other], part: part)
            weight = Float(part * pair.weights[1])
            guard objective == .orpo, let context = chosen.context else {
                return try clock.confirmed { Float(part * pair.weights[0]) * dy }
            }
            let (contextLoss, contextDy) = try head(d[0], context, weight: 1)
            record.loss += part * pair.context * Double(contextLoss)
            return try clock.confirmed {
                Float(part * pair.weights[0]) * dy + Float(part * pair.context) * contextDy
            }
        }()
        try backward(&d, update: gather)

        if let dy = waiting.take() {
            var d = [try clock.confirmed { weight * dy }]
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
            tokens: judged.example.counted.count, isGood: judged.isGood)
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
    private var (tokens, inputTokens) = (0, 0)
    private var (chosen, rejected, ratios, right) = (0.0, 0.0, 0.0, 0.0)
    private var (chosenCount, rejectedCount, judged) = (0, 0, 0)
    private var kl: Double?
    private var hasRatios = true

    /// - Parameter part: the share of the pair, or of the answer, of the step's loss.
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

    mutating func end(_ batch: [JudgedAnswer], _ objective: Objective) {
        inputTokens += batch.reduce(0) { $0 + $1.example.inputCount }
        hasRatios = objective.hasReference
    }

    func result(gradientNorm: Float? = nil) -> Trainer.StepResult {
        func mean(_ sum: Double, _ count: Int) -> Float? { count > 0 ? Float(sum / Double(count)) : nil }
        let (chosen, rejected) = (mean(chosen, chosenCount), mean(rejected, rejectedCount))
        return Trainer.StepResult(
            loss: Float(loss), tokens: tokens, inputTokens: inputTokens, gradientNorm: gradientNorm,
            margin: chosen.flatMap { chosen in rejected.map { chosen - $0 } }, accuracy: mean(right, judged),
            rewardChosen: chosen, rewardRejected: rejected,
            kl: kl.map { Float($0) } ?? (hasRatios ? mean(ratios, judged) : nil))
    }
}
