import Foundation
import MLX
import Testing

@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPFiles

@Suite(.serialized) struct ReliabilityTests {
    private let output = temporaryFolder()
    private let whole = temporaryFolder()

    @Test func aSavedStateIsLeftOutOfBackupsBeforeItHasABit() throws {
        let folder = newFolder()
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let plan = Plan(tileBytes: 1 << 20)
        let trainer = try fixture.trainer(.mesp, plan: plan)
        let seen = Locked([(name: String, size: Int, isInPlace: Bool)]())
        let state = SavedState(
            step: 1, plan: plan, settings: trainer.model.settings, sources: SavedState.Sources(weights: "", data: [:]))
        let look: @Sendable (URL, StoragePolicy) -> Void = { url, policy in
            #expect(policy == .state)
            let size = (try? FileManager.default.attributesOfItem(atPath: url.path))?[.size] as? Int
            seen.change { $0.append((url.lastPathComponent, size ?? -1, SavedState.url(in: folder).exists)) }
        }
        try StoragePolicy.$set.withValue(look) { try state.save(trainer, in: folder) }
        #expect(seen.value.map(\.name) == ["state.safetensors.partial"])
        #expect(seen.value.first?.size == 0 && seen.value.first?.isInPlace == false)
    }

    @Test(arguments: [false, true], [1, 2])
    func aGradientThatIsNotFiniteIsNamedAndTakenBack(_ skip: Bool, _ sequences: Int) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let plan = Plan(tileBytes: 1 << 20, order: .blocks)
        let trainer = try fixture.trainer(.mesp, plan: plan) {
            ($0.skipBadSteps, $0.momentum, $0.batchSize) = (skip, 0.9, sequences)
        }
        let start = try SavedState.vectors(of: trainer)
        var boundaries = sequences * (2 * fixture.layers + 1)
        trainer.work.atBlock = {
            boundaries -= 1
            guard boundaries == 0 else { return }
            var vectors = try SavedState.vectors(of: trainer)
            vectors["lora.0"] = try #require(vectors["lora.0"]) * Float.nan
            try SavedState.restore(trainer) { vectors[$0] }
        }
        let loss = SequenceLoss(Array(repeating: try fixture.example(), count: sequences))
        let error = #expect(throws: NotFinite.self) { _ = try takeStep(trainer, [loss], number: 0) }
        #expect(error?.what == "The gradient of model.layers.0.self_attn.q_proj.lora_a")
        let changed = try SavedState.vectors(of: trainer).filter { name, vector in
            start[name].map { !$0.arrayEqual(vector).item(Bool.self) } ?? true
        }
        #expect(changed.keys.contains("lora.\(fixture.layers - 1)") == !skip)
        #expect(changed.isEmpty == skip, "\(changed.keys)")
    }

    @Test func whatIsInAFileCanBeTakenBackToo() throws {
        let file = try ArrayFile(
            in: FileManager.default.temporaryDirectory, shape: [3], dtype: .float32, keepsMaps: true)
        var arrays = BlockArrays(count: 2, file: file, keepsPrevious: true)
        for step in 0..<5 {
            for block in 0..<2 { try arrays.write(MLXArray([Float(step), Float(block), 0]), block) }
            let before = arrays
            for block in 0..<2 { try arrays.write(MLXArray([-1, -1, -1] as [Float]), block) }
            arrays = before
            for block in 0..<2 {
                #expect(try arrays.read(block).asArray(Float.self) == [Float(step), Float(block), 0])
            }
        }
    }

    /// Only whole pages are mapped. MLX would silently copy other memory.
    @Test func wholePagesAreMapped() throws {
        let url = temporaryFolder()
        try Data(count: 3 * mappingUnit).write(to: url)
        let file = open(url.path, O_RDONLY)
        defer { close(file) }
        #expect(try mapArray(file, offset: mappingUnit, [2 * mappingUnit / 4], .float32) != nil)
        #expect(try mapArray(file, offset: 0, [mappingUnit / 4 - 1], .float32) == nil)

        let (count, shape) = (5001, [3, 1667])
        let arrays = try ArrayFile(
            in: FileManager.default.temporaryDirectory, shape: shape, dtype: .float32, keepsMaps: true)
        for index in [2, 0] {
            let array = (MLXArray.arange(count) + index).asType(.float32).reshaped(shape)
            try arrays.write(array, at: index)
            #expect(try arrays.read(index).arrayEqual(array).item(Bool.self))
        }
        let short = MLXArray.ones([2, 1667])
        try arrays.write(short, at: 0)
        #expect(try arrays.read(0).arrayEqual(short).item(Bool.self))
        #expect(try arrays.read(2).shape == shape)
    }

    @Test func badStepsAreLeftOut() throws {
        var settings = try RunSettings.ofATest(output)
        (settings.learningRate, settings.skipBadSteps, settings.saveEvery) = (1e30, true, 1)
        try Run.run(settings)
        let events = try logRecords(output, "event")
        #expect(events.compactMap { $0["event"] as? String } == Array(repeating: "skipped_step", count: 5))
        #expect(events.allSatisfy { ($0["message"] as? String ?? "").contains("block") }, "\(events)")
        #expect(try logRecords(output, "end").first?["reason"] as? String == "finished")

        (settings.output, settings.steps) = (whole.path, 1)
        try Run.run(settings)
        expectEqual(try adapterArrays(of: output), try adapterArrays(of: whole))
    }

    @Test func aBadLossNamesItsBlockAndLeavesTheLastState() throws {
        var settings = try RunSettings.ofATest(output)
        (settings.learningRate, settings.saveEvery) = (1e30, 1)
        let sentence = message { try Run.run(settings) }
        #expect(
            sentence.contains("block") && sentence.contains("step 2") && sentence.contains("skip bad steps"),
            "\(sentence)")
        #expect(try #require(try SavedState.load(from: output, settings)).state.step == 1)
    }

    @Test func aCheaperPlanIsTakenAndKept() throws {
        func run(_ output: URL, until last: Int, resume: Bool = false) throws {
            var settings = try RunSettings.ofATest(output)
            (settings.memoryLimitMb, settings.resume, settings.optimizer) = (1e6, resume, .adamw)
            (settings.learningRate, settings.saveEvery) = (1e-3, 0)
            var (steps, isWarned) = (0, resume)
            try Run.run(
                settings,
                report: { record, _ in
                    if case .step(let step) = record { steps = step.step }
                },
                atBlock: { _ in if steps == last { throw CancellationError() } },
                memoryIsShort: {
                    defer { isWarned = isWarned || steps == 2 }
                    return steps == 2 && !isWarned
                })
        }
        try run(whole, until: 6)
        try run(output, until: 4)
        try run(output, until: 6, resume: true)

        let plans = try logRecords(whole, "plan").compactMap { $0["kept_blocks"] as? Int }
        #expect(plans.count == 2 && plans[1] == plans[0] - 1)
        #expect(try logRecords(whole, "event").first?["event"] as? String == "cheaper_plan")
        #expect(try logRecords(output, "plan").compactMap { $0["kept_blocks"] as? Int } == plans)
        let losses = try logRecords(whole, "step").compactMap { $0["loss"] as? Double }
        #expect(try logRecords(output, "step").compactMap { $0["loss"] as? Double } == losses)
        #expect(losses.count == 6)
    }

    @Test func withoutACheaperPlanTheRunIsSavedAndEnds() throws {
        var settings = try RunSettings.ofATest(output)
        (settings.steps, settings.saveEvery) = (50, 0)
        let sentence = message { try Run.run(settings, memoryIsShort: { true }) }
        #expect(sentence.contains("no plan takes less") && sentence.contains("resume"), "\(sentence)")
        let saved = try #require(try SavedState.load(from: output, settings))
        #expect(saved.plan?.offload == .all)
        #expect(try logRecords(output, "step").count == saved.state.step)
        #expect(try logRecords(output, "end").last?["reason"] as? String == "failed")
    }

    @Test func aboveTheBudgetACheaperPlanIsTaken() throws {
        var settings = try RunSettings.ofATest(output)
        let manifest = try ModelBundle(url: URL(fileURLWithPath: settings.bundle)).manifest
        settings.memoryLimitMb = Double(Planner(manifest, settings).leastPeak) / 1e6 + 1
        settings.steps = 50
        let ballast = MLXArray.ones([4_000_000])
        MLX.eval(ballast)
        let sentence = withExtendedLifetime(ballast) { message { try Run.run(settings) } }
        #expect(sentence.contains("more than the memory limit, and no plan takes less memory"), "\(sentence)")
        #expect(try logRecords(output, "event").contains { $0["event"] as? String == "cheaper_plan" })
    }

    @Test func thePlannerHeedsTheSystem() throws {
        let settings = try RunSettings.ofATest(temporaryFolder())
        let manifest = try ModelBundle(url: URL(fileURLWithPath: settings.bundle)).manifest
        let free = Planner(manifest, settings, systemLimit: nil)
        let standard = try free.plan()
        let enough = free.peak(standard) + free.peak(standard) / 100 * 8
        #expect(try Planner(manifest, settings, systemLimit: enough).plan() == standard)
        #expect(free.peak(try Planner(manifest, settings, systemLimit: enough - 1).plan()) < free.peak(standard))
        let sentence = message { _ = try Planner(manifest, settings, systemLimit: free.leastPeak / 2).plan() }
        #expect(sentence.contains("The system allows") && sentence.contains("at least"), "\(sentence)")
    }

    @Test func whatCanBeTakenBackCountsTwice() throws {
        var settings = try RunSettings.ofATest(temporaryFolder())
        settings.optimizer = .adamw
        let manifest = try ModelBundle(url: URL(fileURLWithPath: settings.bundle)).manifest
        func peak() -> Int { Planner(manifest, settings).peak(Plan(tileBytes: 1 << 20)) }
        let once = peak()
        let kept = settings.layouts(of: manifest.architecture).reduce(0) { $0 + 3 * 4 * $1.count }
        settings.skipBadSteps = true
        #expect((kept...kept + kept / 10).contains(peak() - once), "the parameters and AdamW's two moments")
    }

    @Test func sequencesGoByBlocksWhereThatPays() throws {
        var settings = try RunSettings.ofATest(temporaryFolder())
        let manifest = try ModelBundle(url: URL(fileURLWithPath: settings.bundle)).manifest
        var systemLimit: Int?
        func planner() -> Planner { Planner(manifest, settings, systemLimit: systemLimit) }
        func order() throws -> RunSettings.Order? { try planner().plan().order }
        func peak(_ order: RunSettings.Order) -> Int {
            planner().peak(Plan(tileBytes: 1 << 20, offload: settings.offload ?? .none, order: order))
        }
        #expect(try order() == nil, "of one sequence there is no order")

        settings.batchSize = 256
        #expect(try order() == .sequences && peak(.blocks) > peak(.sequences))
        settings.batchSize = 2
        #expect(try order() == .blocks && peak(.blocks) < peak(.sequences))
        settings.maxGradNorm = 1
        #expect(try order() == .sequences, "clipping keeps all gradients in any order")
        settings.maxGradNorm = nil
        settings.offload = .inputs
        #expect(try order() == .blocks)
        settings.batchSize = 10_000
        #expect(try order() == .sequences, "on disk the inputs would take more than the weights")

        (settings.offload, settings.batchSize, settings.maxGradNorm) = (nil, 4, 1)
        let (bySequences, byBlocks) = (peak(.sequences) * 108 / 100, peak(.blocks) * 108 / 100)
        systemLimit = bySequences + manifest.mappedBytes + 1000
        #expect(try order() == .sequences)
        systemLimit = bySequences + manifest.mappedBytes - 1000
        #expect(try order() == .blocks)
        // With a memory limit just below the peak of `.blocks`, the plan still keeps the inputs in memory.
        settings.memoryLimitMb = Double(byBlocks - 100_000) / 1e6
        let plan = try planner().plan()
        #expect(planner().peak(plan) < byBlocks && plan.offload == .none)

        (settings.memoryLimitMb, settings.objective) = (nil, .dpo)
        #expect(try order() == .sequences)
        (settings.objective, settings.method) = (nil, .mezo)
        #expect(try order() == .sequences)
    }

    @Test func aPairsInputsStayWhereThereIsRoom() throws {
        var settings = try RunSettings.ofATest(temporaryFolder())
        settings.objective = .dpo
        let manifest = try ModelBundle(url: URL(fileURLWithPath: settings.bundle)).manifest
        func plan() throws -> Plan { try Planner(manifest, settings, systemLimit: nil).plan() }
        #expect(try plan().keepsAnswer == false)
        settings.memoryLimitMb = 1000
        #expect(try plan().keepsAnswer == true)
        let planner = Planner(manifest, settings, systemLimit: nil)
        var forgetting = try plan()
        forgetting.keepsAnswer = false
        #expect(planner.peak(try plan()) > planner.peak(forgetting))
        (settings.memoryLimitMb, settings.offload) = (nil, .inputs)
        #expect(try plan().keepsAnswer == true)
        (settings.offload, settings.objective) = (.inputs, .kto)
        #expect(try plan().keepsAnswer == false)
    }
}
