import Foundation
import MLX

/// One training run from settings to adapters.
public enum Run {
    /// The version of the trainer, as in `pyproject.toml`.
    public static let version = "0.1.0"

    /// Trains as `settings` say: evaluates, steps, saves, and appends each record to the log.
    ///
    /// - Parameters:
    ///   - settings: the bundle, the output folder, and everything the run depends on.
    ///   - report: gets each record and its line in the log.
    ///   - atBlock: called at every block boundary with a function that appends an event to the log. It may wait, and the half-done
    ///     step with it. After `CancellationError` the step is dropped, or finished where its updates have begun, the adapters are
    ///     saved, and the run ends as `stopped`.
    ///   - besideBytes: the process's footprint without the run, as an app's own; the memory limit is for what comes on top.
    ///   - memoryIsShort: asked before each step whether the system has warned since; the run then goes on with a cheaper plan.
    /// - Throws: `MeSPError`. What was saved before stands.
    public static func run(
        _ settings: RunSettings, report: @escaping (LogRecord, Data) throws -> Void = { _, _ in },
        atBlock: @escaping (_ log: (LogRecord.Event) throws -> Void) throws -> Void = { _ in },
        besideBytes: Int = 0, memoryIsShort: () -> Bool = { false }
    ) throws {
        try settings.check()
        let bundle = try ModelBundle(
            url: URL(fileURLWithPath: settings.bundle), text: settings.data.map { URL(fileURLWithPath: $0) },
            checksums: !settings.dryRun)
        try bundle.withDevice { try run(settings, bundle, report, atBlock, besideBytes, memoryIsShort) }
    }

    private static func run(
        _ settings: RunSettings, _ bundle: ModelBundle, _ report: @escaping (LogRecord, Data) throws -> Void,
        _ atBlock: @escaping (_ log: (LogRecord.Event) throws -> Void) throws -> Void, _ besideBytes: Int,
        _ memoryIsShort: () -> Bool
    ) throws {
        let manifest = bundle.manifest
        try manifest.check(settings)
        let output = URL(fileURLWithPath: settings.output)
        guard !settings.resume || FileManager.default.fileExists(atPath: LogWriter.url(in: output).path) else {
            throw MeSPError("\(output.path) holds no run to resume; start the run without resume.")
        }
        // Held from before the state is read, so that it stays what it is.
        var lock = settings.resume && !settings.dryRun ? try FolderLock(output) : nil
        defer { withExtendedLifetime(lock) {} }
        let saved = settings.resume ? try SavedState.load(from: output, settings) : nil
        let planner = Planner(manifest, settings)
        var plan = try saved?.plan ?? planner.plan()
        func planned() -> LogRecord {
            .plan(
                .init(
                    method: settings.method, seqLen: settings.seqLen, rank: settings.rank, tileBytes: plan.tileBytes,
                    keptBlocks: plan.keptBlocks, offload: plan.offload, predictedPeakBytes: planner.peak(plan),
                    leastPeakBytes: planner.leastPeak, mappedBytes: bundle.mappedBytes))
        }
        if settings.dryRun { return try report(planned(), planned().line()) }

        let data = try Splits(bundle, settings)
        if lock == nil { lock = try FolderLock(output) }
        // The first work for the GPU, and so a block boundary too; a stop waits for the next.
        try? atBlock { _ in }
        var trainer = try Trainer(bundle: bundle, settings: settings, plan: plan, folder: output)
        if saved == nil, let adapters = settings.adapters { try trainer.startFrom(URL(fileURLWithPath: adapters)) }
        // A run that ended before it had saved anything is begun again.
        let log = try LogWriter(folder: output, resumeAt: settings.resume ? saved?.state.logBytes ?? 0 : nil)
        func append(_ record: LogRecord) throws {
            let line = try record.line()
            try log.append(line)
            try report(record, line)
        }
        func letPause() { trainer.clock.atBlock = { try atBlock { try append(.event($0)) } } }
        letPause()
        var state = SavedState()
        if let saved {
            state = saved.state
            try trainer.restore { saved.vectors[$0] }
            try append(.event(.init(event: "resumed", message: "after step \(state.step)")))
        } else {
            try append(
                .start(
                    .init(
                        version: version, mlxVersion: Manifest.mlxVersion, device: manifest.device, host: host,
                        model: .init(
                            name: manifest.name, id: manifest.model.id, layers: bundle.architecture.numHiddenLayers),
                        settings: settings)))
            try append(planned())
        }

        func save() throws {
            try trainer.saveAdapters(to: output.appendingPathComponent("adapters"))
            state.logBytes = try log.length()
            try state.save(trainer, plan: plan, settings: settings, in: output)
        }
        /// The mean loss of the first sequences of a split, in nats a token.
        func evaluate(_ split: String, _ sequences: TokenStream.Sequences) throws -> Float {
            var (loss, tokens) = (Float(0), 0)
            for index in 0..<min(settings.valBatches, sequences.count) {
                let example = sequences[index]
                loss += try trainer.model.loss(example)
                tokens += example.counted.count
            }
            guard loss.isFinite else {
                throw MeSPError(
                    "The loss on the \(split) data is not finite after step \(state.step); start again with a lower learning rate. What was saved last is still there."
                )
            }
            try append(.eval(.init(step: state.step, split: split, loss: loss / Float(tokens), tokens: tokens)))
            return loss / Float(tokens)
        }
        func evaluate() throws {
            guard let valid = data.valid else { return }
            let loss = try evaluate("valid", valid)
            state.evaluated = state.step
            state.evaluationsSinceBest += 1
            guard loss < state.best else { return }
            (state.best, state.evaluationsSinceBest) = (loss, 0)
            if settings.evalEvery > 0, state.step > 0 {
                try trainer.saveAdapters(to: output.appendingPathComponent("best"))
            }
        }
        func step() throws -> LogRecord.Step {
            let (start, before, written) = (Date.now, trainer.clock.time, trainer.writtenBytes)
            Memory.peakMemory = 0
            let batches = data.batches(step: state.step, settings)
            let result = try trainer.step(batches, number: state.step)
            let (memory, time) = (Memory.snapshot(), trainer.clock.time)
            state.step += 1
            return .init(
                step: state.step, loss: result.loss,
                seconds: Date.now.timeIntervalSince(start) - (time.waiting - before.waiting),
                forwardSeconds: time.forward - before.forward, lossSeconds: time.loss - before.loss,
                backwardSeconds: time.backward - before.backward, tokens: result.tokens,
                gradNorm: result.gradientNorm, learningRate: settings.learningRate(step: state.step - 1),
                footprintBytes: memoryFootprint(), footprintPeakBytes: 0, mlxActiveBytes: memory.activeMemory,
                mlxPeakBytes: memory.peakMemory, mlxCacheBytes: memory.cacheMemory,
                writtenBytes: trainer.writtenBytes - written, thermalState: ThermalState.current.rawValue)
        }

        /// Goes on with the next cheaper plan. It is saved at once: what is resumed must repeat it.
        func economize(_ reason: String) throws {
            guard let cheaper = planner.cheaper(than: plan) else {
                try save()
                throw MeSPError(
                    "\(reason), and no plan takes less memory. The state after step \(state.step) is saved; resume the run when there is more, or with a higher memory limit."
                )
            }
            let vectors = try trainer.vectors()
            plan = cheaper
            trainer = try Trainer(bundle: bundle, settings: settings, plan: plan, folder: output)
            letPause()
            try trainer.restore { vectors[$0] }
            let message = "\(reason); the run goes on with a plan that takes less"
            try append(.event(.init(event: "cheaper_plan", message: message)))
            try append(planned())
            try save()
        }

        let sampler = FootprintSampler()
        defer { sampler.stop() }
        let begin = Date.now
        var peak = 0
        var overBudget: String?
        func end(_ reason: LogRecord.End.Reason) throws {
            peak = max(peak, sampler.takePeak())
            let seconds = Date.now.timeIntervalSince(begin)
            try append(.end(.init(reason: reason, step: state.step, seconds: seconds, footprintPeakBytes: peak)))
        }

        do {
            while true {
                let last = state.step >= settings.steps
                let due = settings.evalEvery > 0 && state.step % settings.evalEvery == 0
                if state.step == 0 || last || due, state.evaluated != state.step { try evaluate() }
                let early = settings.earlyStopping > 0 && state.evaluationsSinceBest >= settings.earlyStopping
                if last || early || (settings.saveEvery > 0 && state.step > 0 && state.step % settings.saveEvery == 0) {
                    try save()
                }
                if early, !last {
                    let message = "no lower held-out loss in \(state.evaluationsSinceBest) evaluations"
                    try append(.event(.init(event: "early_stopping", message: message)))
                }
                if last || early { break }

                if let reason = memoryIsShort() ? "The system is short of memory" : overBudget {
                    overBudget = nil
                    try economize(reason)
                }
                peak = max(peak, sampler.takePeak())
                var record: LogRecord.Step
                do {
                    record = try step()
                } catch let bad as NotFinite {
                    guard settings.skipBadSteps else {
                        throw MeSPError(
                            "\(bad.what) is not finite in step \(state.step + 1); start again with a lower learning rate, or leave such steps out with skip_bad_steps. What was saved last is still there."
                        )
                    }
                    state.step += 1
                    let message = "\(bad.what) is not finite in step \(state.step), which was taken back"
                    try append(.event(.init(event: "skipped_step", message: message)))
                    continue
                }
                record.footprintPeakBytes = sampler.takePeak()
                peak = max(peak, record.footprintPeakBytes)
                try append(.step(record))
                let own = Double(record.footprintPeakBytes - besideBytes)
                if let limit = settings.memoryLimitMb, own > limit * 1e6 {
                    let taken = String(format: "%.1f", own / 1e6)
                    overBudget = "Step \(state.step) took \(taken) MB, more than the memory limit"
                }
            }
            if let test = data.test { _ = try evaluate("test", test) }
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
}
