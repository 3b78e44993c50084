import Foundation
import HostMLXLedger
import MLX
import Testing

@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPSelfCheck

@Suite(.serialized, .enabled(if: Ledger.isAvailable, "A ledger is recorded on Linux only"))
final class StepTests {
    private static let demo = URL(fileURLWithPath: #filePath).deletingLastPathComponent()
        .appendingPathComponent("../../../MeSPTrainer/Demo.mesp").standardizedFileURL
    private let bare: URL
    private typealias Change = (inout RunSettings) -> Void

    init() throws {
        MLXSupport.setEnvironment()
        bare = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
        try FileManager.default.copyItem(at: Self.demo, to: bare)
        let file = bare.appendingPathComponent("manifest.json")
        let manifest = try String(contentsOf: file, encoding: .utf8)
        try manifest.replacing(#/functions": {[^}]*}/#, with: "functions\": {}").write(
            to: file, atomically: true, encoding: .utf8)
    }

    deinit { try? FileManager.default.removeItem(at: bare) }

    private func settings(_ length: Int = 128, _ change: Change = { _ in }) throws -> RunSettings {
        var settings = RunSettings(bundle: Self.demo.path, output: "")
        settings.usePaperUpdate()
        (settings.seqLen, settings.rank, settings.device) = (length, 8, .gpu)
        change(&settings)
        return settings
    }

    private func step(
        _ settings: RunSettings, _ rules: LedgerRules = .strictPhone, keepsCache: Bool = false
    ) throws -> (Ledger, Planner, Plan) {
        var (planner, plan) = (Planner?.none, Plan?.none)
        let ledger = try Ledger.record(rules: rules) {
            let trial = try TrialSteps(settings) {
                keepsCache ? $0.keepingCache(try $0.plan()) : try $0.plan()
            }
            (planner, plan) = (trial.planner, trial.plan)
            try trial.step { Ledger.boundary() }
            Ledger.restart()
            try trial.step { Ledger.boundary() }
        }
        return (ledger, try #require(planner), try #require(plan))
    }

    @Test(
        arguments: ["", "keepCache", "all", "mezo", "batch", "q and v", "B alone"].map { (128, $0) }
            + [(256, ""), (256, "all")] + ["", "kept", "all", "mezo", "batch"].map { (256, "formulas \($0)") }
            + [64, 128, 256].map { ($0, "formulas dora") })
    func thePredictionCoversTheStrictestRules(_ length: Int, _ choice: String) throws {
        let settings = try settings(length) {
            if choice.hasPrefix("formulas") { $0.bundle = bare.path }
            switch choice.replacing("formulas ", with: "") {
            case "kept": $0.memoryLimitMb = 500
            case "all": $0.offload = .all
            case "mezo": $0.method = .mezo
            case "batch": $0.batchSize = 2
            case "q and v": $0.projections = ["q", "v"]
            case "B alone": $0.freezeA = true
            case "dora": $0.dora = true
            default: break
            }
        }
        for rules in [LedgerRules.strictPhone, .slowPhone, .strictPad, .strictMac] {
            let (ledger, planner, plan) = try step(settings, rules, keepsCache: choice == "keepCache")
            #expect(ledger.peakBytes <= planner.arrays(plan))
            #expect((plan.keptBlocks > 0) == choice.hasSuffix("kept"))
        }
    }

    @Test func aPlanWithoutFunctionsLacksTheirGraphsAlone() throws {
        let settings = try settings(256)
        let planners = try [Self.demo, bare].map { Planner(try ModelBundle(url: $0).manifest, settings) }
        let plan = try planners[0].plan()
        #expect(try planners[1].plan() == plan && planners[1].arrays(plan) == planners[0].arrays(plan))
        #expect(planners[1].peak(plan) < planners[0].peak(plan))
    }

    @Test(arguments: [true, false]) func aStepWaitsOnceForEachPieceOfWork(_ hasFunctions: Bool) throws {
        let settings = try settings { $0.bundle = (hasFunctions ? Self.demo : bare).path }
        let (ledger, planner, _) = try step(settings)
        // The forward pass, the backward pass and the update of a block, and the keys, the embeddings and the head.
        #expect(ledger.waits == 3 * planner.architecture.numHiddenLayers + 3)
    }

    @Test func waitsForMemorySleep() throws {
        let (ledger, _, _) = try step(settings(256))
        #expect(ledger.secondsSpinning() < 0.01 * ledger.seconds())
    }

    @Test(arguments: RunSettings.Offload.allCases) func aStepMapsNothing(_ offload: RunSettings.Offload) throws {
        let (ledger, _, _) = try step(settings { $0.offload = offload })
        #expect(ledger.mappings == 0)
    }

    @Test func aTokenMapsNothing() throws {
        func mappings(tokens: Int) throws -> Int {
            try Ledger.record(rules: .strictPhone) {
                let bundle = try ModelBundle(url: Self.demo, device: .gpu)
                var request = Generator.Request(prompt: [1, 2, 3])
                request.maxTokens = tokens
                try Generator(bundle).generate(request) { _ in }
            }.mappings
        }
        #expect(try mappings(tokens: 9) == mappings(tokens: 1))
    }

    /// A round trip to the GPU takes longer than a block's kernels, so a token should need only one evaluation.
    @Test(arguments: [0, 0.8] as [Float]) func aTokenIsOneEvaluation(_ temperature: Float) throws {
        let ledger = try Ledger.record(rules: .strictPhone) {
            var request = Generator.Request(prompt: [1, 2, 3])
            (request.maxTokens, request.temperature) = (12, temperature)
            var tokens = 0
            try Generator(ModelBundle(url: Self.demo, device: .gpu)).generate(request) { _ in
                tokens += 1
                if tokens == 4 { Ledger.restart() }
            }
        }
        #expect(ledger.evals == 8 && ledger.asyncEvals == 0 && ledger.waits == 8)
    }

    @Test func evaluationMapsEachFileOnce() throws {
        var mapped = [String: Int]()
        _ = try Ledger.record(rules: .strictPhone) {
            let bundle = try ModelBundle(url: Self.demo, device: .gpu)
            let evaluator = try Evaluator(bundle)
            _ = try evaluator.logLikelihood(of: [1, 2, 3, 4], window: 2)
            _ = try evaluator.scores(of: [[1], [2, 3]], after: [4])
            mapped = bundle.maps.mapped
        }
        #expect(mapped.values.allSatisfy { $0 == 1 })
    }

    @Test func noKernelReadsTheEmbedding() throws {
        let ledger = try Ledger.record(rules: .strictPhone) {
            let bundle = try ModelBundle(url: Self.demo, device: .gpu)
            let x = try bundle.withDevice { try bundle.embed([1, 2, 3]) }
            #expect(x.shape == [1, 3, bundle.architecture.hiddenSize])
        }
        #expect(ledger.mappings == 1)
        #expect(ledger.wiredBytes == 0)
        #expect(ledger.kernels == 0)
    }

    @Test(arguments: [true, false]) func theFirstStepCompilesFewKernelsBetweenBoundaries(_ hasFunctions: Bool) throws {
        let (ledger, _, _) = try step(settings { $0.bundle = (hasFunctions ? Self.demo : bare).path })
        #expect(ledger.firstKernels <= 80)
        #expect(ledger.mostFirstKernels <= 30)
    }

    @Test(arguments: [5, 300]) func theFirstTextCompilesFewKernelsBetweenBoundaries(_ prompt: Int) throws {
        let ledger = try Ledger.record(rules: .strictPhone) {
            var request = Generator.Request(prompt: (0..<prompt).map { $0 % 9 })
            (request.maxTokens, request.temperature) = (3, 1)
            let generator = try Generator(ModelBundle(url: Self.demo, device: .gpu))
            try generator.generate(request, atBlock: { Ledger.boundary() }) { _ in Ledger.boundary() }
        }
        #expect(ledger.firstKernels > 30 && ledger.mostFirstKernels <= 30)
    }

    /// MLX's kernel `qvm_split_k` takes up to three rows without a copy.
    @Test(arguments: 1...4, [128, 96]) func productsOfFewRowsCopyNothing(_ rows: Int, _ columns: Int) throws {
        let ledger = try Ledger.record(rules: .strictPhone) {
            let words = MLXArray.zeros([1024, columns / 8], dtype: .uint32)
            let scales = MLXArray.zeros([1024, columns / 32])
            let format = try #require(
                QuantizationFormat(inputs: columns, words: columns / 8, groups: columns / 32, hasBiases: true))
            let matrix = QuantizedMatrix(
                weight: words, scales: scales, biases: scales, format: format, processor: .gpu)
            let dx = matrix.applyTransposed(MLXArray.zeros([rows, 1024]), addedTo: nil)
            MLX.eval(dx)
            #expect(dx.shape == [rows, columns])
        }
        // Three kernels fill arrays with zeros and one multiplies. Below four rows, one more adds the parts of the product.
        #expect(ledger.kernels == (rows < 4 ? 5 : 4))
    }

    /// The planner's prediction for a CPU also holds on Apple devices, whose allocator rounds up to whole pages and caches buffers.
    @Test(arguments: [128, 256], RunSettings.Offload.allCases)
    func thePredictionOnACPUCoversMetalsAllocator(_ length: Int, _ offload: RunSettings.Offload) throws {
        let rules = LedgerRules(isMetal: true, operationsPerBuffer: 20, megaElementsPerBuffer: 40, runAhead: 0)
        try Processor.$cpu.withValue(.appleCPU) {
            var predicted = 0
            let ledger = try Ledger.record(device: .cpu, rules: rules) {
                let trial = try TrialSteps(
                    settings(length) {
                        $0.device = .cpu
                        $0.offload = offload
                    })
                predicted = trial.planner.arrays(trial.plan)
                #expect(trial.planner.metalBytes == MetalMemory.assumed)
                for _ in 0..<2 { try trial.step {} }
            }
            #expect(ledger.peakBytes <= predicted)
        }
    }

    @Test func thePlanSaysWhatMetalTakes() throws {
        var settings = try settings()
        let bundle = try ModelBundle(url: Self.demo, device: .gpu)
        _ = try Ledger.record {
            let planner = Planner(bundle.manifest, settings)
            let plan = try planner.plan()
            let record = LogRecord.Prediction(settings, bundle, planner, plan)
            let metal = try #require(record.metalBytes)
            #expect(metal > 0)
            #expect(record.predictedPeakBytes >= metal + planner.arrays(plan))
        }
        settings.device = .cpu
        #expect(Planner(bundle.manifest, settings).metalBytes == nil)
    }
}
