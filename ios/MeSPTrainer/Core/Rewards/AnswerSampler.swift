import MLX
import MeSPBundle

package struct AnswerGroup: Encodable, Sendable {
    package let prompt: [Int]
    /// The answer in the data, without its end token.
    package let reference: [Int]
    /// The sampled answers, without their end tokens.
    package let answers: [[Int]]
}

extension BlockwiseModel {
    /// - Parameters:
    ///   - prompts: sequences of the data, whose `Example.prompt` is the prompt
    ///   - number: the number of the step, from 0, on which the seed of the sampling depends
    /// - Returns: the groups, and a sequence for each answer, with a loss on the answer's tokens and on the end token, if the answer has one.
    func sampleAnswers(
        to prompts: [Example], groupSize: Int, lengths: [Int], number: Int, cacheLimit: Int
    ) throws -> (groups: [AnswerGroup], examples: [[Example]]) {
        let longest = (lengths.last ?? 0) + 1
        let known = prompts.map { $0.prompt.map { Int($0) } }
        let seed = scattered(scattered(settings.seed) &+ UInt64(settings.firstStep + number))
        let requests = known.flatMap { Array(repeating: $0, count: groupSize) }.enumerated().map { index, prompt in
            var request = Generator.Request(prompt: prompt)
            request.maxTokens = min(settings.maxTokens, longest - prompt.count)
            (request.temperature, request.stop, request.seed) = (1, settings.stop, seed &+ UInt64(index))
            return request
        }
        var answers = [[Int]](repeating: [], count: requests.count)
        var ends = [Int?](repeating: nil, count: requests.count)
        let maps = bundle.maps
        let keptMaps = maps.areKept
        defer {
            maps.areKept = keptMaps
            Memory.clearCache()
        }
        let generator = Generator(CachedModel(bundle, with: try lora.adapters()))
        try generator.generate(
            requests, atOnce: min(requests.count, CachedModel.mostTexts), cacheLimit: cacheLimit,
            atBlock: work.atBlock,
            onToken: { answers[$0].append($1) },
            onEnd: { index, summary in
                if summary.reason == .stopped { throw CancellationError() }
                ends[index] = summary.stopToken
            })
        var (groups, examples) = ([AnswerGroup](), [[Example]]())
        for (index, prompt) in known.enumerated() {
            let own = index * groupSize..<(index + 1) * groupSize
            let reference = Array(prompts[index].targets.map { Int($0) }.prefix { !settings.stop.contains($0) })
            groups.append(AnswerGroup(prompt: prompt, reference: reference, answers: Array(answers[own])))
            examples.append(
                own.map { text in
                    let answer = answers[text] + (ends[text].map { [$0] } ?? [])
                    return Example(prompt: prompts[index].prompt, answer: answer.map { Int32($0) }, lengths: lengths)
                })
        }
        return (groups, examples)
    }
}
