import Foundation
import MeSPAdapters
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSentences

/// A kind of background time that the system grants.
public typealias GrantedTime = MeSPControl.BackgroundGrant

/// Trains LoRA adapters of a model on the device, with exact gradients, in tens of megabytes.
///
/// ```swift
/// let tuner = try await FineTuner(bundle: url, tokenizer: tokenizer)
/// for try await update in tuner.train(on: conversations, .init(steps: 200, memory: .megabytes(80))) {
///     progress = update.fraction
/// }
/// try tuner.adapters.write(to: folder)
/// ```
///
/// A fine-tuner trains on its own thread. A run pauses while the device is too warm, short of memory or low on battery, and while the app is in the
/// background without background time. ``PauseReason`` lists all reasons.
///
/// All fine-tuners of a process share MLX, so only one run or answer is in progress at a time.
/// An app may use MLX itself within ``whilePaused(isolation:_:)``, or while no run and no answer is in progress.
///
/// A run reports its state to the main actor, so do not block the main thread while you wait for a fine-tuner.
public final class FineTuner: Sendable {
    /// The bundle's folder, as `mesp-export` writes it.
    public let bundle: URL
    /// The folder for runs: their logs, tokens, saved states and adapters.
    public let folder: URL

    private let tokenizer: any TextTokenizer
    private let manifest: Manifest
    private let runs: RunFolders
    private let controller: RunController
    private static let turn = Turn()
    @MainActor private var isPaused = false
    @MainActor private var backgroundTime: GrantedTime?
    @MainActor private var isTraining = false

    /// Whether this device can train. The iOS simulator cannot.
    public static var isSupported: Bool { MLXSupport.refusal == nil }

    /// Opens a bundle.
    ///
    /// - Parameters:
    ///   - bundle: the bundle's folder.
    ///   - tokenizer: the model's tokenizer.
    ///   - folder: the folder for runs. It is created if necessary. Two fine-tuners must not share a folder. nil: a folder with the bundle's name in
    ///     the folder `MeSP` of the Application Support folder.
    /// - Throws: ``FineTuningError`` if `bundle` is not a bundle, is damaged, or has an unknown format.
    public convenience init(bundle: URL, tokenizer: any TextTokenizer, folder: URL? = nil) async throws {
        try await self.init(bundle: bundle, tokenizer: tokenizer, folder: folder, controller: .ofProcess)
    }

    /// - Parameter controller: controls the runs of all fine-tuners in the process.
    package init(
        bundle: URL, tokenizer: any TextTokenizer, folder: URL? = nil,
        controller: @autoclosure @MainActor @Sendable () -> RunController
    ) async throws {
        (self.bundle, self.tokenizer) = (bundle, tokenizer.asTrained(bundle))
        manifest = try FineTuningError.describing(else: .damaged(bundle)) {
            try ModelBundle(url: bundle, checksums: false).manifest
        }
        self.folder = folder ?? .inSupport(bundle.deletingPathExtension().lastPathComponent)
        runs = RunFolders(folder: self.folder, weights: manifest.weightsDigest)
        self.controller = await controller()
    }

    @TaskLocal private static var isHolding = false

    private static var refusal: FineTuningError {
        isHolding
            ? FineTuningError("A run or an answer would wait for the end of whilePaused; begin it afterwards.", .busy)
            : FineTuningError(busy, .busy)
    }

    static let busy: Sentence = "A run is in progress; stop it first."
    static var isBusy: Bool { turn.isTaken }

    // MARK: - Training

    /// Begins a run on conversations. The last tenth of the conversations, at least one, is held out.
    ///
    /// - Parameters:
    ///   - conversations: two or more conversations. Each becomes one sequence, cut to the sequence length. By default the loss covers the
    ///     assistant's answers: their text, their tool calls and the token that ends an answer.
    ///   - options: the options of the run.
    /// - Returns: the updates of the run. They end when the run ends. They throw a ``FineTuningError`` if the run cannot begin or fails, for example
    ///   if a conversation or an option is refused, if the memory does not suffice, or if another run is in progress.
    public func train(on conversations: [Conversation], _ options: TrainingOptions = .init()) -> TrainingUpdates {
        train(.conversations(conversations), options)
    }

    /// Begins a run on the text or the records of a file. The last tenth of the data is held out, but at least one record or, of a text, one
    /// sequence.
    ///
    /// - Parameters:
    ///   - file: UTF-8 text (`.txt`, `.text`, `.md`, `.markdown`), or records (`.jsonl`, `.ndjson`, `.json`) with `messages`, with `prompt` and
    ///     `completion`, with `instruction` and `output` or `response`, or with `text`. A record with other columns is refused, unless their names
    ///     are never of content, such as `id`.
    ///   - options: the options of the run.
    /// - Returns: the updates, as from ``train(on:_:)-([Conversation],_)``.
    public func train(on file: URL, _ options: TrainingOptions = .init()) -> TrainingUpdates {
        train(.file(file), options)
    }

    /// Begins a run of direct preference optimization (DPO) on choices between two answers. The last tenth of the choices, at least one, is held out.
    ///
    /// - Parameters:
    ///   - choices: at least two choices. Useful results need a few hundred.
    ///   - options: the options of the run.
    /// - Returns: the updates, as from ``train(on:_:)-([Conversation],_)``.
    public func train(on choices: [Choice], _ options: TrainingOptions = .init()) -> TrainingUpdates {
        train(.choices(choices), options)
    }

    private func train(_ source: TextData.Source, _ options: TrainingOptions) -> TrainingUpdates {
        updates(steps: options.epochs == nil ? options.steps : 0) { [self] in
            let output = runs.next
            var settings = try options.settings(bundle, manifest, output: output)
            if case .choices = source { settings.objective = .dpo }
            _ = try Planner(manifest, settings).plan()
            let notices = try write(source, options, &settings, in: output)
            return (settings, notices)
        }
    }

    /// Whether there is an unfinished run that ``continueTraining()`` can continue.
    public var canContinueTraining: Bool {
        get async { (try? runs.settingsToContinue(with: bundle)) != nil }
    }

    /// Continues the last run from its last saved state, with its data and options. A run without a saved state starts again. On the same processor
    /// and with the same memory limit the result equals that of an uninterrupted run, to the last bit.
    ///
    /// - Returns: the updates, as from ``train(on:_:)-([Conversation],_)``. They throw a ``FineTuningError`` if there is no run to continue.
    public func continueTraining() -> TrainingUpdates {
        updates { [self] in (try runs.settingsToContinue(with: bundle), nil) }
    }

    private func write(
        _ source: TextData.Source, _ options: TrainingOptions, _ settings: inout RunSettings, in output: URL
    ) throws -> DataNotices {
        try explaining({ try makeFolder(output) }, as: { "Cannot make the folder \(output.path): \($0)." })
        // New files inherit the policy.
        StoragePolicy.state.apply(to: folder)
        let tokens = output.appendingPathComponent(TextData.folderName)
        settings.data = tokens.path
        let notices = try data(options, settings.seqLen).write(source, to: tokens) { _ in try Task.checkCancellation() }
        if let initial = options.initialAdapters {
            // The run keeps a copy of the initial adapters. A run that is continued before its first saved state reads them again.
            let copy = output.appendingPathComponent(RunFolders.initialAdapters)
            try explaining(
                { try FileManager.default.copyItem(at: initial, to: copy) },
                as: { "Cannot read the adapters in \(initial.path): \($0)." })
            settings.adapters = copy.path
        }
        if let limit = options.maxForgetting, let general = TextData.generalText {
            let tokens = output.appendingPathComponent(TextData.generalName)
            try data(options, TextData.generalLength).write(general, to: tokens)
            (settings.general, settings.maxForgetting) = (tokens.path, limit)
        }
        try settings.check()
        try settings.countSteps()
        return notices
    }

    private func data(_ options: TrainingOptions, _ length: Int) -> TextData {
        TextData(
            tokenizer: tokenizer, length: length, answersOnly: options.trainsAnswersOnly,
            leavesOutInvalid: options.leavesOutInvalidRecords)
    }

    /// Begins a run and returns its updates.
    ///
    /// - Parameters:
    ///   - steps: the number of steps of a new run; 0 if it is not known yet.
    ///   - prepare: a closure that writes the data of a new run. It returns the settings of the run and the notices about the data.
    private func updates(
        steps: Int? = nil, of prepare: @escaping @Sendable () throws -> (RunSettings, DataNotices?)
    ) -> TrainingUpdates {
        let (updates, sender) = AsyncThrowingStream.makeStream(of: TrainingUpdate.self)
        let work = begin(sender) { [self] in
            defer { runs.removeUnbegun() }
            if let steps { sender.yield(TrainingUpdate(steps: steps, phase: .preparing, footprint: memoryFootprint())) }
            let (settings, notices) = try prepare()
            try await run(settings, notices, sender)
        }
        return TrainingUpdates(updates) { work?.cancel() }
    }

    /// Begins `body` as the work of this fine-tuner. The stream ends when `body` ends. It throws the errors of `body` as ``FineTuningError``, except
    /// cancellations. If no work can begin now, the stream ends at once with an error.
    private func begin<Element>(
        _ sender: AsyncThrowingStream<Element, any Error>.Continuation,
        _ body: @escaping @Sendable () async throws -> Void
    ) -> Task<Void, Never>? {
        guard !Self.isHolding,
            let work = Self.turn.take(
                for: self,
                {
                    do { try await body() } catch is CancellationError {} catch {
                        return { sender.finish(throwing: FineTuningError(error)) }
                    }
                    return { sender.finish() }
                })
        else {
            sender.finish(throwing: Self.refusal)
            return nil
        }
        return work
    }

    @MainActor private func run(
        _ settings: RunSettings, _ notices: DataNotices?,
        _ sender: AsyncThrowingStream<TrainingUpdate, any Error>.Continuation
    ) async throws {
        controller.observers.append { [unowned controller] in
            if let update = TrainingUpdate(controller, settings, notices) { sender.yield(update) }
        }
        isTraining = true
        controller.grant = backgroundTime
        if isPaused { controller.pause() }
        defer {
            (isTraining, isPaused, controller.grant) = (false, false, nil)
            controller.observers.removeLast()
        }
        try await controller.run(settings)
        if controller.state == .finished(.finished) { runs.removeAll(but: URL(fileURLWithPath: settings.output)) }
    }

    /// Ends the run or the answer of this fine-tuner at the next block, and returns when it has ended. An update of the adapters that has begun is
    /// completed first, and the run saves its adapters. A run on the GPU that waits with ``PauseReason/away`` ends at its last saved state, because
    /// the system refuses it the GPU. Within ``whilePaused(isolation:_:)`` this function returns at once.
    public func stop() async {
        let work = Self.turn.work(of: self)
        work?.cancel()
        if !Self.isHolding { await work?.value }
    }

    // MARK: - Pauses

    /// Pauses this fine-tuner's run at the next block, until ``resume()`` is called. If it has no run in progress, pauses its next run.
    @MainActor public func pause() {
        isPaused = true
        if isTraining { controller.pause() }
    }

    /// Ends a pause that ``pause()`` began.
    @MainActor public func resume() {
        isPaused = false
        if isTraining { controller.resume() }
    }

    /// Calls `body` while the run or the answer in progress is paused between two blocks, so that `body` may use MLX. If nothing is in progress, it
    /// calls `body` at once, and a new run waits for `body` to return.
    ///
    /// A run or an answer that begins within `body` is refused. Within `body`, MLX's memory limit and cache limit are those from before the run. A
    /// generation must end before `body` returns, so read its stream to the end.
    public func whilePaused<R>(
        isolation: isolated (any Actor)? = #isolation, _ body: () async throws -> R
    ) async rethrows -> R {
        await controller.hold()
        do {
            let result = try await Self.$isHolding.withValue(true) { try await body() }
            await controller.release()
            return result
        } catch {
            await controller.release()
            throw error
        }
    }

    /// Tells this fine-tuner's runs which background time the system grants. With background time a run continues, and a new run begins, while the app is in the
    /// background. Only with `continuedOnGPU` does a run in the background use the GPU. A new run that begins there without it takes the CPU, unless
    /// ``TrainingOptions/device`` is set.
    ///
    /// - Parameter time: the kind of the background task that is running; nil when none is.
    @MainActor public func setBackgroundTime(_ time: GrantedTime?) {
        backgroundTime = time
        if isTraining { controller.grant = time }
    }

    /// Sets environment variables for MLX, unless they are set already. Call this function before the first use of MLX.
    ///
    /// - `MLX_ENABLE_TF32` keeps float32 matrix products in full precision on A19, M5 and later.
    /// - `MLX_METAL_GPU_ARCH` keeps neural accelerators off until the self-check has passed. It is set only on GPUs that have them.
    /// - `MLX_MAX_OPS_PER_BUFFER` limits the memory of a step on a GPU.
    ///
    /// The variables make inference in the same process slower, so a fine-tuner does not set them itself.
    public static func prepareProcess() { MLXSupport.setEnvironment() }

    // MARK: - Before and after

    /// Returns the first training sequence of `conversations`.
    ///
    /// - Throws: ``FineTuningError`` if a conversation or an option is refused. Only the conversations up to the returned one are tokenized, so some
    ///   faults in later conversations are not found. With ``TrainingOptions/leavesOutInvalidRecords`` all are tokenized.
    public func preview(
        of conversations: [Conversation], _ options: TrainingOptions = .init()
    ) async throws -> TrainingPreview {
        try await preview(.conversations(conversations), options)
    }

    /// Returns the first training sequence of a file's data.
    ///
    /// - Throws: ``FineTuningError`` if the file, a record or an option is refused. Only the records up to the returned sequence are tokenized, so
    ///   some faults in later records are not found.
    public func preview(of file: URL, _ options: TrainingOptions = .init()) async throws -> TrainingPreview {
        try await preview(.file(file), options)
    }

    private func preview(_ source: TextData.Source, _ options: TrainingOptions) async throws -> TrainingPreview {
        try await Task.detached { [self] in
            try FineTuningError.describing {
                let settings = try options.settings(bundle, manifest)
                let (example, notices) = try data(options, settings.seqLen).first(of: source)
                return TrainingPreview(
                    example, notices: notices.sentences, leftOut: notices.invalid, tokenizer: tokenizer)
            }
        }.value
    }

    /// Predicts the peak memory that training adds to the process, in bytes.
    ///
    /// - Throws: ``FineTuningError`` if the memory limit in `options` is too low for a step, or if an option is out of range or not supported by the
    ///   bundle.
    public func predictedPeak(_ options: TrainingOptions = .init()) throws -> Int {
        try FineTuningError.describing {
            let planner = Planner(manifest, try options.settings(bundle, manifest))
            return planner.peak(try planner.plan())
        }
    }

    /// Generates the model's answer to a conversation, in the memory of a few blocks.
    ///
    /// - Parameters:
    ///   - conversation: the conversation to answer. Its last message must not be an answer.
    ///   - usesAdapters: whether to use the last saved adapters. If false, the unchanged model answers.
    ///   - maxTokens: the maximum number of tokens in the answer.
    ///   - temperature: 0 takes the likeliest token. A higher value draws tokens from softmax(logits / temperature), with a new seed for each answer.
    /// - Returns: the pieces of the answer. Generation ends at the next block if the reading task is cancelled or leaves the loop. The stream throws
    ///   a ``FineTuningError`` if the answer cannot be generated, for example if the chat template would lose a message, if there are no saved
    ///   adapters to use, or if a run or another answer is in progress.
    public func answer(
        to conversation: Conversation, usesAdapters: Bool = true, maxTokens: Int = 256, temperature: Float = 0
    ) -> AsyncThrowingStream<String, any Error> {
        answer(to: conversation, maxTokens, temperature) { [self] in
            usesAdapters ? [WeightedAdapters(try runs.adapters)] : []
        }
    }

    /// Generates the model's answer to a conversation with the sum of several adapters.
    ///
    /// - Parameters:
    ///   - conversation: the conversation to answer. Its last message must not be an answer.
    ///   - adapters: folders of adapters for this model, in the format of mlx-lm or PEFT, with any rank. The value is a factor, from 0 to 10, of the
    ///     adapters' change to the model.
    ///   - maxTokens: the maximum number of tokens in the answer.
    ///   - temperature: 0 takes the likeliest token. A higher value draws tokens from softmax(logits / temperature), with a new seed for each answer.
    /// - Returns: the pieces of the answer, as from ``answer(to:usesAdapters:maxTokens:temperature:)``. The stream also throws a ``FineTuningError``
    ///   if adapters do not fit the model.
    public func answer(
        to conversation: Conversation, adapters: [URL: Float], maxTokens: Int = 256, temperature: Float = 0
    ) -> AsyncThrowingStream<String, any Error> {
        answer(to: conversation, maxTokens, temperature) {
            // The order is fixed, because the order of a sum affects rounding.
            adapters.sorted { $0.key.path < $1.key.path }.map { WeightedAdapters($0.key, weight: $0.value) }
        }
    }

    private func answer(
        to conversation: Conversation, _ maxTokens: Int, _ temperature: Float,
        adapters: @escaping @Sendable () throws -> [WeightedAdapters]
    ) -> AsyncThrowingStream<String, any Error> {
        let (pieces, sender) = AsyncThrowingStream.makeStream(of: String.self)
        let work = begin(sender) { [self] in
            guard let last = conversation.messages.last, !last.isAnswer else {
                throw MeSPError("There is no message to answer: the conversation must end with one.")
            }
            try require(maxTokens > 0, "maxTokens", "at least 1")
            let adapters = try adapters()
            var request = Generator.Request(prompt: try tokenizer.encode(prompt: conversation))
            (request.maxTokens, request.temperature) = (maxTokens, temperature)
            (request.stop, request.seed) = (endTokens(of: bundle, tokenizer), .random(in: 0 ... .max))
            try await write(request, with: adapters) { sender.yield($0) }
        }
        sender.onTermination = { _ in work?.cancel() }
        return pieces
    }

    @MainActor private func write(
        _ request: Generator.Request, with adapters: [WeightedAdapters], to send: @escaping @Sendable (String) -> Void
    ) async throws {
        let (bundle, tokenizer) = (bundle, tokenizer)
        try await controller.doOther { gate in
            let tokens = gate.start("writing", sending: Int.self) { send in
                try gate.pass { _ in }
                try Generator(ModelBundle(url: bundle), adapters: adapters)
                    .generate(request, atBlock: { try gate.pass { _ in } }, onToken: send)
            }
            try await withTaskCancellationHandler {
                try await Self.send(tokens, by: tokenizer, to: send)
            } onCancel: {
                gate.abandon()
            }
        }
    }

    /// Sends the text of tokens in pieces of complete characters. A token can end within a character.
    private static func send(
        _ tokens: AsyncThrowingStream<Int, any Error>, by tokenizer: any TextTokenizer, to send: (String) -> Void
    ) async throws {
        var (all, written) = ([Int](), "")
        for try await token in tokens {
            all.append(token)
            let text = tokenizer.decode(all)
            guard !text.hasSuffix("\u{FFFD}"), text.hasPrefix(written) else { continue }
            send(String(text.dropFirst(written.count)))
            written = text
        }
    }

    /// The last saved adapters. A run in progress may have saved them.
    ///
    /// - Throws: ``FineTuningError`` if no run has saved adapters after a step, or if they were trained for other weights of the model.
    public var adapters: Adapters {
        get throws { Adapters(url: try FineTuningError.describing { try runs.adapters }) }
    }

    // MARK: - Deletion

    /// Deletes the last run, with its data, log, saved state and adapters. Ends this fine-tuner's run or answer first.
    ///
    /// - Throws: ``FineTuningError`` if another fine-tuner is at work, or if files cannot be deleted.
    public func deleteLastRun() async throws { try await delete { [runs] in try runs.removeLast() } }

    /// Deletes all runs: everything that this fine-tuner has kept of a person's texts. Ends this fine-tuner's run or answer first.
    ///
    /// - Throws: ``FineTuningError`` as from ``deleteLastRun()``.
    public func deleteRuns() async throws { try await delete { [runs] in try runs.removeAll() } }

    /// Deletes the bundle. This fine-tuner cannot train or answer afterwards. Ends its run or answer first.
    ///
    /// - Throws: ``FineTuningError`` as from ``deleteLastRun()``.
    public func deleteBundle() async throws {
        try await delete { [bundle] in try FileManager.default.removeItem(at: bundle) }
    }

    private func delete(_ body: @escaping @Sendable () throws -> Void) async throws {
        await stop()
        let (end, sender) = AsyncThrowingStream.makeStream(of: Never.self)
        _ = begin(sender) { try body() }
        for try await _ in end {}
    }
}

extension RunController {
    static let ofProcess = RunController(monitor: SystemMonitor.ofLaunchedApp)
}

/// The work in progress. All fine-tuners of the process share it, so there is at most one task.
private final class Turn: @unchecked Sendable {
    private let lock = NSLock()
    private var current: (owner: ObjectIdentifier, work: Task<Void, Never>)?

    var isTaken: Bool { lock.withLock { current != nil } }

    func work(of owner: FineTuner) -> Task<Void, Never>? {
        lock.withLock { current?.owner == ObjectIdentifier(owner) ? current?.work : nil }
    }

    /// `body` returns a closure, which is called when other work may begin again.
    func take(
        for owner: FineTuner, _ body: @escaping @Sendable () async -> @Sendable () -> Void
    ) -> Task<Void, Never>? {
        lock.withLock {
            guard current == nil else { return nil }
            let work = Task {
                let end = await body()
                self.lock.withLock { self.current = nil }
                end()
            }
            current = (ObjectIdentifier(owner), work)
            return work
        }
    }
}

extension TrainingUpdate {
    /// Returns nil if the run has failed, or if the steps of a continued run are not known yet.
    @MainActor fileprivate init?(_ controller: RunController, _ settings: RunSettings, _ notices: DataNotices?) {
        let (log, footprint) = (controller.log, controller.log.steps.last?.footprintBytes ?? memoryFootprint())
        var pause: PauseReason?
        let phase: TrainingPhase
        switch controller.state {
        case .idle, .failed: return nil
        case .preparing where settings.resume && log.start == nil: return nil
        case .preparing: phase = .preparing
        case .training: phase = .init(controller.phase)
        case .paused(let reason): (phase, pause) = (.waiting, .init(rawValue: reason.rawValue))
        case .finished(let reason): phase = reason == .finished ? .finished : .stopped
        }
        // Other properties of the update, or the thrown error, report these events.
        let others = ["pause", "resume", "resumed", "error"]
        self.init(
            step: log.lastStep, steps: settings.steps, phase: phase, loss: log.steps.last?.loss,
            heldOutLoss: log.evals.last { $0.split == "valid" }?.loss, footprint: footprint,
            peakFootprint: max(log.peakFootprintBytes, footprint), predictedPeak: log.prediction?.predictedPeakBytes,
            timeRemaining: log.secondsLeft(of: settings.steps).map { .seconds(min($0, 1e9)) }, pause: pause,
            notices: (notices?.sentences ?? []).map(\.localized)
                + log.events.filter { !others.contains($0.name) }.map(\.message.localized),
            leftOut: notices?.invalid ?? [])
    }
}

extension TrainingPhase {
    fileprivate init(_ phase: RunPhase) {
        switch phase {
        case .training: self = .training
        case .evaluating: self = .evaluating
        case .saving: self = .saving
        }
    }
}
