import Foundation
import MLX
import Testing

@testable import MeSPCore

@Suite(.serialized) struct EvaluatorTests {
    static let cases = Fixture.cases

    private func expected(_ fixture: Fixture, _ tokens: [Int]) throws -> [(logProbability: Double, isGreedy: Bool)] {
        let logits = try fixture.logits()
        let targets = MLXArray(tokens.dropFirst().map { Int32($0) })
        let logs = takeAlong(logits, targets[0..., .newAxis], axis: 1)[0..., 0] - logits.logSumExp(axis: -1)
        let isGreedy = logits.argMax(axis: -1) .== targets
        return zip(logs.asArray(Float.self), isGreedy.asArray(Bool.self)).map { (Double($0), $1) }
    }

    @Test(arguments: cases, [3, 256])
    func aContinuationsLikelihoodEqualsTheReference(_ folder: URL, _ chunk: Int) throws {
        let fixture = try Fixture(folder, "gradients")
        let tokens = try fixture.array("tokens").asArray(Int32.self).map { Int($0) }
        let expected = try expected(fixture, tokens)
        let adapters = try fixture.saveAdapters()
        let evaluator = Evaluator(try CachedModel(fixture.bundle, adapters: [.init(adapters)], chunk: chunk))
        for first in [1, tokens.count - 3] {
            let targets = expected[(first - 1)...]
            let sum = targets.reduce(0) { $0 + $1.logProbability }
            let (prompt, continuation) = (Array(tokens[..<first]), Array(tokens[first...]))
            let other = [Int](repeating: 3, count: 5)
            for choices in [[continuation], [[5], continuation, other]] {
                let score = try evaluator.scores(of: choices, after: prompt)[choices.count / 2]
                // The evaluator sums float32 numbers in another order than the reference.
                #expect(abs(score.logLikelihood - sum) < 1e-5 * Double(targets.count) * max(1, -sum))
                #expect(score.isGreedy == targets.allSatisfy(\.isGreedy))
            }
        }
        let whole = try evaluator.logLikelihood(of: tokens, window: tokens.count)
        #expect(abs(whole - expected.reduce(0) { $0 + $1.logProbability }) < 1e-5 * abs(whole))
    }

    @Test(arguments: [2, 4, 256]) func choicesAreScoredAsIfAlone(_ chunk: Int) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let evaluator = Evaluator(try CachedModel(fixture.bundle, chunk: chunk))
        let prompt = [7, 1, 2, 8, 2]
        let choices = [[5], [6, 7], [1, 2, 3, 4, 5, 6], [9], [8, 8, 8], [5, 6]]
        let together = try evaluator.scores(of: choices, after: prompt)
        for (choice, score) in zip(choices, together) {
            let alone = try evaluator.scores(of: [choice], after: prompt)
            // Scoring choices together changes the order of float32 sums.
            #expect(abs(score.logLikelihood - alone[0].logLikelihood) < 1e-4)
            #expect(score.isGreedy == alone[0].isGreedy)
        }
    }

    @Test func whatIsWrittenGreedilyIsGreedy() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let evaluator = try Evaluator(fixture.bundle)
        let written = try evaluator.generator.text([7, 1, 2], maxTokens: 6)
        let last = written.count - 1
        var other = written
        other[last] = (written[last] + 1) % fixture.bundle.architecture.vocabSize
        let scores = try evaluator.scores(of: [written, other], after: [7, 1, 2])
        #expect(scores.map(\.isGreedy) == [true, false])
        #expect(scores[0].logLikelihood > scores[1].logLikelihood)
    }

    @Test func aLongTextIsTakenInWindows() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let evaluator = try Evaluator(fixture.bundle)
        let text = (0..<10).map { ($0 * 37) % 300 }
        func sum(_ context: Range<Int>, _ targets: Range<Int>) throws -> Double {
            try evaluator.scores(of: [Array(text[targets])], after: Array(text[context]))[0].logLikelihood
        }
        let expected = try sum(0..<1, 1..<5) + sum(4..<5, 5..<9) + sum(5..<9, 9..<10)
        #expect(abs(try evaluator.logLikelihood(of: text, window: 4) - expected) < 1e-4)
        #expect(abs(try evaluator.logLikelihood(of: text, window: 9) - sum(0..<1, 1..<10)) < 1e-4)
    }

    @Test func whatCannotBeScoredIsSaid() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let evaluator = try Evaluator(fixture.bundle)
        let size = fixture.bundle.architecture.vocabSize
        #expect(message { _ = try evaluator.scores(of: [[1]], after: []) }.contains("The prompt must be"))
        #expect(message { _ = try evaluator.scores(of: [[1], []], after: [1]) }.contains("A continuation must be"))
        #expect(message { _ = try evaluator.scores(of: [[size]], after: [1]) }.contains("the token \(size)"))
        #expect(message { _ = try evaluator.logLikelihood(of: [1], window: 4) }.contains("at least two tokens"))
        #expect(message { _ = try evaluator.logLikelihood(of: [1, 2], window: 0) }.contains("window must be"))
        #expect(throws: CancellationError.self) {
            try evaluator.scores(of: [[1], [2, 3]], after: [1]) { throw CancellationError() }
        }
    }

    @Test func aLikelihoodThatIsNoNumberIsSaid() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let evaluator = try Evaluator(fixture.bundle, adapters: [.init(fixture.saveAdapters(scaledBy: 1e30))])
        #expect(message { _ = try evaluator.scores(of: [[1], [2]], after: [1]) }.contains("is not finite"))
        #expect(message { _ = try evaluator.logLikelihood(of: [1, 2], window: 4) }.contains("is not finite"))
    }
}
