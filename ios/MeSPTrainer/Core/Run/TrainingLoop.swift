import Foundation
import MLX
import MeSPBundle
import MeSPSentences

final class TrainingLoop {
    private let settings: RunSettings
    private let bundle: ModelBundle
    private let data: Splits
    private let output: URL
    private let planner: Planner
    private let trainer: Trainer
    private var state: SavedState
    private var savedStep: Int
    private let log: LogWriter
    private let secret: SecretKey?
    private let hooks: RunHooks

    private let sampler = FootprintSampler()
    private let progress: Progress
    private var hasTrained = false
    private var overBudget: Sentence?
    private var saveAt: ContinuousClock.Instant

    private static let generalPieces = 16
    /// With `saveEvery`, a run also saves when the first time has passed since its beginning, or the second time since its last save.
    private static let (timeToFirstSave, timeBetweenSaves) = (Duration.seconds(60), Duration.seconds(180))

    /// The end of a loop that took too much memory. The run continues with `plan` from the last saved state.
    struct CutShort: Error {
        let reason: Sentence
        let plan: Plan
    }

    final class Progress {
        fileprivate let begin = ContinuousClock.now
        fileprivate var peak = 0
        /// The state from which the run continues if none is saved: that of the first evaluation, without vectors.
        fileprivate var start: SavedState?
    }

    init(
        _ settings: RunSettings, _ bundle: ModelBundle, _ data: Splits, _ sources: SavedState.Sources,
        _ planner: Planner, _ plan: Plan, from saved: SavedState.Loaded?, _ progress: Progress, after cut: CutShort?,
        hooks: RunHooks
    ) throws {
        (self.settings, self.bundle, self.data, self.planner, self.hooks) = (settings, bundle, data, planner, hooks)
        self.progress = progress
        state = saved?.state ?? progress.start ?? SavedState(plan: plan, settings: settings, sources: sources)
        (state.plan, state.settings) = (plan, settings)
        savedStep = saved?.state.step ?? 0
        saveAt = hooks.now() + Self.timeToFirstSave
        output = URL(fileURLWithPath: settings.output)
        trainer = try MLXErrors.repeating {
            try Trainer(bundle: bundle, settings: settings, plan: plan, folder: URL(fileURLWithPath: settings.output))
        }
        if saved == nil, let adapters = settings.adapters {
            try trainer.model.lora.load(from: URL(fileURLWithPath: adapters))
        }
        // A resumed run without a saved state starts again, with an empty log.
        log = try LogWriter(folder: output, resumeAt: settings.resume ? state.logBytes : nil)
        secret = settings.dpClip == nil ? nil : try SecretKey(in: output, resumes: settings.resume)
        trainer.work.atBlock = { [unowned self] in try self.hooks.atBlock { try append(.event($0)) } }
        if let saved { try SavedState.restore(trainer) { saved.vectors[$0] } }
        if log.isEmpty { try append(.start(.init(settings, bundle, hooks.battery()))) }
        if let cut { try note("cheaper_plan", "\(cut.reason); the run continues with a plan that takes less memory") }
        if log.isEmpty || cut != nil { try append(.plan(plan, .init(settings, bundle, planner, plan, data))) }
        if log.lostLines {
            try note("log_cut_off", "lines of the log were lost, as in a power failure; the run resumes from its state")
        }
        guard let before = saved?.state.settings else { return }
        try note("resumed", "after step \(state.step)")
        if let was = before.device, was != bundle.device {
            try note("device", "the run continues on the \(bundle.device.name); it was on the \(was.name)")
        }
        if settings.schedule != .constant, before.steps != settings.steps {
            try note(
                "schedule", "the schedule is now that of \(settings.steps) steps; it was that of \(before.steps)")
        }
    }

    func run() throws {
        _ = sampler.takePeak()
        defer { sampler.stop() }
        do {
            do {
                try MLXErrors.checked(train)
            } catch let failure as MLXFailure where failure.isOfMemory {
                throw try cutShort("MLX ran short of memory")
            }
        } catch let cut as CutShort {
            throw cut
        } catch {
            // Logging may fail too, for example because the disk is full. The first error is the one to report.
            try? note("error", error.plainSentence)
            try? end(.failed)
            throw error
        }
    }

    private func train() throws {
        do {
            while try !advance() {}
            hasTrained = true
            if let limit = settings.maxForgetting { try chooseStrength(limit) }
            if let test = data.test { _ = try evaluate("test", test) }
            if secret != nil { try SecretKey.remove(from: output) }
            try end(.finished)
        } catch is CancellationError {
            // After training, the state is already saved. A resumed run repeats the remaining work.
            if !hasTrained { try save() }
            try end(.stopped)
        } catch is GPUWithdrawn {
            state.step = savedStep
            try end(.stopped)
        }
    }

    /// Saves the state, unless MLX is out of memory or a step has changed parameters.
    ///
    /// - Throws: `MeSPError` if no plan takes less memory.
    private func cutShort(_ reason: Sentence) throws -> CutShort {
        if !hasTrained, !trainer.work.hasChanged {
            do { try save() } catch let failure as MLXFailure where failure.isOfMemory {}
        }
        return CutShort(reason: reason, plan: try planner.cheaper(than: state.plan, because: reason))
    }

    /// Evaluates and saves if it is time, and takes a step unless the training is done.
    ///
    /// - Returns: whether the training is done.
    private func advance() throws -> Bool {
        trainer.work.hasChanged = false
        let last = state.step >= settings.steps
        let due = settings.evalEvery > 0 && state.step % settings.evalEvery == 0
        if state.step == 0 || last || due, state.evaluated != state.step { try evaluate() }
        let early = settings.earlyStopping > 0 && state.evaluationsSinceBest >= settings.earlyStopping
        if last || early || isTimeToSave { try save() }
        if early, !last {
            try note("early_stopping", "no lower held-out loss in \(state.evaluationsSinceBest) evaluations")
        }
        if last || early { return true }

        if let reason = hooks.memoryIsShort() ? "The system is short of memory" : overBudget {
            throw try cutShort(reason)
        }
        try stepOrSkip()
        return false
    }

    // MARK: - Steps

    /// Takes a step, and logs its record, or an event if the step drew no example. If a number is not finite, the step is logged as skipped with
    /// `skipBadSteps`, and an error is thrown without it.
    private func stepOrSkip() throws {
        progress.peak = max(progress.peak, sampler.takePeak())
        var record: LogRecord.Step
        do {
            record = try recordedStep()
        } catch let bad as NotFinite {
            guard settings.skipBadSteps else {
                throw MeSPError(
                    "\(bad.what) is not finite in step \(state.step + 1); start again with a lower learning rate, or skip bad steps. The last saved state is kept.",
                    .notFinite)
            }
            state.step += 1
            return try note("skipped_step", "\(bad.what) is not finite in step \(state.step), which was undone")
        }
        record.footprintPeakBytes = sampler.takePeak()
        progress.peak = max(progress.peak, record.footprintPeakBytes)
        if record.tokens == 0 {
            try note("empty_batch", "step \(record.step) drew no example, and added only noise")
        } else {
            try append(.step(record))
        }
        let own = Double(record.footprintPeakBytes - hooks.besideBytes)
        if let limit = settings.memoryLimitMb, own > limit * 1e6 {
            let taken = String(format: "%.1f", own / 1e6)
            overBudget = "Step \(state.step) took \(taken) MB, more than the memory limit"
        }
    }

    private func recordedStep() throws -> LogRecord.Step {
        let (start, before, written) = (ContinuousClock.now, trainer.work.time, trainer.writtenBytes)
        Memory.peakMemory = 0
        let result = try stepResult(number: state.step)
        let (memory, time) = (Memory.snapshot(), trainer.work.time)
        state.step += 1
        return .init(
            step: state.step, loss: result.loss,
            seconds: (.now - start) / .seconds(1) - (time.waiting - before.waiting),
            forwardSeconds: time.forward - before.forward, lossSeconds: time.loss - before.loss,
            backwardSeconds: time.backward - before.backward, tokens: result.tokens,
            inputTokens: result.inputTokens, gradNorm: result.gradientNorm,
            learningRate: settings.learningRate(step: state.step - 1, of: bundle.architecture),
            footprintBytes: memoryFootprint(), footprintPeakBytes: 0, mlxActiveBytes: memory.activeMemory,
            mlxPeakBytes: memory.peakMemory, mlxCacheBytes: memory.cacheMemory,
            writtenBytes: trainer.writtenBytes - written, thermalState: ThermalState.current.rawValue,
            replayed: data.replayed(step: state.step - 1), margin: result.margin, accuracy: result.accuracy,
            rewardChosen: result.rewardChosen, rewardRejected: result.rewardRejected, kl: result.kl,
            reward: result.reward, sampledTokens: result.sampledTokens, samplingSeconds: result.samplingSeconds)
    }

    private func stepResult(number: Int) throws -> StepResult {
        let (data, objective) = (data, settings.objective)
        if let size = settings.groupSize {
            guard let reward = hooks.reward else {
                throw MeSPError("A run with group_size needs a function that rewards answers.")
            }
            return try trainer.rewardedStep(
                data.sequences(step: number), size: size, lengths: data.train.lengths, number: number,
                cacheLimit: planner.answerCaches(state.plan), reward)
        }
        if let secret {
            let drawn = secret.drawn(settings.batchSize, of: data.exampleCount, step: number).lazy
            guard let objective else {
                return try trainer.privateStep(drawn.map { SequenceLoss([data.train[$0]]) }, secret, number: number)
            }
            return try trainer.privateStep(
                drawn.map { PreferenceBatch(data.train.answers($0, split: 0, objective), objective) }, secret,
                number: number)
        }
        guard let objective else {
            return try takeStep(trainer, [SequenceLoss(data.sequences(step: number))], number: number)
        }
        let batches = data.preferenceBatches(step: number, objective)
        return try takeStep(
            trainer, batches.map { PreferenceBatch($0, objective, share: 1 / Double(batches.count)) }, number: number)
    }

    // MARK: - Evaluations

    private func evaluate() throws {
        guard let valid = data.valid else { return }
        let loss = try evaluate("valid", valid)
        if state.step == 0 { state.first = loss }
        state.evaluated = state.step
        state.evaluationsSinceBest += 1
        guard loss < state.best ?? .infinity else { return }
        (state.best, state.evaluationsSinceBest) = (loss, 0)
        guard state.step > 0 else {
            state.logBytes = try log.synchronize()
            progress.start = state
            return
        }
        if settings.evalEvery > 0 { try trainer.model.lora.save(to: output.appendingPathComponent("best")) }
    }

    /// Logs and returns the mean loss of the first sequences of a split.
    private func evaluate(_ split: String, _ sequences: TokenStream.Sequences) throws -> Float {
        let record = try during(.evaluating) { try measured(split, sequences) }
        try append(.eval(record))
        return record.loss
    }

    private func measured(_ split: String, _ sequences: TokenStream.Sequences) throws -> LogRecord.Eval {
        var record = LogRecord.Eval(step: state.step, split: split, loss: 0, tokens: 0)
        if let objective = settings.objective {
            try data.evaluate(sequences, objective, trainer, &record)
        } else {
            (record.loss, record.tokens) = try sequences.meanLoss(trainer.model, first: settings.valBatches)
        }
        guard record.loss.isFinite else {
            throw MeSPError(
                "The loss on the \(split) data is not finite after step \(state.step); start again with a lower learning rate. The last saved state is kept.",
                .notFinite)
        }
        return record
    }

    /// Chooses the adapters' strength (`chosenStrength`), and saves the adapters.
    private func chooseStrength(_ limit: Double) throws {
        guard let general = data.general, let valid = data.valid, let before = state.first else { return }
        func loss(_ sequences: TokenStream.Sequences, _ count: Int, at strength: Float) throws -> Float {
            trainer.model.lora.strength = strength
            defer { trainer.model.lora.strength = 1 }
            return try sequences.meanLoss(trainer.model, first: count).loss
        }
        var chosen = try during(.evaluating) {
            try chosenStrength(
                step: state.step, limit: limit, before: before,
                general: { try loss(general, Self.generalPieces, at: $0) },
                heldOut: { try loss(valid, settings.valBatches, at: $0) })
        }
        if chosen.strength == 0, let adapters = settings.adapters {
            try trainer.model.lora.load(from: URL(fileURLWithPath: adapters))
            chosen.generalAfter = try loss(general, Self.generalPieces, at: 1)
        } else {
            trainer.model.lora.strength = chosen.strength
            chosen.generalKl = try during(.evaluating) {
                try general.meanDivergence(trainer.model, first: Self.generalPieces)
            }
        }
        try trainer.model.lora.save(to: output.appendingPathComponent("adapters"))
        try append(.strength(chosen))
    }

    // MARK: - Saves and the log

    private var isTimeToSave: Bool {
        guard settings.saveEvery > 0, state.step > 0 else { return false }
        return state.step % settings.saveEvery == 0 || hooks.now() >= saveAt
    }

    private func save() throws {
        if let name = try trainer.model.lora.firstNotFinite() {
            throw MeSPError(
                "The parameter \(name) is not finite after step \(state.step); start again with a lower learning rate. The last saved state is kept.",
                .notFinite)
        }
        try during(.saving) {
            try trainer.model.lora.save(to: output.appendingPathComponent("adapters"))
            // The log is synchronized before the state is saved, because the state contains the log's length.
            state.logBytes = try log.synchronize()
            try state.save(trainer, in: output)
        }
        savedStep = state.step
        saveAt = hooks.now() + Self.timeBetweenSaves
    }

    private func during<R>(_ phase: RunPhase, _ body: () throws -> R) rethrows -> R {
        hooks.atPhase(phase)
        defer { hooks.atPhase(.training) }
        return try body()
    }

    private func append(_ record: LogRecord) throws {
        for failure in MLXErrors.takeFailures() {
            try write(.event(.init(event: "gpu_error", message: "\(failure); the work was done again")))
        }
        try write(record)
    }

    private func note(_ event: String, _ message: Sentence) throws {
        try append(.event(.init(event: event, message: message)))
    }

    private func write(_ record: LogRecord) throws {
        let line = try record.line()
        try log.append(line)
        try hooks.report(record, line)
    }

    private func end(_ reason: LogRecord.End.Reason) throws {
        progress.peak = max(progress.peak, sampler.takePeak())
        let seconds = (.now - progress.begin) / .seconds(1)
        try append(
            .end(
                .init(
                    reason: reason, step: state.step, seconds: seconds, footprintPeakBytes: progress.peak,
                    battery: hooks.battery(), thermalState: ThermalState.current.rawValue)))
        _ = try log.synchronize()
    }
}

extension Planner {
    func cheaper(than plan: Plan, because reason: Sentence) throws -> Plan {
        if let plan = cheaper(than: plan) { return plan }
        throw MeSPError(
            "\(reason), and no plan takes less memory. The last saved state is kept; resume the run when there is more, or with a higher memory limit.",
            .insufficientMemory(required: peak(plan), available: systemLimit ?? 0))
    }
}
