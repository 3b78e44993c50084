import Foundation
import MLX

/// The version of the trainer, as in `pyproject.toml`.
public let version = "0.1.0"

/// One training run from settings to adapters.
public enum Run {
    /// Trains as `settings` say: evaluates, steps, saves, and appends each record to the log.
    ///
    /// - Parameters:
    ///   - report: gets each record and its line in the log.
    ///   - shouldStop: asked at every block of a forward pass. After `true` the step is dropped, or finished where its updates have
    ///     begun, the adapters are saved, and the run ends as `stopped`.
    /// - Throws: `MeSPError`. What was saved before stands.
    public static func run(
        _ settings: RunSettings, report: (Record, Data) throws -> Void = { _, _ in },
        shouldStop: @escaping () -> Bool = { false }
    ) throws {
        try settings.check()
        let bundle = try ModelBundle(url: URL(fileURLWithPath: settings.bundle))
        try Device.withDefaultDevice(bundle.device) {
            do {
                // Outside, an error in MLX ends the process.
                try withError { try run(settings, bundle, report, shouldStop) }
            } catch let error as MLXError {
                throw MeSPError(error.plainSentence + ".")
            }
        }
    }

    private static func run(
        _ settings: RunSettings, _ bundle: ModelBundle, _ report: (Record, Data) throws -> Void,
        _ shouldStop: @escaping () -> Bool
    ) throws {
        let length = settings.seqLen
        let manifest = bundle.manifest
        try manifest.checkTrace(length: length, rank: settings.rank)
        let planner = Planner(manifest, method: settings.method, length: length, rank: settings.rank)
        let plan = try planner.plan(
            limit: settings.memoryLimitMb.map { Int($0 * 1e6) }, offload: settings.offload)
        let planned = Record.plan(
            .init(
                method: settings.method, seqLen: length, rank: settings.rank, tileBytes: plan.tileBytes,
                keptBlocks: plan.keptBlocks, offload: plan.offload, predictedPeakBytes: planner.peak(plan),
                leastPeakBytes: planner.leastPeak(offload: settings.offload), mappedBytes: bundle.mappedBytes))
        if settings.dryRun { return try report(planned, planned.line()) }

        guard let train = try bundle.tokens("train") else {
            throw MeSPError("\(bundle.url.path) holds no training data; export it with --data.")
        }
        guard train.windowCount(length: length) > 0 else {
            throw MeSPError(
                "The training data has \(train.tokens.count) tokens, one sequence needs \(length + 1); use more data or a shorter sequence."
            )
        }
        let valid = try bundle.tokens("valid")

        let output = URL(fileURLWithPath: settings.output)
        let log = try MetricLog(folder: output)
        func append(_ record: Record) throws {
            let line = try record.line()
            try log.append(line)
            try report(record, line)
        }
        let trainer = try Trainer(
            bundle: bundle, method: settings.method, length: length, rank: settings.rank, alpha: settings.alpha,
            seed: settings.seed, plan: plan, folder: output)
        trainer.shouldStop = shouldStop
        func save() throws {
            try saveAdapters(
                Adapters(layout: trainer.layout, scale: trainer.scale, lora: trainer.lora), model: manifest.model.id,
                to: output.appendingPathComponent("adapters"))
        }
        func evaluate(at step: Int) throws {
            let windows = min(settings.valBatches, valid?.windowCount(length: length) ?? 0)
            guard let valid, windows > 0 else { return }
            let total = try (0..<windows).reduce(Float(0)) { try $0 + trainer.loss(valid.window($1, length: length)) }
            try append(.eval(.init(step: step, loss: total / Float(windows), tokens: windows * length)))
        }

        try append(
            .start(
                .init(
                    version: version, mlxVersion: Manifest.mlxVersion, device: manifest.device, host: host,
                    model: .init(
                        name: manifest.name, id: manifest.model.id, layers: bundle.architecture.numHiddenLayers),
                    settings: settings)))
        try append(planned)

        let sampler = FootprintSampler()
        defer { sampler.stop() }
        let begin = Date.now
        var (done, peak) = (0, 0)
        func end(_ reason: Record.End.Reason) throws {
            let seconds = Date.now.timeIntervalSince(begin)
            try append(
                .end(
                    .init(
                        reason: reason, step: done, seconds: seconds, footprintPeakBytes: max(peak, sampler.takePeak()))
                ))
        }

        do {
            try evaluate(at: 0)
            while done < settings.steps {
                peak = max(peak, sampler.takePeak())
                Memory.peakMemory = 0
                let (start, written) = (Date.now, trainer.writtenBytes)
                let tokens = train.trainingWindow(step: done, seed: settings.seed, length: length)
                let loss =
                    settings.method == .mezo
                    ? try trainer.zerothOrderStep(
                        tokens, epsilon: settings.mezoEpsilon, learningRate: settings.learningRate,
                        seed: settings.seed &+ 1 &+ UInt64(done))
                    : try trainer.step(tokens, method: settings.method, learningRate: settings.learningRate)
                guard loss.isFinite else {
                    throw MeSPError(
                        "The loss of step \(done + 1) is not a finite number; start again with a lower learning rate. The adapters saved last are still there."
                    )
                }
                done += 1
                let stepPeak = sampler.takePeak()
                peak = max(peak, stepPeak)
                let memory = Memory.snapshot()
                try append(
                    .step(
                        .init(
                            step: done, loss: loss, seconds: Date.now.timeIntervalSince(start), tokens: length,
                            learningRate: settings.learningRate, footprintBytes: memoryFootprint(),
                            footprintPeakBytes: stepPeak, mlxActiveBytes: memory.activeMemory,
                            mlxPeakBytes: memory.peakMemory, mlxCacheBytes: memory.cacheMemory,
                            writtenBytes: trainer.writtenBytes - written,
                            thermalState: thermalState)))
                let last = done == settings.steps
                if settings.saveEvery > 0, done % settings.saveEvery == 0, !last { try save() }
                if settings.evalEvery > 0, done % settings.evalEvery == 0, !last { try evaluate(at: done) }
            }
            try save()
            try evaluate(at: done)
            try end(.finished)
        } catch is CancellationError {
            try save()
            try end(.stopped)
        } catch {
            // The log's disk may be the one that is full: the first error is the one to tell.
            try? append(.event(.init(event: "error", message: error.localizedDescription)))
            try? end(.failed)
            throw error
        }
    }

    private static var host: String {
        let system = ProcessInfo.processInfo.operatingSystemVersionString
        var name = utsname()
        uname(&name)
        let machine = withUnsafeBytes(of: &name.machine) { String(decoding: $0.prefix { $0 != 0 }, as: UTF8.self) }
        return "\(machine), \(system)"
    }

    private static var thermalState: String {
        #if canImport(Darwin)
            switch ProcessInfo.processInfo.thermalState {
            case .fair: return "fair"
            case .serious: return "serious"
            case .critical: return "critical"
            default: return "nominal"
            }
        #else
            return "nominal"
        #endif
    }
}
