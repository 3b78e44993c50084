import Foundation
import MLX
import MeSPAdapters
import MeSPBundle
import MeSPSentences

/// An evaluator must not be used from several threads at once.
package struct Evaluator {
    package struct Score: Sendable, Equatable {
        /// log p(continuation | prompt) in nats: a sum over the continuation's tokens.
        package var logLikelihood = 0.0
        /// Whether greedy decoding would choose every token of the continuation.
        package var isGreedy = true
    }

    package let generator: Generator
    private let model: CachedModel
    /// The model without adapters; nil if `model` has none.
    private let base: CachedModel?

    /// - Parameter images: rows that stand for tokens below 0 in prompts: row r for the token -1 - r
    package init(_ bundle: ModelBundle, adapters: [WeightedAdapters] = [], images: ImageRows? = nil) throws {
        func model(_ adapters: [WeightedAdapters]) throws -> CachedModel {
            var model = try CachedModel(bundle, adapters: adapters)
            model.images = images
            return model
        }
        self.init(try model(adapters), base: adapters.isEmpty ? nil : try model([]))
    }

    init(_ model: CachedModel, base: CachedModel? = nil) {
        (self.model, self.base, generator) = (model, base, Generator(model))
    }

    /// - Parameters:
    ///   - continuations: token ids, at least one each.
    ///   - prompt: token ids, at least one.
    /// - Throws: `MeSPError`, also if a log-likelihood is not finite; the errors of `atBlock`.
    package func scores(
        of continuations: [[Int]], after prompt: [Int], atBlock: () throws -> Void = {}
    ) throws -> [Score] {
        try check(prompt, "The prompt")
        for continuation in continuations { try check(continuation, "A continuation") }
        let isShort = { (continuation: [Int]) in continuation.count <= model.chunk }
        guard continuations.count > 1, continuations.contains(where: isShort) else {
            return try continuations.map { try score(prompt + $0, from: prompt.count, atBlock) }
        }
        return try repeating(atBlock) {
            var cache = PromptCache()
            var last = MLXArray.zeros([1, model.bundle.architecture.hiddenSize], dtype: model.bundle.dtype)
            try model.forward(prompt[...], &cache, atBlock) { _, y in last = y[(y.dim(0) - 1)...] }
            var scores = [Score]()
            var group = [[Int]]()
            func finishGroup() throws {
                scores += try self.scores(of: group, last, cache, atBlock)
                group = []
            }
            for continuation in continuations {
                if group.reduce(continuation.count, { $0 + $1.count }) > model.chunk { try finishGroup() }
                if isShort(continuation) {
                    group.append(continuation)
                } else {
                    scores.append(try score(prompt + continuation, from: prompt.count, atBlock))
                }
            }
            try finishGroup()
            return scores
        }
    }

    /// Returns the sum of log p of a text's tokens except the first, in nats. Each token is predicted from at least one and at most `window` tokens
    /// before it.
    ///
    /// A long text is split into windows of `window` tokens, as in the rolling log-likelihood of lm-evaluation-harness.
    ///
    /// - Parameters:
    ///   - text: token ids, at least two.
    ///   - window: at least 1.
    package func logLikelihood(of text: [Int], window: Int, atBlock: () throws -> Void = {}) throws -> Double {
        try windows(of: text, window).reduce(0) { sum, each in
            try sum + score(each.tokens, from: each.first, atBlock).logLikelihood
        }
    }

    /// Returns the sum of KL(base ‖ model) over a text's tokens except the first, in nats. The base is the model without adapters. The windows are
    /// those of `logLikelihood`.
    package func divergence(of text: [Int], window: Int, atBlock: () throws -> Void = {}) throws -> Double {
        let windows = try windows(of: text, window)
        guard let base else { return 0 }
        return try windows.reduce(0) { sum, each in
            try repeating(atBlock) {
                let y = try outputs(base, each.tokens, from: each.first, atBlock)
                let other = try outputs(model, each.tokens, from: each.first, atBlock)
                return try model.bundle.withHead { weights in
                    defer { Memory.clearCache() }
                    let head = CrossEntropyHead(
                        weights: weights, architecture: model.bundle.architecture,
                        schedule: model.schedule(rows: y.dim(0), length: y.dim(0)))
                    let terms = try head.divergences(y, other, atBoundary: atBlock).numbers(Float.self)
                    return terms.reduce(sum) { $0 + Double($1) }
                }
            }
        }
    }

    /// Returns y `[n, hidden]` of the tokens that predict `tokens[first...]`, evaluated.
    private func outputs(
        _ model: CachedModel, _ tokens: [Int], from first: Int, _ atBlock: () throws -> Void
    ) throws -> MLXArray {
        var (cache, parts) = (PromptCache(), [MLXArray]())
        try model.forward(tokens.dropLast(), &cache, atBlock) { range, y in
            let counted = range.clamped(to: first - 1..<tokens.count)
            if !counted.isEmpty { parts.append(contiguous(y[(counted.lowerBound - range.lowerBound)...])) }
        }
        let all = concatenated(parts)
        eval(all)
        return all
    }

    /// Splits a text into windows. The tokens of a window from `first` on are predicted.
    private func windows(of text: [Int], _ window: Int) throws -> [(tokens: [Int], first: Int)] {
        try check(text, "The text")
        guard text.count >= 2 else { throw MeSPError("The text must be at least two tokens long.") }
        guard window >= 1 else { throw MeSPError("window must be at least 1.") }
        let window = min(window, text.count)
        return stride(from: 1, to: text.count, by: window).map { first in
            let end = min(first + window, text.count)
            let start = max(0, end - 1 - window)
            return (Array(text[start..<end]), first - start)
        }
    }

    // MARK: - Scores

    private func repeating<R>(_ atBlock: () throws -> Void, _ body: () throws -> R) throws -> R {
        try model.withDevice {
            try MLXErrors.repeating(
                beforeRetry: {
                    model.forget()
                    base?.forget()
                    try atBlock()
                }, body)
        }
    }

    private func score(_ tokens: [Int], from first: Int, _ atBlock: () throws -> Void) throws -> Score {
        try repeating(atBlock) {
            var score = Score()
            var cache = PromptCache()
            try model.forward(tokens.dropLast(), &cache, atBlock) { range, y in
                // The token at `first - 1` predicts the first scored token.
                let counted = range.clamped(to: first - 1..<tokens.count)
                guard !counted.isEmpty else { return }
                let targets = tokens[counted.lowerBound + 1...counted.upperBound]
                try score.add(scores(y[(counted.lowerBound - range.lowerBound)...], targets, atBlock)[...])
            }
            return score
        }
    }

    /// Returns the score of each continuation. The continuations together have at most `model.chunk` tokens.
    ///
    /// - Parameter last: y `[1, hidden]` of the prompt's last token, which predicts the first token of each continuation.
    private func scores(
        of continuations: [[Int]], _ last: MLXArray, _ cache: PromptCache, _ atBlock: () throws -> Void
    ) throws -> [Score] {
        guard !continuations.isEmpty else { return [] }
        let inputs = continuations.map { Array($0.dropLast()) }
        let branches = inputs.filter { !$0.isEmpty }
        let y = branches.isEmpty ? last : try model.forward(branches: branches, after: cache, atBlock)
        var rows = [MLXArray]()
        var next = 0
        for input in inputs {
            rows.append(last)
            if !input.isEmpty { rows.append(y[next..<next + input.count]) }
            next += input.count
        }
        var all = try scores(concatenated(rows), continuations.flatMap { $0 }[...], atBlock)[...]
        return try continuations.map { continuation in
            var score = Score()
            try score.add(all.prefix(continuation.count))
            all = all.dropFirst(continuation.count)
            return score
        }
    }

    /// Returns log p of each of n targets from the rows of y `[n, hidden]`, and whether the target is the likeliest token.
    private func scores(_ y: MLXArray, _ targets: ArraySlice<Int>, _ atBlock: () throws -> Void) throws
        -> [(logProbability: Float, isGreedy: Bool)]
    {
        try model.bundle.withHead { weights in
            let head = CrossEntropyHead(
                weights: weights, architecture: model.bundle.architecture,
                schedule: model.schedule(rows: targets.count, length: targets.count))
            let (losses, isLargest) = try head.scores(
                y, targets: targets.map { Int32($0) }, atBoundary: atBlock)
            defer { Memory.clearCache() }
            return try zip(losses.numbers(Float.self), isLargest.numbers(Bool.self)).map { (-$0, $1) }
        }
    }

    private func check(_ tokens: [Int], _ what: Sentence) throws {
        guard !tokens.isEmpty else { throw MeSPError("\(what) must be at least one token long.") }
        if let token = tokens.first(where: { !model.tokens.contains($0) }) {
            throw MeSPError("\(what) holds the token \(token), and the model has \(model.tokens.upperBound), from 0.")
        }
    }
}

extension Evaluator.Score {
    fileprivate mutating func add(_ tokens: ArraySlice<(logProbability: Float, isGreedy: Bool)>) throws {
        for token in tokens {
            logLikelihood += Double(token.logProbability)
            isGreedy = isGreedy && token.isGreedy
        }
        guard logLikelihood.isFinite else {
            throw MeSPError(
                "A log-likelihood is not finite: the adapters hold numbers that are too large; train them again.")
        }
    }
}
