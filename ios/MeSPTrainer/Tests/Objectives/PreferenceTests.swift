import Foundation
import MLX
import Testing

@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct PreferenceTests {
    private func answers(_ fixture: Fixture) throws -> [PreferenceAnswer] {
        let length = fixture.length + 1
        let tokens = try fixture.array("answers").asArray(Int32.self)
        let (prompts, lengths) = (
            try fixture.array("prompts").asArray(Int32.self), try fixture.array("lengths").asArray(Int32.self)
        )
        return (0..<2).map { index -> PreferenceAnswer in
            let sequence = tokens[index * length..<(index + 1) * length]
            let counted = Int(prompts[index]) - 1..<Int(lengths[index]) - 1
            let number = Int32(index)
            return PreferenceAnswer(
                example: Example(tokens: Array(sequence), counted: Array(counted)), isGood: index == 0,
                source: .init(split: 0, prompt: number, answer: number), lengths: [fixture.length])
        }
    }

    /// With a learning rate this high, the parameters change enough in one SGD step to compute the gradient from the change.
    private static let rate: Float = 1e5

    private func trainer(_ fixture: Fixture, _ objective: Objective, plan: Plan = Plan(tileBytes: 1 << 20)) throws
        -> Trainer
    {
        try fixture.trainer(.mesp, plan: plan) { settings in
            (settings.objective, settings.learningRate, settings.batchSize) = (objective, Self.rate, 2)
        }
    }

    private static let trained = Fixture.cases.flatMap { folder in
        let isPlain = folder.lastPathComponent.hasPrefix("tied")
        return (isPlain ? Objective.allCases : [.orpo, .kto]).map { (folder, $0) }
    }

    @Test(arguments: trained)
    func trainsAsTheReference(_ folder: URL, _ objective: Objective) throws {
        let fixture = try Fixture(folder, "gradients")
        try fixture.bundle.withDevice {
            let trainer = try trainer(fixture, objective)
            try fixture.restore(trainer)
            let answers = try answers(fixture)
            let expected = try fixture.array("\(objective.rawValue).loss").item(Float.self)
            let evaluation = try PreferenceBatch(answers, objective).evaluated(trainer)
            #expect(abs(evaluation.loss - expected) <= 1e-4 * abs(expected))

            let result = try trainer.step([PreferenceBatch(answers, objective)], number: 0)
            #expect(abs(result.loss - expected) <= 1e-4 * abs(expected))
            #expect(result.tokens == answers.reduce(0) { $0 + $1.example.counted.count })
            for block in trainer.model.blocks {
                let old = try fixture.array("lora.\(block)")
                let gradient = (old - (try trainer.model.lora.vectors.read(block))) / Self.rate
                let error = relativeError(gradient, try fixture.array("\(objective.rawValue).grad.\(block)"))
                #expect(error < 1e-4, "block \(block)")
            }
            let margin = try #require(evaluation.margin)
            #expect(abs(margin - (try #require(result.margin))) < 1e-4)
            #expect((evaluation.kl == nil) == !objective.hasReference)
            #expect((evaluation.accuracy ?? -1) >= 0)
        }
    }

    @Test(arguments: Objective.allCases.filter(\.takesPairs))
    func anAnswerThatWaitsRunsForwardOnce(_ objective: Objective) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        func step(_ plan: Plan) throws -> (boundaries: Int, [MLXArray]) {
            let trainer = try trainer(fixture, objective, plan: plan)
            try fixture.restore(trainer)
            var boundaries = 0
            trainer.work.atBlock = { boundaries += 1 }
            let batch = PreferenceBatch(try answers(fixture), objective, share: 0.5)
            _ = try trainer.step([batch, batch], number: 0)
            #expect((trainer.writtenBytes > 0) == (plan.offload != .none))
            return (boundaries, try trainer.model.blocks.map { try trainer.model.lora.vectors.read($0) })
        }
        var plan = Plan(tileBytes: 1 << 20)
        let (boundaries, expected) = try step(plan)
        let blocks = expected.count
        plan.keepsAnswer = true
        for (offload, kept) in [(RunSettings.Offload.none, 0), (.none, 2), (.inputs, 1), (.all, 0)] {
            (plan.offload, plan.keptBlocks) = (offload, kept)
            let (fewer, found) = try step(plan)
            #expect(boundaries - fewer > 2 * blocks, "in each of two batches a boundary a block, and the head's")
            for (found, expected) in zip(found, expected) { #expect(relativeError(found, expected) < 1e-5) }
        }
    }

    @Test func aRunBeginsWithoutAPreference() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let result = try PreferenceBatch(answers(fixture), .dpo).evaluated(trainer(fixture, .dpo))
        #expect(abs(result.loss - log(2)) < 1e-6 && result.margin == 0 && result.kl == 0)
    }

    @Test func theReferenceHasTheFrozenA() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let folder = temporaryFolder()
        try fixture.bundle.withDevice {
            let whole = try trainer(fixture, .dpo)
            try fixture.restore(whole)
            try whole.model.lora.save(to: folder)
            let file = folder.appendingPathComponent("adapters.safetensors")
            let b = try loadArrays(url: file).filter { $0.key.hasSuffix("lora_b") }
            MLX.eval(Array(b.values))
            try save(arrays: b, url: file)
            let trainer = try fixture.trainer(.mesp) {
                ($0.objective, $0.batchSize, $0.freezeA, $0.adapters) = (.dpo, 2, true, folder.path)
            }
            try trainer.model.lora.load(from: folder)
            let loss = try PreferenceBatch(answers(fixture), .dpo).evaluated(trainer).loss
            #expect(abs(loss - log(2)) < 1e-6)
        }
    }

    @Test(arguments: Objective.allCases.filter(\.takesPairs))
    func batchesAreMeans(_ objective: Objective) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let answers = try answers(fixture)
        let turned = zip(answers.reversed(), answers).map { answer, other in
            PreferenceAnswer(
                example: answer.example, isGood: other.isGood, source: answer.source, lengths: answer.lengths)
        }
        func step(_ batches: [[PreferenceAnswer]]) throws -> (Float, MLXArray) {
            let trainer = try trainer(fixture, objective)
            try fixture.restore(trainer)
            let losses = batches.map { PreferenceBatch($0, objective, share: 1 / Double(batches.count)) }
            let loss = try trainer.step(losses, number: 0).loss
            return (loss, (try fixture.array("lora.0") - trainer.model.lora.vectors.read(0)) / Self.rate)
        }
        let parts = [try step([answers]), try step([turned])]
        let mean = ((parts[0].0 + parts[1].0) / 2, (parts[0].1 + parts[1].1) / 2)
        for batches in (objective == .orpo ? [] : [[answers + turned]]) + [[answers, turned]] {
            let (loss, gradient) = try step(batches)
            #expect(abs(loss - mean.0) < 1e-5 * abs(mean.0))
            #expect(relativeError(gradient, mean.1) < 1e-4)
        }
    }

    @Test(arguments: [(2, 3, 8), (6, 3, 8), (7, 3, 16), (12, 9, 16)])
    func anotherAnswerTakesTheLengthThatHoldsIt(_ prompt: Int, _ answer: Int, _ expected: Int) {
        func preferenceAnswer(_ prompt: Int, _ answer: Int, number: Int32) -> PreferenceAnswer {
            let tokens = (0..<prompt + answer).map { Int32(100 * Int(number) + $0) }
            return PreferenceAnswer(
                example: Example(tokens: tokens, counted: Array(prompt - 1..<prompt + answer - 1)), isGood: true,
                source: .init(split: 0, prompt: number, answer: number), lengths: [8, 16])
        }
        let mixed = preferenceAnswer(prompt, 1, number: 1).with(answerOf: preferenceAnswer(4, answer, number: 2))
        let taken = min(answer, 17 - prompt)
        #expect(mixed.example.tokens.count == expected + 1)
        #expect(mixed.example.tokens.prefix(prompt).elementsEqual((0..<prompt).map { Int32(100 + $0) }))
        #expect(mixed.example.targets == (0..<taken).map { Int32(204 + $0) })
        #expect(mixed.source == .init(split: 0, prompt: 1, answer: 2))
    }

    private func data(inPairs: Bool, count: Int = 12) throws -> URL {
        let folder = newFolder()
        let length = 20
        let tokens = (0..<count * length).map { index -> UInt32 in UInt32((index * 31 + index / length) % 200) }
        let bounds = (0..<count).flatMap { index -> [UInt32] in [UInt32(index * length), UInt32(length - index % 3)] }
        let mask = (0..<count * length).map { index -> UInt8 in index % length >= 6 ? 1 : 0 }
        let labels = (0..<count).map { index -> UInt8 in (index % 2 == 0 ? 1 : 0) + (inPairs ? 2 : 0) }
        var entry: [String: Any] = ["file": "tokens.bin", "tokens": tokens.count, "mask": "mask.bin"]
        entry["examples"] = ["file": "examples.bin", "count": count]
        entry["labels"] = "labels.bin"
        let entries = ["train": entry, "valid": entry]
        for (name, data) in [
            ("tokens.bin", tokens.withUnsafeBytes { Data($0) }), ("examples.bin", bounds.withUnsafeBytes { Data($0) }),
            ("mask.bin", Data(mask)), ("labels.bin", Data(labels)),
            ("data.json", try JSONSerialization.data(withJSONObject: entries)),
        ] { try data.write(to: folder.appendingPathComponent(name)) }
        return folder
    }

    private func settings(_ output: URL, _ objective: Objective?, data: URL) throws -> RunSettings {
        var settings = try RunSettings.ofATest(output)
        (settings.objective, settings.data, settings.batchSize) = (objective, data.path, 2)
        (settings.optimizer, settings.learningRate, settings.valBatches, settings.saveEvery) = (.adamw8bit, 1e-3, 6, 1)
        return settings
    }

    @Test(arguments: Objective.allCases)
    func runsAndResumes(_ objective: Objective) throws {
        let (data, whole, parts) = (try data(inPairs: objective.takesPairs), temporaryFolder(), temporaryFolder())
        try Run.run(try settings(whole, objective, data: data))
        let steps = try logRecords(whole, "step")
        #expect(steps.count == 6)
        #expect(steps.allSatisfy { $0["margin"] is Double && $0["accuracy"] is Double })
        #expect(steps.allSatisfy { ($0["kl"] is Double) == objective.hasReference })
        let held = try logRecords(whole, "eval").compactMap { $0["loss"] as? Double }
        #expect(held.count == 2 && held[1] < held[0], "the held-out data is what it trained on")

        var stopped = try settings(parts, objective, data: data)
        var done = 0
        try Run.run(
            stopped, report: { record, _ in if case .step = record { done += 1 } },
            atBlock: { _ in if done == 3 { throw CancellationError() } })
        stopped.resume = true
        try Run.run(stopped)
        func losses(_ folder: URL) throws -> [Double] {
            try logRecords(folder, "step").compactMap { $0["loss"] as? Double }
        }
        #expect(try losses(parts) == losses(whole))
        #expect(
            (try SavedState.load(from: parts, stopped)?.vectors["reference.answers"] != nil) == objective.hasReference)
    }

    @Test func aSingleAnswerIsNotHeldOut() throws {
        let (few, many, output) = (try data(inPairs: false, count: 1), try data(inPairs: false), temporaryFolder())
        #expect(message { try Run.run(try settings(output, .kto, data: few)) }.contains("data has a single answer"))
        var one = try settings(output, .kto, data: many)
        one.valBatches = 1
        #expect(message { try Run.run(one) } == "val_batches must be 0, or at least 2 with kto.")
        #expect(!output.exists)
    }

    @Test func dataAndObjectiveBelongTogether() throws {
        let (pairs, single, output) = (try data(inPairs: true), try data(inPairs: false), temporaryFolder())
        func refusal(_ objective: Objective?, _ data: URL?) -> String {
            message {
                var settings = try settings(output, objective, data: data ?? pairs)
                if data == nil { settings.data = nil }
                try Run.run(settings)
            }
        }
        #expect(refusal(nil, pairs).contains("choose an objective"))
        #expect(refusal(.dpo, single).contains("prompt, chosen and rejected"))
        #expect(refusal(.simpo, nil).contains("prompt, chosen and rejected"))
        #expect(refusal(.kto, nil).contains("prompt, completion and label"))
        var alone = try settings(output, .kto, data: single)
        alone.batchSize = 1
        #expect(message { try Run.run(alone) }.contains("batch_size"))
        #expect(!output.exists)
        try Data([3, 3] + [UInt8](repeating: 2, count: 10)).write(to: pairs.appendingPathComponent("labels.bin"))
        #expect(refusal(.dpo, pairs).contains("labels"))
    }
}
