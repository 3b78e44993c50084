import Foundation
import MLX
import MeSPBundle
import MeSPCore
import MeSPFiles
import MeSPSentences

/// A check of the machine for training. Among other things, it checks that mapping weights does not copy, that gradients are correct, and that the
/// peak memory agrees with the prediction.
public struct SelfCheck {
    public struct Settings: Codable, Sendable, Equatable {
        package var bundle: String
        package var device: Backend?
        /// The type of activations; nil: that of the processor. Float32 shows how exact a GPU is.
        package var dtype: ElementType?
        /// The maximum number of repetitions of a gradient. All results must be equal to the last bit.
        package var repeats = 50
        /// The time for a measurement, in seconds. Some checks take a multiple or a fraction of it.
        package var seconds = 1.0
        /// The duration of continuous training, in minutes, to measure thermal throttling; 0 for none.
        package var minutes = 0.0
        package var checks: [String]?

        package init(bundle: String) { self.bundle = bundle }

        package init(contentsOf url: URL) throws {
            self = try readSettings(url)
        }

        public init(from decoder: any Decoder) throws {
            let fields = try decoder.container(keyedBy: CodingKeys.self)
            bundle = try fields.decode(String.self, forKey: .bundle)
            device = try fields.decodeIfPresent(Backend.self, forKey: .device)
            dtype = try fields.decodeIfPresent(ElementType.self, forKey: .dtype)
            repeats = try fields.decodeIfPresent(Int.self, forKey: .repeats) ?? repeats
            seconds = try fields.decodeIfPresent(Double.self, forKey: .seconds) ?? seconds
            minutes = try fields.decodeIfPresent(Double.self, forKey: .minutes) ?? minutes
            checks = try fields.decodeIfPresent([String].self, forKey: .checks)
        }

        func check() throws {
            guard [nil, .float32, .bfloat16].contains(dtype) else {
                throw MeSPError("dtype must be float32 or bfloat16.")
            }
            guard (1...1000).contains(repeats) else { throw MeSPError("repeats must be at least 1 and at most 1000.") }
            guard seconds > 0, seconds <= 60 else { throw MeSPError("seconds must be above 0 and at most 60.") }
            guard (0...600).contains(minutes) else { throw MeSPError("minutes must be at least 0 and at most 600.") }
        }
    }

    package let settings: Settings

    package init(_ settings: Settings) { self.settings = settings }

    /// Runs the checks.
    ///
    /// - Parameters:
    ///   - atBlock: a closure that is called before each check and at each block boundary. It may wait, or throw `CancellationError` to end the
    ///     self-check.
    ///   - report: receives the report so far: at the start, after each check and at the end.
    /// - Throws: `MeSPError` if the settings or the bundle cannot be used; `CancellationError`; an error of `report`. A failed check throws no error.
    @discardableResult package func run(
        atBlock: @escaping () throws -> Void = {}, report: (SelfCheckReport) throws -> Void = { _ in }
    ) throws -> SelfCheckReport {
        let begin = ContinuousClock.now
        // `firstUseOfMLX` is initialized when it is first read. It must be read before the first use of a GPU.
        let isFirstUse = firstUseOfMLX.time >= begin
        try settings.check()
        var bundle = try ModelBundle(url: URL(fileURLWithPath: settings.bundle), device: settings.device)
        if let dtype = settings.dtype { bundle.dtype = dtype.dtype }
        let accelerators = NeuralAccelerators.current
        if isFirstUse, bundle.device == .gpu { accelerators.beginCheck() }
        var hasPassed = false
        defer { accelerators.endCheck(hasPassed: hasPassed) }
        let suite = CheckSuite(bundle: bundle, settings: settings, isFirstUse: isFirstUse, atBlock: atBlock)
        let checks = try suite.chosenChecks()
        let start = SelfCheckReport.Start(
            version: Run.version, mlxVersion: MLXSupport.version, host: LogRecord.Start.host,
            gpu: SystemGPU.current?.name, gpuArchitecture: SystemGPU.current?.architecture,
            bundle: bundle.manifest.name, device: bundle.device.rawValue,
            dtype: bundle.dtype == .float32 ? "float32" : "bfloat16", neuralAccelerators: accelerators.state.rawValue,
            settings: settings, names: checks.map(\.name))
        var whole = SelfCheckReport(start: start)
        try report(whole)
        for check in checks {
            try atBlock()
            whole.checks.append(try Self.perform(check, bundle, atBlock))
            try report(whole)
        }
        let isGood = !whole.checks.contains { $0.verdict == .fail }
        whole.end = .init(
            verdict: isGood ? .pass : .fail, constants: suite.constants,
            seconds: (ContinuousClock.now - begin) / .seconds(1))
        hasPassed = settings.checks == nil && isGood
        try report(whole)
        return whole
    }

    /// Returns the result of a check. The error `Skipped` gives the verdict `skipped`. Another error, except `CancellationError`, gives a failure.
    /// The check is repeated after an error of the GPU.
    static func perform(
        _ check: CheckSuite.Check, _ bundle: ModelBundle, _ atBlock: () throws -> Void = {}
    ) throws -> SelfCheckReport.Check {
        let begin = ContinuousClock.now
        var finding: Finding
        do {
            finding = try bundle.withDevice { try MLXErrors.repeating(beforeRetry: atBlock, check.body) }
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

struct Skipped: Error {
    let reason: Sentence
}
