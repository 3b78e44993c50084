import Foundation
import MLX
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPControl
@testable import MeSPCore

@Suite(.serialized) struct StrengthTests {
    private func result(limit: Double, forgets: Float, best: Float, curve: Float = 1, before: Float = 2) throws
        -> (LogRecord.Strength, evaluations: Int)
    {
        var evaluations = 0
        let chosen = try chosenStrength(
            step: 0, limit: limit, before: before,
            general: {
                evaluations += 1
                return 3 + forgets * $0 * $0
            },
            heldOut: {
                evaluations += 1
                return 0.5 + curve * ($0 - best) * ($0 - best)
            })
        return (chosen, evaluations)
    }

    @Test func staysWithinTheLimitAndCloseToIt() throws {
        let (found, evaluations) = try result(limit: 3, forgets: 0.1, best: 1)
        let rise = { (strength: Float) in expm1(Double(0.1 * strength * strength)) }
        #expect(rise(found.strength) <= 0.03 && rise(found.strength + 0.0625) > 0.03)
        #expect(found.generalBefore == 3 && found.generalAfter == 3 + 0.1 * found.strength * found.strength)
        #expect(evaluations <= 9)
    }

    @Test func keepsAdaptersThatForgetLittleAsTheyAre() throws {
        let (found, _) = try result(limit: 3, forgets: 0.01, best: 1)
        #expect(found.strength == 1 && found.lossAfter == 0.5)
    }

    @Test func takesLessWhereHeldOutLossIsLower() throws {
        let (found, _) = try result(limit: 3, forgets: 0, best: 0.5)
        #expect((0.4...0.6).contains(found.strength))
    }

    @Test func takesLessThanTheLimitWhereHeldOutLossIsLower() throws {
        let (found, _) = try result(limit: 3, forgets: 0.05, best: 0.3, before: 0.6)
        #expect((0.2...0.4).contains(found.strength))
        #expect(found.lossAfter < 0.6 && found.generalAfter < 3 + Float(log1p(0.03)))
    }

    @Test func keepsNoneThatDoNotLowerHeldOutLoss() throws {
        let (found, _) = try result(limit: 3, forgets: 0, best: 0, curve: 2, before: 0.5)
        #expect(found.strength == 0 && found.lossAfter == 0.5)
        #expect(found.generalBefore == 3 && found.generalAfter == 3)
    }

    @Test func keepsNoneThatForgetTooMuchAtAnyStrength() throws {
        #expect(try result(limit: 0, forgets: 1, best: 1).0.strength == 0)
    }

    private func settings(_ output: URL, _ tokens: [Int] = (0..<50).map { $0 * 7 % 60 }) throws -> RunSettings {
        var settings = try RunSettings.ofATest(output)
        settings.valBatches = 2
        let general = newFolder()
        let words = tokens.map { UInt32($0).littleEndian }
        try words.withUnsafeBytes { Data($0) }.write(to: general.appendingPathComponent("train.bin"))
        try general.appendingPathComponent("data.json").write(
            #"{"train": {"file": "train.bin", "tokens": \#(tokens.count)}}"#)
        settings.general = general.path
        return settings
    }

    private func forgotten(of run: URL) throws -> [Int] {
        let bundle = try ModelBundle(url: URL(fileURLWithPath: try RunSettings.ofATest(run).bundle))
        let evaluators = try [[], [WeightedAdapters(run.appendingPathComponent("adapters"))]].map {
            try Evaluator(bundle, adapters: $0)
        }
        let texts = (1..<60).map { step in (0..<50).map { $0 * step % 60 } }
        return try #require(
            try texts.first { text in
                let found = try evaluators.map { try -$0.logLikelihood(of: text, window: 20) }
                return found[1] > 1.01 * found[0]
            })
    }

    private func strength(_ folder: URL) throws -> LogRecord.Strength {
        try #require(try LogSummary(folder: folder).strength)
    }

    @Test func writesTheAdaptersAtTheirStrength() throws {
        let (plain, kept) = (temporaryFolder(), temporaryFolder())
        var settings = try RunSettings.ofATest(plain)
        settings.valBatches = 2
        try Run.run(settings)
        let learned = try #require(try LogSummary(folder: plain).evals.last)
        settings = try self.settings(kept, forgotten(of: plain))
        settings.maxForgetting = 0.2
        try Run.run(settings)
        let record = try strength(kept)
        #expect(0 < record.strength && record.strength < 1)
        #expect(record.generalAfter - record.generalBefore <= Float(log1p(0.002)))
        #expect(learned.loss <= record.lossAfter && record.lossAfter < record.lossBefore)
        let whole = try adapterArrays(of: plain)
        let scaled = Dictionary(
            uniqueKeysWithValues: whole.map { ($0, $0.hasSuffix("lora_b") ? $1 * record.strength : $1) })
        expectEqual(try adapterArrays(of: kept), scaled)

        (settings.resume, settings.steps) = (true, 8)
        try Run.run(settings)
        let summary = try LogSummary(folder: kept)
        (settings.output, settings.resume) = (plain.path, true)
        (settings.maxForgetting, settings.general) = (nil, nil)
        try Run.run(settings)
        #expect(summary.steps.map(\.loss) == (try LogSummary(folder: plain).steps.map(\.loss)))
    }

    @Test func theLossesAreThoseOfTheSavedAdapters() throws {
        let (kept, second) = (temporaryFolder(), temporaryFolder())
        var settings = try settings(kept)
        settings.maxForgetting = 0.2
        try Run.run(settings)
        let record = try strength(kept)
        settings = try self.settings(second)
        (settings.steps, settings.adapters) = (0, kept.appendingPathComponent("adapters").path)
        settings.maxForgetting = 100
        try Run.run(settings)
        let repeated = try strength(second)
        // The losses differ slightly, because B is rounded when it is multiplied by the strength.
        #expect(abs(repeated.lossBefore - record.lossAfter) <= 1e-6 * record.lossAfter)
        #expect(repeated.strength == 0)
        #expect(abs(repeated.generalBefore - record.generalBefore) <= 1e-6 * record.generalBefore)
        expectEqual(try adapterArrays(of: second), try adapterArrays(of: kept))
    }

    @Test func refusesASettingWithoutWhatItNeeds() throws {
        let output = temporaryFolder()
        var settings = try settings(output)
        #expect(message { try settings.check() }.contains("max_forgetting"))
        settings.maxForgetting = -1
        #expect(message { try settings.check() }.contains("max_forgetting must be at least 0"))
        (settings.maxForgetting, settings.valBatches) = (3, 0)
        #expect(message { try settings.check() }.contains("val_batches"))
        settings.valBatches = 2
        settings.general = newFolder().path
        #expect(message { try Run.run(settings) }.contains("holds no tokens"))
    }
}
