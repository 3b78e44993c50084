import Foundation
import MLX
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPControl
@testable import MeSPCore

@Suite(.serialized) struct TrainerTests {
    @Test func fixturesAreThere() {
        #expect(!Fixture.cases.isEmpty, "run the tests with `make test`, which makes the fixtures")
    }

    /// The tolerance for another order of sums in float32.
    private let tolerance: Float = 1e-4

    @Test(arguments: Fixture.cases) func gradientsEqualTheReference(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        for method in fixture.exactMethods {
            let trainer = try fixture.trainer(method)
            try fixture.expectEqual(fixture.gradients(trainer), trainer, "\(method)")
        }
    }

    @Test(arguments: Fixture.cases) func gradientsAreTheSameWithPlainProducts(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        func gradients() throws -> Gradients { try fixture.gradients(fixture.trainer(.mesp)) }
        try Processor.$cpu.withValue(.plainCPU) { try gradients() }.expectEqual(gradients())
    }

    /// Computing in bfloat16 adds little to the error of storing arrays in bfloat16. The fixture's `floor` holds the gradients with this storage and
    /// with arithmetic in float32. The wide fixtures have the width of Qwen2.5-0.5B. In the other, tiny models the rounding of norms and products
    /// adds more error, so their bound is larger.
    @Test(arguments: Fixture.roundedCases)
    func bfloat16CostsLittleMoreThanStoringIt(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        let bar: Float = folder.lastPathComponent.hasPrefix("wide") ? 1.25 : 4
        for method in fixture.exactMethods {
            let loss = try fixture.expectRounded(fixture.trainer(method), "\(method)") { _ in bar }
            #expect(relativeError(MLXArray([loss]), try fixture.array("loss")) < 2e-3)
        }
    }

    @Test(arguments: Fixture.cases + Fixture.roundedCases)
    func theFormulasGiveWhatTheFunctionGives(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        let trainer = try fixture.trainer(.mesp, plan: Plan(tileBytes: 1 << 14))
        try fixture.restore(trainer)
        let model = trainer.model
        // Storing in bfloat16 rounds by up to 2⁻⁸. Sums in another order, or norms of rounded numbers, may round the other way.
        let bar: Float = fixture.bundle.dtype == .float32 ? 1e-5 : 1e-2
        var x = try model.embed(fixture.example())
        let context = try model.makeContext(fixture.example(), x0: x)
        for block in model.blocks {
            let lora = try model.lora.parameters(block)
            x = try fixture.bundle.withBlock(block) { weights in
                let formulas = try model.makeForwardBlock(block, weights, lora, context, x)
                let function = try model.function(block, x)?(formulas)
                #expect((function == nil) == (fixture.bundle.architecture.block(block).mlp.experts != nil))
                guard let function else { return formulas.output(x) }
                let asked: KeyValuePairs<String, (any BlockForward) throws -> [MLXArray]> = [
                    "y": { [try $0.output(x)] }, "intermediates": { try $0.intermediates(x).arrays },
                    "all": { try $0.outputs(x).list },
                ]
                for (name, outputs) in asked {
                    let (ours, expected) = (try outputs(formulas), try outputs(function))
                    #expect(ours.map(\.shape) == expected.map(\.shape) && ours.map(\.dtype) == expected.map(\.dtype))
                    for (index, (a, b)) in zip(ours, expected).enumerated() {
                        let error = relativeError(a.asType(.float32), b.asType(.float32))
                        #expect(error < bar, "block \(block), \(name) \(index): \(error)")
                    }
                }
                return formulas.output(x)
            }
        }
    }

    @Test(
        arguments: Fixture.cases.filter { ["tied-32", "gemma3", "qwen3_5", "lfm2_moe"].contains($0.lastPathComponent) })
    func aRunOnACPUNeedsNoFunctions(_ folder: URL) throws {
        let bare = try copyWithoutFunctions(folder.appendingPathComponent("bundle.mesp"))
        let losses = try [folder.appendingPathComponent("bundle.mesp"), bare].map { (bundle: URL) in
            let output = temporaryFolder()
            var settings = try RunSettings.ofATest(output, bundle: bundle)
            (settings.steps, settings.valBatches) = (2, 2)
            try Run.run(settings)
            return try LogSummary(folder: output).steps.map(\.loss)
        }
        #expect(losses[0].count == 2 && losses[0] == losses[1], "\(losses)")
    }

    @Test(arguments: Fixture.cases) func aGPUTrainsWithoutFunctions(_ folder: URL) throws {
        let url = try copyWithoutFunctions(folder.appendingPathComponent("bundle.mesp"))
        let fixture = try Fixture(folder, "gradients")
        let bare = try Fixture(folder, "gradients", bundle: url, onGPU: true)
        func gradients(_ fixture: Fixture, _ method: GradientMethod) throws -> Gradients {
            try fixture.gradients(fixture.trainer(method, plan: Plan(tileBytes: 1 << 12)))
        }
        let ours = try gradients(bare, .mesp)
        #expect(ours.blocks.count == fixture.layers)
        try ours.expectEqual(fixture.expected(), loss: tolerance)
        for method in fixture.exactMethods { try ours.expectEqual(gradients(fixture, method), "\(method)") }
        var settings = try bare.trainer(.mesp).model.settings
        settings.method = .mebp
        let sentence = message { try bare.bundle.manifest.check(settings) }
        guard !bare.bundle.architecture.hasExperts else {
            #expect(sentence.contains("take another method"), "\(sentence)")
            return
        }
        #expect(sentence.isEmpty)
        try gradients(bare, .mebp).expectEqual(fixture.expected(), loss: tolerance, "MeBP")
    }

    @Test(arguments: Fixture.cases) func everyPlanGivesTheSameGradients(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        var plans = [
            Plan(tileBytes: 1 << 14, keptBlocks: fixture.layers),
            Plan(tileBytes: 1 << 10, keptBlocks: 1, offload: .inputs),
            Plan(tileBytes: 1 << 20, offload: .all),
        ]
        if folder.lastPathComponent.hasPrefix("tied") {  // these options do not depend on the family
            plans += [
                Plan(tileBytes: 1 << 10), Plan(tileBytes: 1 << 24), Plan(tileBytes: 1 << 20, keptBlocks: 1),
            ]
        }
        for plan in plans {
            let trainer = try fixture.trainer(.mesp, plan: plan)
            try fixture.gradients(trainer).expectEqual(fixture.expected(), "\(plan)")
            #expect((trainer.writtenBytes > 0) == (plan.offload != .none))
        }
    }

    @Test(arguments: Fixture.cases, [2, 3]) func segmentsGiveTheSameGradients(_ folder: URL, _ tokens: Int) throws {
        let fixture = try Fixture(folder, "gradients")
        let plan = tokens == 2 ? Plan(tileBytes: 1 << 10) : Plan(tileBytes: 1 << 20, keptBlocks: fixture.layers)
        func compare() throws {
            let architecture = fixture.bundle.architecture
            #expect(Schedule.mixerTokens(architecture, fixture.length, .cpu) <= tokens || !architecture.owners.isEmpty)
            try fixture.gradients(fixture.trainer(.mesp, plan: plan)).expectEqual(fixture.expected())
        }
        try Schedule.$segmentTokens.withValue(tokens) {
            try compare()
            var processor = Processor.cpu
            processor.attendsByTiles = false
            try Processor.$cpu.withValue(processor) { try compare() }
        }
    }

    @Test(arguments: Fixture.cases) func lossesOfTrainingEqualTheReference(_ folder: URL) throws {
        let fixture = try Fixture(folder, "losses")
        for method in fixture.exactMethods + [.mezo] {
            let rate = try fixture.number(method == .mezo ? "mezo_learning_rate" : "learning_rate")
            let trainer = try fixture.trainer(method) { $0.learningRate = rate }
            let expected = try fixture.array(method.rawValue).asArray(Float.self)
            try fixture.expectLosses(expected, tolerance, "\(method)") { try takeStep(trainer, [$0], number: $1).loss }
        }
    }

    @Test(arguments: Fixture.cases) func contextAndPaddingDoNotCount(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        let whole = try fixture.example()
        let middle = whole.counted.count / 2
        func gradients(_ examples: [Example]) throws -> (loss: Float, norm: Float?) {
            let trainer = try fixture.trainer(.mesp) { $0.maxGradNorm = 1e9 }
            let result = try takeStep(trainer, [SequenceLoss(examples)], number: 0)
            return (result.loss, result.gradientNorm)
        }
        let halves = [Array(whole.counted[..<middle]), Array(whole.counted[middle...])]
        let scattered = (0..<3).map { part in whole.counted.filter { ($0 / 2) % 3 == part } }
        let expected = try gradients([whole])
        for parts in [halves, scattered] {
            let split = try gradients(parts.map { Example(tokens: whole.tokens, counted: $0) })
            #expect(abs(split.loss - expected.loss) < 1e-5 * expected.loss)
            let (norm, splitNorm) = (try #require(expected.norm), try #require(split.norm))
            #expect(abs(splitNorm - norm) < tolerance * norm)
        }

        var tokens = whole.tokens
        for index in (middle + 1)..<tokens.count { tokens[index] = 0 }
        let (padded, half) = (
            Example(tokens: tokens, counted: halves[0]), Example(tokens: whole.tokens, counted: halves[0])
        )
        #expect(abs(try gradients([padded]).loss - gradients([half]).loss) < 1e-5 * expected.loss)
    }

    private static let packing = [
        Plan(tileBytes: 1 << 10), Plan(tileBytes: 1 << 20, keptBlocks: 1), Plan(tileBytes: 1 << 16, offload: .all),
        Plan(tileBytes: 1 << 16, order: .blocks),
    ]

    private static let packed = (Fixture.cases + Fixture.roundedCases).enumerated().flatMap { index, folder in
        let isPlain = folder.lastPathComponent.hasPrefix("tied")
        return packing.enumerated().filter { isPlain || $0.offset % 2 == index % 2 }.map { (folder, $0.element) }
    }

    @Test(arguments: packed.filter { $0.0.lastPathComponent != "wide-gpu-bfloat16" })
    func packedRecordsTrainAsABatch(_ folder: URL, _ plan: Plan) throws {
        let fixture = try Fixture(folder, "gradients")
        let whole = try fixture.example()
        let middle = max(4, fixture.length / 2)
        let records = [0..<2, 2..<middle, middle..<fixture.length]
        let counted = records.dropLast().flatMap { $0.dropLast() } + records[2]
        let packed = Example(tokens: whole.tokens, counted: counted, records: records)
        let batch = records.enumerated().map { index, rows in
            // A bundle's function for the GPU takes sequences of one length, so shorter records are padded.
            let padding = fixture.bundle.backend == .gpu ? fixture.length - rows.count : 0
            return Example(
                tokens: whole.tokens[rows.lowerBound...rows.upperBound] + Array(repeating: 0, count: padding),
                counted: Array(0..<rows.count - (index < 2 ? 1 : 0)))
        }
        func gradients(_ groups: [[Example]]) throws -> (loss: Float, blocks: [Int: MLXArray]) {
            let trainer = try fixture.trainer(.mesp, plan: plan) { $0.batchSize = 3 }
            try fixture.restore(trainer)
            var (loss, blocks) = (Float(0), [Int: MLXArray]())
            for group in groups {
                let parts = group.map { (example: $0, weight: 1 / Float(counted.count)) }
                loss += try trainer.backpropagate(parts) { block, gradient in
                    blocks[block] = blocks[block].map { $0 + gradient } ?? gradient
                    MLX.eval(blocks[block] ?? gradient)
                }
            }
            return (loss, blocks)
        }
        let expected = try gradients(plan.order == .blocks ? [batch] : batch.map { [$0] })
        let found = try gradients([[packed]])
        // Storing in bfloat16 rounds by up to 2⁻⁸, and a product of another shape sums in another order.
        let bar: Float = fixture.bundle.dtype == .float32 ? 1e-5 : 3e-2
        #expect(abs(found.loss - expected.loss) <= (bar / 10) * expected.loss)
        for block in 0..<fixture.layers {
            let error = relativeError(try #require(found.blocks[block]), try #require(expected.blocks[block]))
            #expect(error < bar, "block \(block), \(plan): \(error)")
        }
    }

    @Test(arguments: (Fixture.cases + Fixture.roundedCases).filter { $0.lastPathComponent.contains("gpu") })
    func theFunctionKeepsPackedRecordsApart(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        let trainer = try fixture.trainer(.mesp, plan: Plan(tileBytes: 1 << 14))
        try fixture.restore(trainer)
        let (model, records) = (trainer.model, [0..<1, 1..<5, 5..<fixture.length])
        let bar: Float = fixture.bundle.dtype == .float32 ? 1e-5 : 1e-2
        var x = try model.embed(fixture.example())
        let example = Example(tokens: try fixture.example().tokens, counted: [0], records: records)
        let context = try model.makeContext(example, x0: x)
        for block in model.blocks {
            let lora = try model.lora.parameters(block)
            x = try fixture.bundle.withBlock(block) { weights in
                let formulas = try model.makeForwardBlock(block, weights, lora, context, x)
                let function = try model.function(block, x, \.packed)?(formulas)
                guard let function else { return formulas.output(x) }
                let (ours, expected) = (try function.outputs(x).list, formulas.outputs(x).list)
                for (index, (a, b)) in zip(ours, expected).enumerated() {
                    let error = relativeError(a.asType(.float32), b.asType(.float32))
                    #expect(error < bar, "block \(block), output \(index): \(error)")
                }
                return formulas.output(x)
            }
        }
    }

    @Test func eachBlockHasANoiseOfItsOwn() throws {
        let trainer = try Fixture(try #require(Fixture.tied), "gradients").trainer(.mesp) {
            ($0.dpClip, $0.dpNoise, $0.learningRate) = (0.5, 4, 1)
        }
        let model = trainer.model
        let before = try model.blocks.map { try model.lora.parameters($0) + 0 }
        MLX.eval(before)
        _ = try trainer.privateStep([SequenceLoss](), SecretKey(bytes: Data(0..<32)), number: 0)
        let noise = try model.blocks.map { before[$0] - (try model.lora.parameters($0)) }
        for some in noise { #expect(abs(some.square().mean().item(Float.self) - 4) < 0.4) }
        #expect(abs((noise[0] * noise[1]).mean().item(Float.self)) < 0.4)
    }

    @Test(arguments: Fixture.cases) func whatIsNotFiniteHasAName(_ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        let whole = try fixture.example()
        let packed = Example(tokens: whole.tokens, counted: whole.counted, records: [0..<2, 2..<fixture.length])
        for example in [whole, packed] {
            for (value, name) in [(Float.nan, "The parameter "), (1e30, "The output of block ")] {
                let trainer = try fixture.trainer(.mesp)
                let last = fixture.layers - 1
                try trainer.model.lora.vectors.write(
                    MLXArray.zeros([trainer.model.lora.layouts[last].count]) + value, last)
                let found = try #require(throws: NotFinite.self) {
                    _ = try trainer.backpropagate([(example, 1)]) { _, _ in }
                }
                #expect(found.what.english.hasPrefix(name), "\(found.what.english)")
            }
        }
    }

    struct Ordered: Sendable, CustomTestStringConvertible {
        let testDescription: String
        let sequences: Int
        var batches = 1
        var plan = Plan(tileBytes: 1 << 14)
        var method = GradientMethod.mesp
        var change: @Sendable (inout RunSettings) -> Void = { _ in }
    }

    private static let orders = [
        Ordered(testDescription: "a batch", sequences: 3),
        Ordered(testDescription: "accumulation", sequences: 2, batches: 2),
        Ordered(
            testDescription: "clipping, on disk", sequences: 4, batches: 2,
            plan: Plan(tileBytes: 1 << 14, offload: .all)
        ) {
            ($0.maxGradNorm, $0.skipBadSteps, $0.optimizer) = (0.1, true, .adamw8bit)
        },
        Ordered(
            testDescription: "intermediates kept", sequences: 2,
            plan: Plan(tileBytes: 1 << 14, keptBlocks: 2, offload: .inputs)
        ) { $0.numLayers = 2 },
        Ordered(testDescription: "bfloat16, B alone", sequences: 2) { ($0.loraDtype, $0.freezeA) = (.bfloat16, true) },
        Ordered(testDescription: "dropout", sequences: 4) { $0.dropout = 0.2 },
        Ordered(testDescription: "MeBP", sequences: 2, method: .mebp) { $0.projections = ["q", "down"] },
    ]

    @Test(
        arguments: orders, Fixture.cases.filter { ["tied-32", "tied-gpu"].contains($0.lastPathComponent) })
    func theOrderOfSequencesChangesNothing(_ ordered: Ordered, _ folder: URL) throws {
        let fixture = try Fixture(folder, "gradients")
        let stream = try #require(try fixture.bundle.tokens("train")).sequences(lengths: [fixture.length])
        func train(_ order: RunSettings.Order) throws -> (losses: [Float], norms: [Float?], vectors: [String: MLXArray])
        {
            var plan = ordered.plan
            plan.order = order
            let trainer = try fixture.trainer(ordered.method, plan: plan) {
                ($0.batchSize, $0.gradAccumulationSteps) = (ordered.sequences / ordered.batches, ordered.batches)
                ($0.optimizer, $0.learningRate) = (.adamw, 1e-2)
                ordered.change(&$0)
            }
            try fixture.restoreParts(trainer)
            let each = ordered.sequences
            let results = try (0..<2).map { step in
                let examples = (0..<each).map { number in
                    let example = stream.training(step * each + number, seed: 0)
                    return Example(tokens: example.tokens, counted: Array(example.counted.dropFirst(number)))
                }
                return try takeStep(trainer, [SequenceLoss(examples)], number: step)
            }
            return (results.map(\.loss), results.map(\.gradientNorm), try SavedState.vectors(of: trainer))
        }
        let (expected, found) = (try train(.sequences), try train(.blocks))
        for (ours, loss) in zip(found.losses, expected.losses) { #expect(abs(ours - loss) <= 1e-6 * loss) }
        for (ours, norm) in zip(found.norms, expected.norms) {
            #expect((ours == nil) == (norm == nil) && abs((ours ?? 0) - (norm ?? 0)) <= 1e-6 * (norm ?? 0))
        }

        expectEqual(found.vectors, expected.vectors)
    }

    @Test(arguments: [("untied-7", nil), ("untied-7", 1), ("qwen3_moe", nil)])
    func weightsAreReadOnceAPass(_ name: String, _ layers: Int?)
        throws
    {
        let folder = try #require(Fixture.cases.first { $0.lastPathComponent == name })
        for (order, times) in [(RunSettings.Order.sequences, 4), (.blocks, 1)] {
            let fixture = try Fixture(folder, "gradients")
            let plan = Plan(tileBytes: 1 << 20, order: order)
            let trainer = try fixture.trainer(.mesp, plan: plan) { ($0.batchSize, $0.numLayers) = (4, layers) }
            _ = try takeStep(trainer, [SequenceLoss(Array(repeating: fixture.example(), count: 4))], number: 0)
            let (manifest, mapped) = (fixture.bundle.manifest, fixture.bundle.maps.mapped)
            for block in 0..<fixture.layers {
                let passes = block >= fixture.layers - (layers ?? fixture.layers) ? 2 : 1
                #expect(mapped[ModelBundle.blockFile(block)] == times * passes, "block \(block)")
            }
            #expect(mapped[manifest.head.file] == times)
            let read = manifest.files.reduce(0) {
                $0 + ($1.path == manifest.embedding.file ? 0 : $1.size * (mapped[$1.path] ?? 0))
            }
            #expect(Planner(manifest, trainer.model.settings).readWeightBytes(plan) == read)
        }
    }

    @Test func aFileThatChangesWhileItIsMappedIsNoticed() throws {
        let folder = try tiedBundle().copy()
        let bundle = try ModelBundle(url: folder)
        bundle.maps.areKept = true
        for _ in 0..<2 { try bundle.withBlock(0) { _ in } }
        #expect(bundle.maps.mapped[ModelBundle.blockFile(0)] == 1)
        let file = try FileHandle(forWritingTo: folder.appendingPathComponent(ModelBundle.blockFile(0)))
        try file.write(contentsOf: Data([1]))
        try file.close()
        #expect(message { try bundle.withBlock(0) { _ in } }.contains("has changed since the bundle was opened"))
    }

    private final class FewAddresses: @unchecked Sendable {
        let bundle: ModelBundle
        init(_ bundle: ModelBundle) { self.bundle = bundle }
        var areUsedUp: Bool { bundle.maps.areKept && bundle.maps.mapped.count > 1 }
    }

    @Test func whereAddressesRunOutFilesAreMappedOneAfterTheOther() throws {
        let plan = Plan(tileBytes: 1 << 20, keepsMaps: true)
        func losses(_ lack: Bool) throws -> [Float] {
            let fixture = try Fixture(try #require(Fixture.tied), "gradients")
            let trainer = try fixture.trainer(.mesp, plan: plan) { $0.learningRate = 0.1 }
            let few = FewAddresses(fixture.bundle)
            let areUsedUp: @Sendable () -> Bool = { lack && few.areUsedUp }
            return try Addresses.$areUsedUp.withValue(areUsedUp) {
                let losses = try (0..<2).map {
                    try takeStep(trainer, [SequenceLoss([try fixture.example()])], number: $0).loss
                }
                #expect(fixture.bundle.maps.areKept == !lack)
                return losses
            }
        }
        #expect(try losses(true) == losses(false))
        let bundle = try Fixture(try #require(Fixture.tied), "gradients").bundle
        let always: @Sendable () -> Bool = { true }
        Addresses.$areUsedUp.withValue(always) {
            #expect(message { try bundle.withBlock(0) { _ in } }.hasSuffix("Cannot allocate memory."))
        }
    }

    @Test func aNormThatOverflowsIsNotClippedTo() throws {
        let updates = try Fixture(try #require(Fixture.tied), "gradients").trainer(.mesp).updates
        #expect(try updates.computeClipping(to: 1) { _ in MLXArray([3, 4] as [Float]) }.factor < 1)
        #expect(throws: NotFinite.self) {
            // The square of 10²⁰ is above the largest float32 number.
            try updates.computeClipping(to: 1) { _ in MLXArray([1e20] as [Float]) }
        }
    }

    @Test func neighbouringSeedsShareNoKeys() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        func keys(_ seed: UInt64, _ step: Int) throws -> [[UInt32]] {
            try fixture.trainer(.mesp) { $0.seed = seed }.updates.randomKeys(step).map { $0.asArray(UInt32.self) }
        }
        let all = try [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)].flatMap { try keys($0.0, $0.1) }
        #expect(Set(all).count == all.count)
    }

    @Test(arguments: GradientMethod.allCases, [nil, 1 as Float?])
    func aStopIsHeededWhileNothingHasChanged(_ method: GradientMethod, _ maxGradNorm: Float?) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        let losses = [SequenceLoss([try fixture.example()])]
        func step(stopAt place: Int) throws -> (isDone: Bool, boundaries: Int, vectors: [String: MLXArray]) {
            let trainer = try fixture.trainer(method) {
                ($0.learningRate, $0.maxGradNorm, $0.optimizer) = (0.1, maxGradNorm, .adamw8bit)
            }
            var boundaries = 0
            trainer.work.atBlock = {
                boundaries += 1
                if boundaries >= place { throw CancellationError() }
            }
            let isDone = (try? takeStep(trainer, losses, number: 0)) != nil
            let (passed, vectors) = (boundaries, try SavedState.vectors(of: trainer))
            if place < .max {
                #expect(throws: CancellationError.self) { try takeStep(trainer, losses, number: 1) }
                #expect(boundaries == passed + 1)
            }
            return (isDone, passed, vectors)
        }
        func equal(_ a: [String: MLXArray], _ b: [String: MLXArray]) -> Bool {
            a.keys == b.keys && a.allSatisfy { name, vector in b[name].map { $0.arrayEqual(vector).item() } ?? false }
        }
        let (whole, start) = (try step(stopAt: .max), try step(stopAt: 1))
        #expect(whole.isDone && !start.isDone && !equal(whole.vectors, start.vectors))
        let updated = fixture.layers - 1
        for place in 1...whole.boundaries {
            let found = try step(stopAt: place)
            #expect(found.isDone == (place > whole.boundaries - updated), "boundary \(place)")
            #expect(equal(found.vectors, found.isDone ? whole.vectors : start.vectors), "boundary \(place)")
        }
    }

    @Test func theHeadHasBoundaries() throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        func step(work: Int) throws -> (boundaries: Int, loss: Float, vectors: [String: MLXArray], waiting: Double) {
            let trainer = try fixture.trainer(.mesp, plan: Plan(tileBytes: 1 << 10)) { $0.learningRate = 0.1 }
            var boundaries = 0
            trainer.work.atBlock = {
                boundaries += 1
                usleep(1000)
            }
            let loss = try Schedule.$mostWork.withValue(work) {
                try takeStep(trainer, [SequenceLoss([try fixture.example()])], number: 0).loss
            }
            return (boundaries, loss, try SavedState.vectors(of: trainer), trainer.work.time.waiting)
        }
        let (whole, parts) = (try step(work: .max), try step(work: 1))
        let tiles = tiles(of: fixture.bundle.architecture.vocabSize, size: 64)
        #expect(whole.boundaries == 2 * fixture.layers + 1)
        #expect(parts.boundaries == whole.boundaries + tiles.count - 1)
        #expect(parts.waiting >= 1e-3 * Double(parts.boundaries))
        #expect(parts.loss == whole.loss)
        expectEqual(parts.vectors, whole.vectors)
    }

    @Test(arguments: [true, false]) func weightsStayMappedWhereThePlanSaysSo(_ keepsMaps: Bool) throws {
        let fixture = try Fixture(try #require(Fixture.tied).copy(), "gradients")
        let trainer = try fixture.trainer(.mesp, plan: Plan(tileBytes: 1 << 20, keepsMaps: keepsMaps))
        let example = try fixture.example()
        for number in 0..<2 { _ = try takeStep(trainer, [SequenceLoss([example])], number: number) }
        #expect(fixture.bundle.maps.mapped["blocks/00.bin"] == (keepsMaps ? 1 : 4))
        try FileManager.default.removeItem(at: fixture.bundle.url.appendingPathComponent("blocks/00.bin"))
        #expect(message { _ = try takeStep(trainer, [SequenceLoss([example])], number: 2) }.contains("Cannot open"))
    }

    /// Updates far below the last bit of bfloat16 are lost when rounded to nearest, and add up with stochastic rounding.
    @Test func stochasticRoundingKeepsSmallUpdates() {
        let (count, steps) = (4096, 500)
        let update: Float = 1e-5  // for parameters of 1, whose neighbours are 1/256 and 1/128 away
        var (nearest, random) = (MLXArray.ones([count], dtype: .bfloat16), MLXArray.ones([count], dtype: .bfloat16))
        for step in 0..<steps {
            nearest = (nearest.asType(.float32) - update).asType(.bfloat16)
            random = stochasticallyRounded(random.asType(.float32) - update, key: MLXRandom.key(UInt64(step)))
            MLX.eval(nearest, random)
        }
        #expect(nearest.asType(.float32).mean().item(Float.self) == 1)
        // After k steps with the update u, the mean of n parameters with the spacing δ = 1/256 has the standard deviation √(k u δ / n) = 7e-5.
        let mean = random.asType(.float32).mean().item(Float.self)
        #expect(abs(mean - (1 - update * Float(steps))) < 5 * 7e-5, "\(mean)")
    }

    @Test func stochasticRoundingIsExactWhereItCanBe() {
        let exact = MLXArray([0, 1, -1, 0.5, -3.25, 1024] as [Float])
        #expect(
            stochasticallyRounded(exact, key: MLXRandom.key(1)).asType(.float32).asArray(Float.self)
                == exact.asArray(Float.self))
    }

    @Test(arguments: Fixture.cases.filter { !$0.lastPathComponent.contains("gpu") })
    func trainsInBFloat16(_ folder: URL) throws {
        let fixture = try Fixture(folder, "losses")
        let expected = try fixture.array("mesp").asArray(Float.self).prefix(20)
        let trainer = try fixture.trainer(.mesp) {
            ($0.learningRate, $0.loraDtype) = (try fixture.number("learning_rate"), .bfloat16)
        }
        // bfloat16 has 8 significant bits, so the adapters' outputs have a relative error of about 2⁻⁸.
        try fixture.expectLosses(Array(expected), 5e-3) { try takeStep(trainer, [$0], number: $1).loss }
    }
}
