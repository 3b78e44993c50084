import Foundation
import MLX
import MeSPFiles

/// Writes on from a prompt, with a bundle's model and, where they are given, adapters. Weights are mapped, so the footprint is that of
/// the adapters, the keys and values of the tokens so far, and one block's activations.
///
///     let generator = try Generator(bundle, adapters: folder)
///     try generator.generate(.init(prompt: tokens), atBlock: Task.checkCancellation) { show($0) }
///
/// Not for use from several threads at once.
public struct Generator {
    /// The prompt, and how to choose tokens.
    public struct Request: Codable, Sendable, Equatable {
        /// Token ids, at least one.
        public var prompt: [Int]
        public var maxTokens = 256
        /// 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature).
        public var temperature: Float = 0
        /// Draws only from the fewest tokens whose probabilities, before the temperature, add up to this.
        public var topP: Float = 1
        /// The same seed draws the same tokens.
        public var seed: UInt64 = 0
        /// Tokens that end the text; they are not part of it.
        public var stop: [Int] = []

        public init(prompt: [Int]) { self.prompt = prompt }
    }

    /// How a generation went.
    public struct Summary: Codable, Sendable, Equatable {
        public let reason: Reason
        public let tokens: Int
        /// Until the first token could be chosen.
        public let promptSeconds: Double
        /// From then on.
        public let seconds: Double
        public let footprintPeakBytes: Int

        /// A token of `stop`, `maxTokens` reached, or `CancellationError`.
        public enum Reason: String, Codable, Sendable { case stop, length, stopped }
    }

    private let model: CachedModel
    /// Rows of the vocabulary whose logits are computed at once.
    private static let vocabularyTile = 1 << 14

    /// - Parameters:
    ///   - bundle: the model.
    ///   - folder: adapters as mlx-lm or PEFT writes them; nil for the base model.
    public init(_ bundle: ModelBundle, adapters folder: URL? = nil) throws {
        self.init(try CachedModel(bundle, adapters: folder))
    }

    init(_ model: CachedModel) { self.model = model }

    /// Calls `onToken` with each token as it is chosen.
    ///
    /// - Parameters:
    ///   - request: the prompt, and how tokens are chosen.
    ///   - atBlock: called before each block; `CancellationError` from it, or from `onToken`, ends the text as `stopped`.
    ///   - onToken: gets the token's id.
    /// - Returns: how many tokens, how fast, and why the text ended.
    /// - Throws: `MeSPError`, and what `onToken` throws.
    @discardableResult
    public func generate(
        _ request: Request, atBlock: () throws -> Void = {}, onToken: (Int) throws -> Void
    ) throws -> Summary {
        var cache = PromptCache()
        return try generate(request, continuing: &cache, atBlock: atBlock, onToken: onToken)
    }

    /// As ``generate(_:atBlock:onToken:)``, and reads of the prompt only what comes after what `cache` has of it.
    ///
    /// - Parameters:
    ///   - request: the prompt, and how tokens are chosen.
    ///   - cache: of the same model and adapters, or empty. It then has this prompt and its text, but for the last token.
    ///   - atBlock: called before each block; `CancellationError` from it, or from `onToken`, ends the text as `stopped`.
    ///   - onToken: gets the token's id.
    /// - Returns: how many tokens, how fast, and why the text ended.
    /// - Throws: `MeSPError`, and what `onToken` throws.
    @discardableResult
    public func generate(
        _ request: Request, continuing cache: inout PromptCache, atBlock: () throws -> Void = {},
        onToken: (Int) throws -> Void
    ) throws -> Summary {
        try request.check(vocabulary: model.bundle.architecture.vocabSize)
        do {
            return try model.bundle.withDevice {
                defer { cache.end() }
                return try write(request, &cache, atBlock, onToken)
            }
        } catch {
            cache = PromptCache(limit: cache.limit)  // its last arrays may not be whole
            throw error
        }
    }

    private func write(
        _ request: Request, _ cache: inout PromptCache, _ atBlock: () throws -> Void, _ onToken: (Int) throws -> Void
    ) throws -> Summary {
        let sampler = FootprintSampler()
        defer { sampler.stop() }
        let begin = Date.now
        var (first, count) = (Date?.none, 0)
        func summary(_ reason: Summary.Reason) -> Summary {
            let start = first ?? Date.now
            return Summary(
                reason: reason, tokens: count, promptSeconds: start.timeIntervalSince(begin),
                seconds: Date.now.timeIntervalSince(start), footprintPeakBytes: sampler.takePeak())
        }

        let random = MLXRandom.RandomState(seed: request.seed)
        do {
            var logits = try logits(cache.begin(request.prompt), &cache, atBlock)
            first = Date.now
            while true {
                let token = try choose(logits, request, random)
                if request.stop.contains(token) { return summary(.stop) }
                try onToken(token)
                count += 1
                if count == request.maxTokens { return summary(.length) }
                logits = try self.logits([token], &cache, atBlock)
            }
        } catch is CancellationError {
            return summary(.stopped)
        }
    }

    // MARK: - Forward

    /// The logits `[vocabulary]` (float32, evaluated) of the token that comes after `tokens`, which follow those in the cache.
    func logits(
        _ tokens: ArraySlice<Int>, _ cache: inout PromptCache, _ atBlock: () throws -> Void
    ) throws -> MLXArray {
        var last = MLXArray.zeros([1, model.bundle.architecture.hiddenSize], dtype: model.bundle.dtype)
        try model.forward(tokens, &cache, atBlock) { _, y in last = y[(y.dim(0) - 1)...] }
        return try model.bundle.withHead { weights in
            CrossEntropyHead(
                weights: weights, architecture: model.bundle.architecture, tile: Self.vocabularyTile
            ).logits(last)[0]
        }
    }

    // MARK: - Choice

    /// As mlx-lm's `make_sampler`: the likeliest token, or one drawn from those that `topP` leaves. The same seed draws the same tokens
    /// there: the noise belongs to the tokens in the vocabulary's order.
    func choose(_ logits: MLXArray, _ request: Request, _ random: MLXRandom.RandomState) throws -> Int {
        guard request.temperature > 0 else { return try logits.argMax().number(Int.self) }
        var logits = logits - logits.max()  // the likeliest stays 0, however low the temperature
        if request.topP < 1 {
            let order = argSort(logits)
            let likelier = cumsum(softmax(logits.take(order)), reverse: true, inclusive: false)
            logits = which(likelier.take(argSort(order)) .< request.topP, logits, -Float.infinity)
        }
        return try MLXRandom.categorical(logits * (1 / request.temperature), key: random).number(Int.self)
    }
}

extension Generator.Request {
    func check(vocabulary: Int) throws {
        func require(_ condition: Bool, _ name: String, _ wanted: Sentence) throws {
            guard condition else { throw MeSPError("\(name) must be \(wanted).") }
        }
        guard !prompt.isEmpty else { throw MeSPError("The prompt must be at least one token long.") }
        if let token = prompt.first(where: { !(0..<vocabulary).contains($0) }) {
            throw MeSPError("The prompt holds the token \(token), and the model has \(vocabulary), from 0.")
        }
        try require(maxTokens >= 1, "max_tokens", "at least 1")
        try require(temperature.isFinite && temperature >= 0, "temperature", "0 or a positive number")
        try require(topP > 0 && topP <= 1, "top_p", "above 0 and at most 1")
    }
}

/// The input of `mesp-engine generate`: a bundle's folder, an adapter folder or null, and a request.
public struct GenerationSettings: Decodable, Sendable {
    public let bundle: String
    public let adapters: String?
    public let request: Generator.Request

    /// Reads a settings file (snake-case JSON, every key present).
    public init(contentsOf url: URL) throws { self = try readSettings(url) }

    public init(from decoder: any Decoder) throws {
        enum Key: String, CodingKey { case bundle, adapters }
        let container = try decoder.container(keyedBy: Key.self)
        bundle = try container.decode(String.self, forKey: .bundle)
        adapters = try container.decodeIfPresent(String.self, forKey: .adapters)
        request = try Generator.Request(from: decoder)
    }
}
