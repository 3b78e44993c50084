import Foundation
import MLX
import MeSPBundle
import MeSPCore
import MeSPFiles

/// Measures what training depends on: whether weights are mapped without a copy, the cost of an `eval`, a kernel and a buffer,
/// whether gradients are those of the CPU, and whether a step's peak is the predicted one.
///
/// On a bundle for the CPU every check runs too, with the CPU's own formulas to compare with.
public struct SelfCheck {
    public struct Settings: Codable, Sendable, Equatable {
        /// The bundle's folder.
        public var bundle: String
        /// The number of repeats of a gradient, which must be equal to the last bit.
        public var repeats = 50
        /// The duration of one measurement, in seconds.
        public var seconds = 1.0
        /// Minutes of training without a pause, to see whether the machine slows down; 0 for none.
        public var minutes = 0.0
        /// The names of the checks to run; nil for all.
        public var checks: [String]?

        public init(bundle: String) { self.bundle = bundle }

        /// Reads a settings file: JSON with `bundle`; a key that is absent has its default.
        public init(contentsOf url: URL) throws {
            struct Given: Decodable {
                let bundle: String
                let repeats: Int?
                let seconds: Double?
                let minutes: Double?
                let checks: [String]?
            }
            let given: Given = try readSettings(url)
            self.init(bundle: given.bundle)
            repeats = given.repeats ?? repeats
            seconds = given.seconds ?? seconds
            minutes = given.minutes ?? minutes
            checks = given.checks
        }

        func check() throws {
            guard (1...1000).contains(repeats) else { throw MeSPError("repeats must be at least 1 and at most 1000.") }
            guard seconds > 0, seconds <= 60 else { throw MeSPError("seconds must be above 0 and at most 60.") }
            guard (0...600).contains(minutes) else { throw MeSPError("minutes must be at least 0 and at most 600.") }
        }
    }

    public let settings: Settings

    public init(_ settings: Settings) { self.settings = settings }

    /// Runs every check, one after the other.
    ///
    /// - Parameters:
    ///   - atBlock: called before each check and at every block boundary. It may wait, or throw `CancellationError`, which ends it all.
    ///   - report: gets each part of the report as it comes.
    /// - Returns: all of it.
    /// - Throws: `MeSPError`, where the bundle cannot be used; `CancellationError`. A check that fails throws nothing.
    @discardableResult public func run(
        atBlock: @escaping () throws -> Void = {}, report: (SelfCheckRecord) throws -> Void = { _ in }
    ) throws -> SelfCheckReport {
        let begin = ContinuousClock.now
        // Before anything asks for a GPU.
        let isFirstUse = firstUseOfMLX.time >= begin
        try settings.check()
        let bundle = try ModelBundle(url: URL(fileURLWithPath: settings.bundle))
        let accelerators = NeuralAccelerators.current
        if isFirstUse, bundle.manifest.device == .gpu { accelerators.beginCheck() }
        var hasPassed = false
        defer { accelerators.endCheck(hasPassed: hasPassed) }
        let bench = Bench(bundle: bundle, settings: settings, isFirstUse: isFirstUse, atBlock: atBlock)
        let checks = try bench.chosenChecks()
        let start = SelfCheckReport.Start(
            version: Run.version, mlxVersion: MLXSupport.version, host: LogRecord.Start.host,
            gpu: SystemGPU.current?.name, gpuArchitecture: SystemGPU.current?.architecture,
            bundle: bundle.manifest.name, device: bundle.manifest.device.rawValue,
            dtype: bundle.manifest.dtype.rawValue, neuralAccelerators: accelerators.state.rawValue,
            settings: settings, names: checks.map(\.name))
        try report(.start(start))
        var whole = SelfCheckReport(start)
        for check in checks {
            try atBlock()
            let result = try Self.result(check, bundle, atBlock)
            whole.checks.append(result)
            try report(.check(result))
        }
        let end = SelfCheckReport.End(
            verdict: whole.checks.contains { $0.verdict == .fail } ? .fail : .pass, constants: bench.constants,
            seconds: (ContinuousClock.now - begin) / .seconds(1))
        whole.end = end
        hasPassed = settings.checks == nil && end.verdict == .pass
        try report(.end(end))
        return whole
    }

    /// The result of a check, whatever it throws except `CancellationError`. A check in which a GPU failed runs again.
    static func result(
        _ check: Bench.Check, _ bundle: ModelBundle, _ atBlock: () throws -> Void = {}
    ) throws -> SelfCheckReport.Check {
        let begin = ContinuousClock.now
        var finding: Finding
        do {
            finding = try bundle.withDevice { try MLXErrors.repeating(again: atBlock, check.body) }
        } catch let error as CancellationError {
            throw error
        } catch let skipped as Skipped {
            finding = Finding(.skipped, skipped.reason)
        } catch let error as NotFinite {
            finding = Finding(.fail, "\(error.what) is not finite.")
        } catch {
            finding = Finding(.fail, error.plainSentence)
        }
        Memory.clearCache()
        return .init(
            name: check.name, verdict: finding.verdict, sentence: finding.sentence, measured: finding.measured,
            seconds: (ContinuousClock.now - begin) / .seconds(1))
    }
}

/// The finding of a check.
struct Finding {
    let verdict: SelfCheckReport.Verdict
    let sentence: Sentence
    let measured: [SelfCheckReport.Measurement]

    init(
        _ verdict: SelfCheckReport.Verdict, _ sentence: Sentence, _ measured: [SelfCheckReport.Measurement] = []
    ) {
        (self.verdict, self.sentence, self.measured) = (verdict, sentence, measured)
    }
}

/// The reason why a check is impossible here.
struct Skipped: Error {
    let reason: Sentence
}

/// The state that the checks share. Each is in an extension, by what it looks at.
final class Bench {
    typealias Measurement = SelfCheckReport.Measurement

    struct Check {
        let name: String
        let body: () throws -> Finding
    }

    let bundle: ModelBundle
    let settings: SelfCheck.Settings
    /// Whether nothing in the process used MLX before.
    let isFirstUse: Bool
    var firstStepTaken: FirstStep?
    let atBlock: () throws -> Void
    /// A hook between a result and its check, where tests put an error.
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

    /// Those that the settings name, or all.
    func chosenChecks() throws -> [Check] {
        guard let names = settings.checks else { return checks }
        if let unknown = names.first(where: { name in !checks.contains { $0.name == name } }) {
            throw MeSPError("There is no check \(unknown); there are \(checks.map(\.name).joined(separator: ", ")).")
        }
        return checks.filter { names.contains($0.name) }
    }

    /// In the order in which they run. The first step has to be the first that computes.
    var checks: [Check] {
        let lengths = bundle.manifest.seqLens.sorted()
        return [
            Check(name: "machine", body: machine),
            Check(name: "gpu", body: gpu),
            Check(name: SelfCheckReport.metalFootprint, body: metalFootprint),
            Check(name: "leaving", body: leaving),
            Check(name: "errors", body: { try self.errors() }),
            Check(name: "map.no_copy", body: mapWithoutCopy),
            Check(name: "map.footprint", body: mapFootprint),
            Check(name: "map.first_use", body: mapFirstUse),
            Check(name: "map.leak", body: mapLeak),
            Check(name: "eval.empty", body: emptyEval),
            Check(name: "kernel.dependent", body: dependentKernel),
            Check(name: "buffer.new", body: newBuffer),
            Check(name: "memory.bandwidth", body: bandwidth),
            Check(name: "product.transposed", body: { try self.product(.transposed) }),
            Check(name: "product.plain", body: { try self.product(.plain) }),
            Check(name: "product.dequantized", body: { try self.product(.dequantized) }),
            Check(name: "product.rows", body: { try self.productRows() }),
            Check(name: "block.outputs", body: blockOutputs),
            Check(name: "gradients.cpu", body: gradientsAgainstCPU),
            Check(name: "gradients.mebp", body: gradientsAgainstMeBP),
            Check(name: "gradients.differences", body: { try self.gradientsAgainstDifferences() }),
            Check(name: "tf32", body: tf32),
            Check(name: "head.few_targets", body: fewTargets),
            Check(name: "repeats", body: repeats),
            Check(name: "resume", body: resume),
        ]
            + Self.mixers.map { name, variants in
                Check(name: "decode.\(name)", body: { try self.decoding(name, variants) })
            }
            + lengths.map { length in Check(name: "peak.\(length)", body: { try self.peak(length) }) }
            + lengths.map { length in Check(name: "time.\(length)", body: { try self.time(length) }) }
            + [Check(name: "throttling", body: throttling)]
    }

    // MARK: - What several checks use

    var shortest: Int { bundle.manifest.seqLens.min() ?? 1 }
    var longest: Int { bundle.manifest.seqLens.max() ?? 1 }
    var architecture: Architecture { bundle.architecture }

    /// Settings of a run of `length` tokens, at rank 8 where the bundle has it.
    func run(_ length: Int) -> RunSettings {
        var run = RunSettings(bundle: settings.bundle, output: "")
        run.usePaperUpdate()
        let ranks = bundle.manifest.ranks
        (run.seqLen, run.rank) = (length, ranks.contains(8) ? 8 : ranks[0])
        return run
    }

    /// A sequence of tokens of the vocabulary, the same each time for one number.
    func example(_ length: Int, number: Int = 0) -> Example {
        let tokens = (0...length).map { Int32(($0 * 7919 + number * 104_729 + 17) % architecture.vocabSize) }
        return Example(tokens: tokens, counted: Array(0..<length))
    }

    /// A trainer whose adapters are all but zero: with B = 0, as training begins, the gradient of A would be zero.
    func trainer(_ run: RunSettings, plan: Plan? = nil) throws -> Trainer {
        let plan = try plan ?? defaultPlan(run)
        let trainer = try Trainer(bundle: bundle, settings: run, plan: plan, folder: Self.temporaryFolder)
        for block in trainer.model.trained {
            let noise = MLXRandom.normal(
                [trainer.model.layouts[block].count], scale: 0.02, key: MLXRandom.key(UInt64(block)))
            try trainer.model.lora.write(trainer.model.parameters(block) + noise, block)
        }
        trainer.clock.atBlock = atBlock
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

    /// The median time of `body` in seconds: of 3 times at least, and as often as the settings' seconds allow. A first time, which
    /// may compile kernels, does not count.
    func median(_ body: () throws -> Void) throws -> Double {
        try body()
        var times = [Double]()
        let end = ContinuousClock.now + .seconds(settings.seconds / 4)
        while times.count < 3 || (times.count < 1000 && ContinuousClock.now < end) {
            try times.append(seconds(body))
        }
        return times.sorted()[times.count / 2]
    }

    func seconds(_ body: () throws -> Void) rethrows -> Double {
        try ContinuousClock().measure(body) / .seconds(1)
    }
}

/// Seconds, bytes and rates in a sentence.
func shown(microseconds seconds: Double) -> String { String(format: "%.1f µs", seconds * 1e6) }
func shown(megabytes bytes: Int) -> String { String(format: "%.1f MB", Double(bytes) / 1e6) }
func shown(giga rate: Double) -> String { String(format: "%.1f", rate / 1e9) }
