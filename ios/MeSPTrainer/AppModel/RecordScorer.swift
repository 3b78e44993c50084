import Foundation
import MeSP
import MeSPAdapters
import MeSPBundle
import MeSPCore
import MeSPFiles
import MeSPSentences

struct RecordScorer {
    let bundle: URL
    let tokenizer: any TextTokenizer
    let atBlock: () throws -> Void

    func score(_ records: [EvaluationRecord], adapters: URL?, report: (Int) -> Void) throws -> [ScorePart] {
        try atBlock()
        let evaluator = try Evaluator(ModelBundle(url: bundle), adapters: adapters.map { [.init($0)] } ?? [])
        let window = contextLength(of: bundle)
        return try records.enumerated().map { index, record in
            defer { report(index + 1) }
            do {
                return try score(record, evaluator, window)
            } catch let error as MeSPError {
                throw MeSPError("Record \(index + 1): \(error.sentence).")
            }
        }
    }

    private func score(_ record: EvaluationRecord, _ evaluator: Evaluator, _ window: Int) throws -> ScorePart {
        switch record {
        case .text(let text):
            var plain = PlainEncoder(tokenizer)
            let tokens = try plain.encode(text, addsSpecialTokens: false)
            let sum = try evaluator.logLikelihood(
                of: try [tokenizer.prefixToken] + tokens, window: window, atBlock: atBlock)
            return ScorePart(sum: -sum, weight: Double(tokens.count))
        case .question(let prompt, let choices, let answer):
            let (before, continuations) = try tokenizer.encode(prompt, followedBy: choices)
            let room = window + 1 - (continuations.map(\.count).max() ?? 0)
            guard room > 0 else { throw MeSPError("A choice is longer than the \(window) tokens that the model sees.") }
            let scores = try evaluator.scores(of: continuations, after: before.suffix(room), atBlock: atBlock)
            let best = scores.indices.max { scores[$0].logLikelihood < scores[$1].logLikelihood }
            return ScorePart(sum: best == answer ? 1 : 0)
        case .task(let conversation, let answer):
            let prompt = try tokenizer.encode(prompt: conversation)
            var request = Generator.Request(prompt: prompt.suffix(max(1, window - 256)))
            request.stop = endTokens(of: bundle, tokenizer)
            var written = [Int]()
            // An answer is incomplete if its generation was stopped.
            let summary = try evaluator.generator.generate(request, atBlock: atBlock) { written.append($0) }
            if summary.reason == .stopped { throw CancellationError() }
            return ScorePart(sum: trimmed(tokenizer.decode(written)) == trimmed(answer) ? 1 : 0)
        }
    }

    private func trimmed(_ text: String) -> String { text.trimmingCharacters(in: .whitespacesAndNewlines) }
}

extension TextTokenizer {
    /// The token placed before a text, so that the model also predicts the text's first token.
    fileprivate var prefixToken: Int {
        get throws {
            guard let token = beginOfText ?? endOfText else {
                throw MeSPError("The model has no token that begins or ends a text.")
            }
            return token
        }
    }

    /// Returns the token ids of a prompt and of its choices, as in `mesp evaluate`.
    ///
    /// Each choice is tokenized together with the prompt. White space at the end of the prompt belongs to the choice.
    func encode(_ prompt: String, followedBy choices: [String]) throws -> (prompt: [Int], choices: [[Int]]) {
        let kept = prompt.reversed().drop(while: \.isWhitespace).reversed().reduce(into: "") { $0.append($1) }
        let space = String(prompt.dropFirst(kept.count))
        var plain = PlainEncoder(self)
        if kept.isEmpty {
            return ([try prefixToken], try choices.map { try plain.encode(space + $0, addsSpecialTokens: false) })
        }
        let before = try plain.encode(kept, addsSpecialTokens: true)
        let texts = try choices.map { try plain.encode(kept + space + $0, addsSpecialTokens: true) }
        // A token that spans the prompt and the choice belongs to the choice.
        let common = texts.map { zip($0, before).prefix { $0 == $1 }.count }.min() ?? before.count
        guard common > 0 else { return ([try prefixToken], texts) }
        return (Array(before.prefix(common)), texts.map { Array($0.dropFirst(common)) })
    }
}

/// Returns the model's context length, but at most 2,048 to limit the memory of keys and values.
private func contextLength(of bundle: URL) -> Int {
    struct Config: Decodable {
        let positions: Int?
        enum CodingKeys: String, CodingKey { case positions = "max_position_embeddings" }
    }
    let json = regularFile(bundle.appendingPathComponent("config.json"))
    let config = json.flatMap { try? JSONDecoder().decode(Config.self, from: $0) }
    return min(max(config?.positions ?? 2048, 1), 2048)
}
