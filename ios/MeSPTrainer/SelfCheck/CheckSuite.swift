import Foundation
import MLX
import MeSPBundle
import MeSPCore
import MeSPSentences

final class CheckSuite {
    typealias Measurement = SelfCheckReport.Measurement

    struct Check {
        let name: String
        let body: () throws -> Finding
    }

    let bundle: ModelBundle
    let settings: SelfCheck.Settings
    let isFirstUse: Bool
    var firstStepTaken: FirstStep?
    let atBlock: () throws -> Void
    /// A hook through which tests insert errors into results.
    let tamper: (_ check: String, MLXArray) -> MLXArray
    var constants = SelfCheckReport.Constants()

    init(
        bundle: ModelBundle, settings: SelfCheck.Settings, isFirstUse: Bool = true,
        atBlock: @escaping () throws -> Void = {},
        tamper: @escaping (_ check: String, MLXArray) -> MLXArray = { $1 }
    ) {
        (self.bundle, self.settings, self.isFirstUse) = (bundle, settings, isFirstUse)
        (self.atBlock, self.tamper) = (atBlock, tamper)
    }

    func chosenChecks() throws -> [Check] {
        guard let names = settings.checks else { return checks }
        if let unknown = names.first(where: { name in !checks.contains { $0.name == name } }) {
            throw MeSPError("There is no check \(unknown); there are \(checks.map(\.name).joined(separator: ", ")).")
        }
        return checks.filter { names.contains($0.name) }
    }

    /// All checks, in their order. `metal.footprint` measures the process's first step, so it precedes the other checks that compute.
    var checks: [Check] {
        let lengths = bundle.manifest.seqLens.sorted()
        return [
            Check(name: "machine", body: describeMachine),
            Check(name: "gpu", body: describeGPU),
            Check(name: SelfCheckReport.metalFootprint, body: measureMetalFootprint),
            Check(name: "leaving", body: checkLeaving),
            Check(name: "errors", body: { try self.checkErrors() }),
            Check(name: "map.no_copy", body: checkMapWithoutCopy),
            Check(name: "map.footprint", body: measureMapFootprint),
            Check(name: "map.first_use", body: measureMapFirstUse),
            Check(name: "map.leak", body: measureMapLeak),
            Check(name: "eval.empty", body: measureEmptyEval),
            Check(name: "kernel.dependent", body: measureDependentKernel),
            Check(name: "buffer.new", body: measureNewBuffer),
            Check(name: "memory.bandwidth", body: measureBandwidth),
            Check(name: "product.transposed", body: { try self.measureProduct(.transposed) }),
            Check(name: "product.plain", body: { try self.measureProduct(.plain) }),
            Check(name: "product.dequantized", body: { try self.measureProduct(.dequantized) }),
            Check(name: "product.rows", body: { try self.checkProductRows() }),
            Check(name: "block.outputs", body: checkBlockOutputs),
            Check(name: "gradients.cpu", body: compareGradientsWithCPU),
            Check(name: "gradients.mebp", body: compareGradientsWithMeBP),
            Check(name: "gradients.differences", body: { try self.compareGradientsWithDifferences() }),
            Check(name: "tf32", body: checkTF32),
            Check(name: "head.few_targets", body: checkFewTargets),
            Check(name: "repeats", body: repeatGradient),
            Check(name: "resume", body: checkResume),
        ]
            + Self.mixers.map { name, variants in
                Check(name: "decode.\(name)", body: { try self.checkDecoding(name, variants) })
            }
            + lengths.map { length in Check(name: "peak.\(length)", body: { try self.measurePeak(length) }) }
            + lengths.map { length in Check(name: "time.\(length)", body: { try self.measureTimes(length) }) }
            + [Check(name: "throttling", body: measureThrottling)]
    }

    // MARK: - What several checks use

    var shortest: Int { bundle.manifest.seqLens.min() ?? 1 }
    var longest: Int { bundle.manifest.seqLens.max() ?? 1 }
    var architecture: Architecture { bundle.architecture }

    func run(_ length: Int) -> RunSettings {
        var run = RunSettings(bundle: settings.bundle, output: "")
        run.usePaperUpdate()
        let ranks = bundle.manifest.ranks
        (run.device, run.seqLen, run.rank) = (bundle.device, length, ranks.contains(8) ? 8 : ranks[0])
        return run
    }

    func example(_ length: Int, number: Int = 0) -> Example {
        let tokens = (0...length).map { Int32(($0 * 7919 + number * 104_729 + 17) % architecture.vocabSize) }
        return Example(tokens: tokens, counted: Array(0..<length))
    }

    /// Returns a trainer with random adapters. If B were 0, the gradient of A would be 0.
    func makeTrainer(_ run: RunSettings, plan: Plan? = nil) throws -> Trainer {
        let plan = try plan ?? defaultPlan(run)
        let trainer = try Trainer(bundle: bundle, settings: run, plan: plan, folder: Self.temporaryFolder)
        for block in trainer.model.lora.trained {
            let noise = MLXRandom.normal(
                [trainer.model.lora.layouts[block].count], scale: 0.02, key: MLXRandom.key(UInt64(block)))
            try trainer.model.lora.vectors.write(trainer.model.lora.parameters(block) + noise, block)
        }
        trainer.work.atBlock = atBlock
        return trainer
    }

    func defaultPlan(_ run: RunSettings) throws -> Plan {
        do {
            return try Planner(bundle.manifest, run).plan()
        } catch let error as MeSPError {
            throw Skipped(reason: error.sentence)
        }
    }

    static var temporaryFolder: URL { FileManager.default.temporaryDirectory }

    /// Returns the median time of `body`, in seconds. A first call, which may compile kernels, is not measured.
    func medianTime(_ body: () throws -> Void) throws -> Double {
        try body()
        return try median(least: 3, most: 1000) { try seconds(body) }
    }

    /// Returns the median of `least` measured times or more, up to `most` within a quarter of `settings.seconds`.
    func median(least: Int = 5, most: Int, _ measure: () throws -> Double) rethrows -> Double {
        var times = [Double]()
        let end = ContinuousClock.now + .seconds(settings.seconds / 4)
        while times.count < least || (times.count < most && ContinuousClock.now < end) {
            try times.append(measure())
        }
        return times.sorted()[times.count / 2]
    }

    func seconds(_ body: () throws -> Void) rethrows -> Double {
        try ContinuousClock().measure(body) / .seconds(1)
    }
}

func shown(microseconds seconds: Double) -> String { String(format: "%.1f µs", seconds * 1e6) }
func shown(megabytes bytes: Int) -> String { String(format: "%.1f MB", Double(bytes) / 1e6) }
func shown(giga rate: Double) -> String { String(format: "%.1f", rate / 1e9) }
