import MeSPBundle

extension TokenStream.Sequences {
    /// Returns the mean loss of the first `count` sequences, in nats per token, and the number of tokens with a loss.
    func meanLoss(_ model: BlockwiseModel, first count: Int) throws -> (loss: Float, tokens: Int) {
        var (sum, tokens) = (Float(0), 0)
        for index in 0..<min(count, self.count) {
            let example = self[index]
            sum += try model.loss(example)
            tokens += example.counted.count
        }
        return (sum / Float(tokens), tokens)
    }
}

extension TokenStream.Sequences {
    /// Returns the mean KL divergence from the base model on the first `count` sequences, in nats per token.
    func meanDivergence(_ model: BlockwiseModel, first count: Int) throws -> Float {
        let examples = (0..<min(count, self.count)).map { self[$0] }
        let sum = try examples.reduce(0) { try $0 + model.divergence($1) }
        return Float(sum / Double(examples.reduce(0) { $0 + $1.counted.count }))
    }
}

extension Splits {
    func evaluate(
        _ sequences: TokenStream.Sequences, _ objective: Objective, _ trainer: Trainer, _ record: inout LogRecord.Eval
    ) throws {
        let batches = preferenceBatches(of: sequences, split: record.split == "valid" ? 1 : 2, objective)
        var (margin, accuracy) = ([Float](), [Float]())
        for batch in batches {
            let result = try PreferenceBatch(batch, objective).evaluated(trainer)
            record.loss += result.loss / Float(batches.count)
            record.tokens += result.tokens
            margin += result.margin.map { [$0] } ?? []
            accuracy += result.accuracy.map { [$0] } ?? []
        }
        func mean(_ values: [Float]) -> Float? { values.isEmpty ? nil : values.reduce(0, +) / Float(values.count) }
        (record.margin, record.accuracy) = (mean(margin), mean(accuracy))
    }
}
