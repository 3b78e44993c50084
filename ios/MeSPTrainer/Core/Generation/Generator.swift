import Foundation
import MLX
import MeSPAdapters
import MeSPBundle
import MeSPSentences

/// A generator of text that continues a prompt, with a bundle's model and optional adapters.
///
/// A generator must not be used from several threads at once.
public struct Generator {
    package struct Request: Codable, Sendable, Equatable {
        /// The token ids of the prompt, at least one.
        package var prompt: [Int]
        package var maxTokens = 256
        /// At 0 decoding is greedy. Otherwise tokens are sampled from softmax(logits / temperature).
        package var temperature: Float = 0
        /// The next token is sampled from the smallest set of likeliest tokens whose probability is at least this number. The probabilities are those
        /// at temperature 1.
        package var topP: Float = 1
        package var seed: UInt64 = 0
        /// The tokens that end the text; they are not part of it.
        package var stop: [Int] = []

        package init(prompt: [Int]) { self.prompt = prompt }
    }

    public struct Summary: Codable, Sendable, Equatable {
        package let reason: Reason
        public let tokens: Int
        /// The time in seconds until the first token could be chosen.
        package let promptSeconds: Double
        /// The time in seconds after `promptSeconds` until the text ended.
        public let seconds: Double
        package let footprintPeakBytes: Int
        package let adapterBytes: Int
        package let stopToken: Int?

        /// The reason why a text ended: a token of `stop`, `maxTokens`, or `CancellationError`.
        package enum Reason: String, Codable, Sendable { case stop, length, stopped }
    }

    private var model: CachedModel

    package init(_ bundle: ModelBundle, adapters: [WeightedAdapters] = []) throws {
        self.init(try CachedModel(bundle, adapters: adapters))
    }

    init(_ model: CachedModel) { self.model = model }

    /// Replaces the adapters for the next texts.
    ///
    /// - Throws: the errors of `init`; the generator then keeps its adapters.
    package mutating func use(_ adapters: [WeightedAdapters]) throws { try model.use(adapters) }

    /// - Parameters:
    ///   - atBlock: called before each block, and within blocks while a GPU compiles their kernels; it may wait. `CancellationError` from it, or from
    ///     `onToken`, ends the text as `stopped`.
    @discardableResult
    package func generate(
        _ request: Request, atBlock: () throws -> Void = {}, onToken: (Int) throws -> Void
    ) throws -> Summary {
        var cache = PromptCache()
        return try generate(request, continuing: &cache, atBlock: atBlock, onToken: onToken)
    }

    /// Generates a text as ``generate(_:atBlock:onToken:)`` does, but reads only the part of the prompt that is not in `cache`.
    ///
    /// - Parameters:
    ///   - cache: a cache of the same model, or an empty one. Afterwards it contains the tokens of the prompt and of the text that the model has
    ///     read. If it is larger than its limit, it is cut back.
    /// - Throws: `MeSPError`, and other errors of `atBlock` and `onToken`. The cache is then empty, except after an invalid request.
    @discardableResult
    package func generate(
        _ request: Request, continuing cache: inout PromptCache, atBlock: () throws -> Void = {},
        onToken: (Int) throws -> Void
    ) throws -> Summary {
        try request.check(tokens: model.tokens)
        cache.ready(for: model.selection)
        do {
            return try model.withDevice {
                defer { cache.end() }
                var summary: Summary?
                try write(
                    [Text(index: 0, request: request, cache: cache)], atOnce: 1, cacheLimit: .max, atBlock,
                    onToken: { try onToken($1) },
                    onEnd: { text, ended in (cache, summary) = (text.cache, ended) })
                guard let summary else { preconditionFailure("a text that did not end") }
                return summary
            }
        } catch {
            cache = cache.emptied()  // its last arrays may not be valid
            throw error
        }
    }

    /// Generates several texts, up to `atOnce` of them in one batch.
    ///
    /// - Parameters:
    ///   - atOnce: the maximum batch size, from 1 to 16. When one text ends, the next begins.
    ///   - cacheLimit: the maximum size of the running texts' caches, in bytes. If their caches would be larger, fewer texts run together.
    ///   - atBlock: called as for one text; `CancellationError` from it ends all texts as `stopped`.
    ///   - onToken: gets the index of a request and the next token's id; `CancellationError` from it ends this text as `stopped`.
    ///   - onEnd: gets the index of a request and the summary of its text, in the order in which texts end.
    package func generate(
        _ requests: [Request], atOnce: Int, cacheLimit: Int = Generator.cacheLimit, atBlock: () throws -> Void = {},
        onToken: (_ request: Int, _ token: Int) throws -> Void, onEnd: (_ request: Int, Summary) throws -> Void
    ) throws {
        try require(
            (1...CachedModel.mostTexts).contains(atOnce), "at_once", "at least 1 and at most \(CachedModel.mostTexts)")
        for request in requests { try request.check(tokens: model.tokens) }
        try model.withDevice {
            let texts = requests.enumerated().map { Text(index: $0, request: $1, cache: PromptCache()) }
            try write(
                texts, atOnce: atOnce, cacheLimit: cacheLimit, atBlock, onToken: onToken,
                onEnd: { try onEnd($0.index, $1) })
        }
    }

    /// A quarter of the memory that the process may take, in bytes.
    package static var cacheLimit: Int {
        min(systemMemoryLimit() ?? .max, Int(ProcessInfo.processInfo.physicalMemory)) / 4
    }

    // MARK: - Writing

    private struct Text {
        let index: Int
        let request: Request
        var cache: PromptCache
        private(set) var random: MLXRandom.RandomState
        var begin, first: ContinuousClock.Instant?
        private(set) var written = [Int]()
        private var count = 0
        /// The last token, which is not in the cache yet.
        var last = 0

        init(index: Int, request: Request, cache: PromptCache) {
            (self.index, self.request, self.cache) = (index, request, cache)
            random = MLXRandom.RandomState(seed: request.seed)
        }

        /// Returns the text with an empty cache, for a new start after a failure.
        func begunAgain() -> Text {
            var text = self
            (text.cache, text.count) = (cache.emptied(), 0)
            text.random = MLXRandom.RandomState(seed: request.seed)
            return text
        }

        var known: Int? { count < written.count ? written[count] : nil }

        /// Takes the next token.
        ///
        /// - Parameter tell: called with the token unless the token is in `request.stop` or was already written.
        /// - Returns: the reason why the text ends with the token; nil if the text continues.
        mutating func take(_ token: Int, tell: (Int, Int) throws -> Void) throws -> Summary.Reason? {
            last = token
            if request.stop.contains(token) { return .stop }
            if known == nil {
                do { try tell(index, token) } catch is CancellationError { return .stopped }
                written.append(token)
            }
            count += 1
            return count == request.maxTokens ? .length : nil
        }
    }

    private func write(
        _ all: [Text], atOnce: Int, cacheLimit: Int, _ atBlock: () throws -> Void,
        onToken: (Int, Int) throws -> Void, onEnd: (Text, Summary) throws -> Void
    ) throws {
        let sampler = FootprintSampler()
        defer { sampler.stop() }
        func end(_ text: Text, _ reason: Summary.Reason) throws {
            let start = text.first ?? .now
            let summary = Summary(
                reason: reason, tokens: text.written.count,
                promptSeconds: (start - (text.begin ?? start)) / .seconds(1),
                seconds: (ContinuousClock.now - start) / .seconds(1), footprintPeakBytes: sampler.takePeak(),
                adapterBytes: model.adapterBytes, stopToken: reason == .stop ? text.last : nil)
            try onEnd(text, summary)
        }
        var (waiting, texts) = (all[...], [Text]())
        // The last prompt, and the cache and the logits after this prompt. The next text reuses them if it has the same prompt.
        var read: (prompt: [Int], cache: PromptCache, logits: MLXArray)?
        func addTokens() throws {
            while texts.count < atOnce, let next = waiting.first, hasRoom(for: next, beside: texts, cacheLimit) {
                waiting.removeFirst()
                texts.append(next)
                let i = texts.count - 1
                texts[i].begin = next.begin ?? .now
                let logits: MLXArray
                if let read, read.prompt == next.request.prompt, next.cache.size == 0 {
                    (texts[i].cache, logits) = (read.cache, read.logits)
                } else {
                    let prompt = texts[i].cache.begin(next.request.prompt)
                    logits = try self.logits(prompt, &texts[i].cache, atBlock)
                }
                read =
                    waiting.first?.request.prompt == next.request.prompt
                    ? (next.request.prompt, texts[i].cache, logits) : nil
                texts[i].first = next.first ?? .now
                let token = try choose(logits, texts[i])
                if let reason = try texts[i].take(token, tell: onToken) { try end(texts.removeLast(), reason) }
            }
            guard !texts.isEmpty else { return }
            let tokens = try nextTokens(&texts, atBlock)
            let reasons = try texts.indices.map { try texts[$0].take(tokens[$0], tell: onToken) }
            let ended = zip(texts, reasons)
            texts = ended.filter { $0.1 == nil }.map(\.0)
            for (text, reason) in ended { if let reason { try end(text, reason) } }
        }
        func beginAgain() throws {
            waiting = texts.map { $0.begunAgain() } + waiting
            (texts, read) = ([], nil)
            model.forget()
            try atBlock()
        }
        do {
            while !(waiting.isEmpty && texts.isEmpty) {
                // The token's number, which is read last, confirms the arrays.
                try MLXErrors.repeating(confirms: false, beforeRetry: beginAgain, addTokens)
            }
        } catch is CancellationError {
            for text in texts + waiting { try end(text, .stopped) }
        }
    }

    private func nextTokens(_ texts: inout [Text], _ atBlock: () throws -> Void) throws -> [Int] {
        var caches = texts.map(\.cache)
        // The texts give up their caches, because keys and values are written in place only if no other reference exists.
        for i in texts.indices { texts[i].cache = PromptCache() }
        defer { for i in texts.indices { texts[i].cache = caches[i] } }
        let logits = try project(model.forward(next: texts.map(\.last), &caches, atBlock))
        let likeliest = logits.argMax(axis: -1)
        let isGreedy = texts.allSatisfy { $0.request.temperature <= 0 }
        let tokens =
            isGreedy
            ? likeliest
            : stacked(texts.enumerated().map { i, text in drawn(logits[i], text.request, text.random) ?? likeliest[i] })
        // Evaluating y also evaluates attention's keys and values, but not the last recurrent states.
        let chosen = try Self.read(tokens, of: logits, evaluating: caches.flatMap(\.recurrentStates))
        Memory.clearCache()
        return zip(texts, chosen).map { text, token in text.known ?? token }
    }

    private func hasRoom(for next: Text, beside texts: [Text], _ limit: Int) -> Bool {
        guard !texts.isEmpty else { return true }
        // The bound avoids an overflow of the cache's size.
        let longest = 1 << 32
        let sizes = (texts + [next]).map {
            model.cacheSize(
                tokens: $0.request.prompt.count + min($0.request.maxTokens, longest), like: texts.first?.cache)
        }
        return sizes.reduce(0, +) <= limit
    }

    private func choose(_ logits: MLXArray, _ text: Text) throws -> Int {
        let token = try choose(logits, text.request, text.random)
        return text.known ?? token
    }

    // MARK: - Forward

    /// Returns the logits `[vocabulary]` (float32, evaluated) of the token after `tokens`.
    func logits(
        _ tokens: ArraySlice<Int>, _ cache: inout PromptCache, _ atBlock: () throws -> Void
    ) throws -> MLXArray {
        var last = MLXArray.zeros([1, model.bundle.architecture.hiddenSize], dtype: model.bundle.dtype)
        try model.forward(tokens, &cache, atBlock) { _, y in last = y[(y.dim(0) - 1)...] }
        let logits = try project(last)[0]
        try logits.compute()
        return logits
    }

    private func project(_ y: MLXArray) throws -> MLXArray {
        try model.bundle.withHead { weights in
            let logits = CrossEntropyHead(
                weights: weights, architecture: model.bundle.architecture, schedule: model.schedule(rows: 1, length: 1)
            ).logits(y)
            if !model.bundle.maps.areKept { eval(logits) }
            return logits
        }
    }

    // MARK: - Choice

    /// Returns the likeliest token, or a token sampled from the tokens that `topP` leaves. With the same seed, mlx-lm's `make_sampler` samples the
    /// same token.
    func choose(_ logits: MLXArray, _ request: Request, _ random: MLXRandom.RandomState) throws -> Int {
        try Self.read((drawn(logits, request, random) ?? logits.argMax())[.newAxis], of: logits[.newAxis])[0]
    }

    /// Returns the numbers of the tokens `[n]` that were chosen from `logits` `[n, vocabulary]`. Evaluates `states` with them.
    private static func read(
        _ tokens: MLXArray, of logits: MLXArray, evaluating states: [MLXArray] = []
    ) throws -> [Int] {
        // One wait serves the tokens and the question whether the logits are finite: 0 times another number is NaN.
        let tokens = which((logits * 0).sum(axis: -1) .== 0, tokens.asType(Int.dtype), -1)
        eval([tokens] + states)
        let numbers = try tokens.numbers(Int.self)
        guard numbers.allSatisfy({ $0 >= 0 }) else {
            throw MeSPError(
                "The logits are not finite: the adapters hold numbers that are too large; train them again.")
        }
        return numbers
    }

    private func drawn(_ logits: MLXArray, _ request: Request, _ random: MLXRandom.RandomState) -> MLXArray? {
        guard request.temperature > 0 else { return nil }
        var logits = logits - logits.max()  // the likeliest token's logit stays 0 at every temperature
        if request.topP < 1 {
            // Computed indices would be addresses, and after an error of the GPU they would be garbage. So nothing is gathered.
            let ascending = sorted(logits)
            let isTaken = cumsum(softmax(ascending), reverse: true, inclusive: false) .< request.topP
            let least = -which(isTaken, -ascending, -Float.infinity).max()
            let (isAbove, isLeast) = (logits .> least, (logits .== least).asType(.int32))
            // Of the tokens that are as likely as the least likely one, only the last may be taken.
            let ofLeast = isTaken.asType(.int32).sum() - isAbove.asType(.int32).sum()
            let isLast = logicalAnd(isLeast .> 0, cumsum(isLeast, reverse: true) .< ofLeast + 1)
            logits = which(isAbove, logits, which(isLast, logits, -Float.infinity))
        }
        let factor = min(1 / request.temperature, Float.greatestFiniteMagnitude)
        return MLXRandom.categorical(logits * factor, key: random)
    }
}

extension Generator.Request {
    func check(tokens: Range<Int>) throws {
        guard !prompt.isEmpty else { throw MeSPError("The prompt must be at least one token long.") }
        if let token = prompt.first(where: { !tokens.contains($0) }) {
            throw MeSPError("The prompt holds the token \(token), and the model has \(tokens.upperBound), from 0.")
        }
        try require(maxTokens >= 1, "max_tokens", "at least 1")
        try require(temperature.isFinite && temperature >= 0, "temperature", "0 or a positive number")
        try require(topP > 0 && topP <= 1, "top_p", "above 0 and at most 1")
    }
}
