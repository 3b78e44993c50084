import Foundation
import MeSPAdapters
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSentences

/// Fine-tunes a model on the device: LoRA adapters, with exact gradients, in tens of megabytes.
///
/// ```swift
/// let tuner = try await FineTuner(bundle: url, tokenizer: tokenizer)
/// for try await update in tuner.train(on: conversations, .init(steps: 200, memory: .megabytes(80))) {
///     progress = update.fraction
/// }
/// try tuner.adapters.write(to: folder)
/// ```
///
/// It trains on a thread of its own, one run at a time in a process. A run waits at the next block of the model while the app may not train in
/// the background, the device is too warm, short of memory or low on battery, and continues by itself. Nothing that takes time is done
/// on the main actor.
///
/// MLX is one for a process, so one run or answer of all fine-tuners is in progress at a time, and what makes a run wait is said to any of
/// them. An app that also generates text with MLX does that within ``whilePaused(isolation:_:)``, or while no run is in progress.
///
/// A run tells the main actor of its state, so the main thread must not be blocked until something of a fine-tuner has ended.
public final class FineTuner: Sendable {
    /// The folder of the model to train, as `mesp-export` writes it.
    public let bundle: URL
    /// The folder of the run: its log, its tokens, its saved state and its adapters.
    public let folder: URL

    private let tokenizer: any TextTokenizer
    private let manifest: Manifest
    private let runs: RunFolders
    private let controller: RunController
    private static let turn = Turn()

    /// Opens a bundle.
    ///
    /// - Parameters:
    ///   - bundle: the folder of the model.
    ///   - tokenizer: the model's tokenizer.
    ///   - folder: the folder of the run, which is made where it is not there. nil: one with the bundle's name in `MeSP` in the folder for
    ///     application support. Two fine-tuners must not have the same.
    /// - Throws: ``FineTuningError`` where `bundle` is no bundle, is damaged, or is of another format.
    public convenience init(bundle: URL, tokenizer: any TextTokenizer, folder: URL? = nil) async throws {
        try await self.init(bundle: bundle, tokenizer: tokenizer, folder: folder, controller: .ofProcess)
    }

    /// - Parameter controller: of the runs of all fine-tuners in the process.
    package init(
        bundle: URL, tokenizer: any TextTokenizer, folder: URL? = nil,
        controller: @autoclosure @MainActor @Sendable () -> RunController
    ) async throws {
        (self.bundle, self.tokenizer) = (bundle, tokenizer)
        manifest = try FineTuningError.describing { try ModelBundle(url: bundle, checksums: false).manifest }
        self.folder = folder ?? Self.folder(of: bundle)
        runs = RunFolders(folder: self.folder)
        self.controller = await controller()
    }

    /// Whether this is within `whilePaused`.
    @TaskLocal private static var isHolding = false

    /// Why no work can begin now.
    private static var refusal: FineTuningError {
        isHolding
            ? FineTuningError("A run or an answer would wait for the end of whilePaused; begin it afterwards.")
            : FineTuningError(isBusy)
    }

    private static let isBusy: Sentence = "A run is in progress; stop it first."

    private static func folder(of bundle: URL) -> URL {
        inSupport(bundle.deletingPathExtension().lastPathComponent)
    }

    /// A folder of the library in the folder for application support.
    static func inSupport(_ path: String) -> URL {
        let support = FileManager.default.urls(for: .applicationSupportDirectory, in: .userDomainMask).first
        return (support ?? FileManager.default.temporaryDirectory).appendingPathComponent("MeSP/\(path)")
    }

    // MARK: - Training

    /// Begins a run on conversations. The last tenth of them is held out.
    ///
    /// - Parameters:
    ///   - conversations: two or more. Each is one sequence, cut to the sequence's length. Answers of the assistant are in the loss, whole, with
    ///     their tool calls and the token that ends them.
    ///   - options: the choices of the run.
    /// - Returns: the updates of the run, which end with it. Where a conversation, an option or the memory is not fit, they throw a
    ///   ``FineTuningError`` before anything is trained; likewise where another run is in progress.
    public func train(on conversations: [Conversation], _ options: TrainingOptions = .init()) -> TrainingUpdates {
        train(.conversations(conversations), options)
    }

    /// Begins a run on the records of a file. Its last tenth is held out.
    ///
    /// - Parameters:
    ///   - file: UTF-8 text (`.txt`, `.md`), or records (`.jsonl`, `.ndjson`, `.json`) with `messages`, with `prompt` and `completion`, or with
    ///     `text`. The rules are those of `mesp-export --data`.
    ///   - options: the choices of the run.
    /// - Returns: as ``train(on:_:)-([Conversation],_)``.
    public func train(on file: URL, _ options: TrainingOptions = .init()) -> TrainingUpdates {
        train(.file(file), options)
    }

    /// Begins a run of direct preference optimization on answers that a person chose over others. The last tenth is held out.
    ///
    /// - Parameters:
    ///   - choices: some hundred choices.
    ///   - options: the choices of the run.
    /// - Returns: as ``train(on:_:)-([Conversation],_)``.
    public func train(on choices: [Choice], _ options: TrainingOptions = .init()) -> TrainingUpdates {
        train(.choices(choices), options)
    }

    private func train(_ source: TextData.Source, _ options: TrainingOptions) -> TrainingUpdates {
        updates { [self] in
            let output = runs.next
            var settings = try options.settings(bundle, manifest, output: output)
            if case .choices = source { settings.objective = .dpo }
            _ = try Planner(manifest, settings).plan()
            let notices = try write(source, options, &settings, in: output)
            return (settings, notices)
        }
    }

    /// Whether the last run was stopped, or its process ended, before its last step.
    public var canContinueTraining: Bool { runs.settingsToContinue(with: bundle) != nil }

    /// Continues the last run, with its data and options, from its last saved state, or from its beginning where it had saved none. The result
    /// is to the last bit that of a run that was not interrupted, on the same processor and with the same memory limit.
    ///
    /// - Returns: as ``train(on:_:)-([Conversation],_)``. They throw where there is no such run.
    public func continueTraining() -> TrainingUpdates {
        updates { [self] in
            guard let settings = runs.settingsToContinue(with: bundle) else {
                throw MeSPError("There is no training to continue in \(folder.path); begin one.")
            }
            return (settings, [])
        }
    }

    /// Writes the tokens of a run into its folder.
    ///
    /// - Returns: what of the data is to be told.
    private func write(
        _ source: TextData.Source, _ options: TrainingOptions, _ settings: inout RunSettings, in output: URL
    ) throws -> [String] {
        do { try makeFolder(output) } catch {
            throw MeSPError("Cannot make the folder \(output.path): \(error.plainSentence).")
        }
        let tokens = output.appendingPathComponent(TextData.folderName)
        settings.data = tokens.path
        let notices = try data(options, settings.seqLen).write(source, to: tokens) { _ in try Task.checkCancellation() }
        if let initial = options.initialAdapters {
            // A copy: a run that goes on before it has saved reads them again.
            let copy = output.appendingPathComponent(RunFolders.initialAdapters)
            do { try FileManager.default.copyItem(at: initial, to: copy) } catch {
                throw MeSPError("Cannot read the adapters in \(initial.path): \(error.plainSentence).")
            }
            settings.adapters = copy.path
        }
        if let limit = options.maxForgetting, let general = TextData.generalText {
            let tokens = output.appendingPathComponent(TextData.generalName)
            try data(options, TextData.generalLength).write(general, to: tokens)
            (settings.general, settings.maxForgetting) = (tokens.path, limit)
        }
        try settings.check()
        return notices.sentences.map(\.localized)
    }

    private func data(_ options: TrainingOptions, _ length: Int) -> TextData {
        TextData(tokenizer: tokenizer, length: length, answersOnly: options.trainsAnswersOnly)
    }

    /// The updates of a run.
    ///
    /// - Parameter prepare: makes its data; returns its settings and what of the data is to be told.
    private func updates(
        of prepare: @escaping @Sendable () throws -> (RunSettings, [String])
    ) -> TrainingUpdates {
        let (updates, sender) = AsyncThrowingStream.makeStream(of: TrainingUpdate.self)
        let work = begin(sender) { [self] in
            defer { runs.removeUnbegun() }
            let (settings, told) = try prepare()
            try await run(settings, told, sender)
        }
        return TrainingUpdates(updates) { work?.cancel() }
    }

    /// Begins `body` as the work of this fine-tuner. With it the stream of `sender` ends, by its error where it has one; where no work can begin
    /// now, at once.
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
        _ settings: RunSettings, _ told: [String], _ sender: AsyncThrowingStream<TrainingUpdate, any Error>.Continuation
    ) async throws {
        controller.observers.append { [unowned controller] in
            guard controller.state != .preparing else { return }  // there is nothing to tell yet
            sender.yield(TrainingUpdate(controller, steps: settings.steps, told: told))
        }
        defer { controller.observers.removeLast() }
        try await controller.run(settings)
        if controller.state == .finished(.finished) { runs.removeAll(but: URL(fileURLWithPath: settings.output)) }
    }

    /// Ends the run or the answer of this fine-tuner at the next block, or after the step if that has begun to change the adapters. Returns when
    /// it has saved its adapters and ended; within ``whilePaused(isolation:_:)``, for which it waits, at once. Where it waits for the app to be in
    /// front (``PauseReason/away``), it ends when the app is.
    public func stop() async {
        let work = Self.turn.work(of: self)
        work?.cancel()
        if !Self.isHolding { await work?.value }
    }

    // MARK: - Pauses

    /// Makes the run wait at the next block, until ``resume()``.
    @MainActor public func pause() { controller.pause() }

    /// Ends a pause that ``pause()`` began.
    @MainActor public func resume() { controller.resume() }

    /// Calls `body`, which may use MLX, while the run waits between two blocks. Where no run is in progress, it calls `body` at once, and a run
    /// that begins meanwhile waits.
    ///
    /// A run or an answer that is begun within `body` is refused, as it would wait for `body`.
    ///
    /// Within `body` MLX has the limits of memory and of its cache that it had before the run, and limits that `body` sets stay. A generation must
    /// have ended when `body` returns: read its stream to the end.
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

    /// Says what time in the background the system has given: a run goes on in it instead of waiting for the app to be in front.
    ///
    /// - Parameters:
    ///   - isGranted: whether the app's task in the background (`BGContinuedProcessingTask`) runs now.
    ///   - hasGPU: whether the task was given the GPU, which a bundle for the GPU needs.
    @MainActor public func setBackgroundTime(isGranted: Bool, hasGPU: Bool = false) {
        controller.grant = isGranted ? hasGPU ? .continuedOnGPU : .continued : nil
    }

    /// Sets three variables of the process's environment that MLX reads when it is first used, unless they are set: float32 products keep all
    /// their bits on A19, M5 and later (`MLX_ENABLE_TF32`), the neural accelerators stay off until the self-check has passed
    /// (`MLX_METAL_GPU_ARCH`), and a step takes the same memory on every device (`MLX_MAX_OPS_PER_BUFFER`).
    ///
    /// Inference in the same process becomes slower by that, so no fine-tuner does it by itself. Without it a step takes more memory on a GPU,
    /// which the prediction counts, and gradients on A19, M5 and later are those of rounded products. To be called before the first use of
    /// MLX.
    public static func prepareProcess() { MLXSupport.setEnvironment() }

    // MARK: - Before and after

    /// Makes the first sequence of conversations as it would be trained.
    ///
    /// - Throws: ``FineTuningError`` as ``train(on:_:)-([Conversation],_)``, but for what is wrong with later conversations.
    public func preview(
        of conversations: [Conversation], _ options: TrainingOptions = .init()
    ) async throws -> TrainingPreview {
        try await preview(.conversations(conversations), options)
    }

    /// Makes the first sequence of a file's data as it would be trained.
    ///
    /// - Throws: ``FineTuningError`` as ``train(on:_:)-([Conversation],_)``, but for what is wrong with later records.
    public func preview(of file: URL, _ options: TrainingOptions = .init()) async throws -> TrainingPreview {
        try await preview(.file(file), options)
    }

    private func preview(_ source: TextData.Source, _ options: TrainingOptions) async throws -> TrainingPreview {
        try await Task.detached { [self] in
            try FineTuningError.describing {
                let settings = try options.settings(bundle, manifest)
                let (example, notices) = try data(options, settings.seqLen).first(of: source)
                return TrainingPreview(example, notices: notices.sentences, tokenizer: tokenizer)
            }
        }.value
    }

    /// Predicts the most that training takes beside the rest of the process, in bytes.
    ///
    /// - Throws: ``FineTuningError`` where no step stays within the limit of `options`, or an option is out of range.
    public func predictedPeak(_ options: TrainingOptions = .init()) throws -> Int {
        try FineTuningError.describing {
            let planner = Planner(manifest, try options.settings(bundle, manifest))
            return planner.peak(try planner.plan())
        }
    }

    /// Writes the model's answer to a conversation, in the memory of a few blocks. One answer or run is in progress at a time.
    ///
    /// - Parameters:
    ///   - conversation: its last message is not an answer.
    ///   - usesAdapters: whether the adapters that were saved last are used; without them the model answers as it was exported.
    ///   - maxTokens: the most tokens of the answer.
    ///   - temperature: 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature), others each time.
    /// - Returns: the pieces of the answer. Where the task that reads them is cancelled, or the loop is left, it ends at the next block. They throw
    ///   a ``FineTuningError`` where a message would be lost in the model's chat template, or a run is in progress.
    public func answer(
        to conversation: Conversation, usesAdapters: Bool = true, maxTokens: Int = 256, temperature: Float = 0
    ) -> AsyncThrowingStream<String, any Error> {
        answer(to: conversation, maxTokens, temperature) { [self] in
            usesAdapters ? [WeightedAdapters(try adapters.url)] : []
        }
    }

    /// Writes the model's answer to a conversation with several adapters at once, as ``answer(to:usesAdapters:maxTokens:temperature:)`` does
    /// with those that were saved last.
    ///
    /// - Parameters:
    ///   - conversation: its last message is not an answer.
    ///   - adapters: folders of adapters of this model, of mlx-lm's or PEFT's form and of any ranks, each with its strength: the factor, from
    ///     0 to 10, of what it adds to the model. What they add is summed.
    ///   - maxTokens: the most tokens of the answer.
    ///   - temperature: 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature), others each time.
    /// - Returns: the pieces of the answer, likewise. They throw a ``FineTuningError`` also where adapters do not fit the model.
    public func answer(
        to conversation: Conversation, adapters: [URL: Float], maxTokens: Int = 256, temperature: Float = 0
    ) -> AsyncThrowingStream<String, any Error> {
        answer(to: conversation, maxTokens, temperature) {
            // In one order each time, so that sums have the same last bits.
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

    /// Sends the text of tokens, each piece once it is whole: a token can end within a character.
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

    /// The adapters that a run has saved last, also one in progress.
    ///
    /// - Throws: ``FineTuningError`` where none has saved what it learned.
    public var adapters: Adapters {
        get throws {
            guard let url = runs.adapters else {
                throw FineTuningError("No run in \(folder.path) has saved adapters; train first.")
            }
            return Adapters(url: url)
        }
    }
}

extension RunController {
    /// That of the fine-tuners of an app.
    fileprivate static let ofProcess = RunController(monitor: SystemMonitor.ofLaunchedApp)
}

/// The work of all fine-tuners, which do one thing at a time.
private final class Turn: @unchecked Sendable {
    private let lock = NSLock()
    private var current: (owner: ObjectIdentifier, work: Task<Void, Never>)?

    /// What `owner` is doing; nil for nothing.
    func work(of owner: FineTuner) -> Task<Void, Never>? {
        lock.withLock { current?.owner == ObjectIdentifier(owner) ? current?.work : nil }
    }

    /// Begins `body`, unless other work is being done. When that has ended, other work may begin, and what `body` returned is called.
    func take(
        for owner: FineTuner, _ body: @escaping @Sendable () async -> @Sendable () -> Void
    ) -> Task<Void, Never>? {
        lock.withLock {
            guard current == nil else { return nil }
            let work = Task.detached {
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
    @MainActor fileprivate init(_ controller: RunController, steps: Int, told: [String]) {
        let log = controller.log
        (step, self.steps) = (log.lastStep, steps)
        fraction = controller.state == .finished(.finished) ? 1 : min(Double(log.lastStep) / Double(max(steps, 1)), 1)
        loss = log.steps.last?.loss
        heldOutLoss = log.evals.last { $0.split == "valid" }?.loss
        footprint = log.steps.last?.footprintBytes ?? memoryFootprint()
        peakFootprint = max(log.peakFootprintBytes, footprint)
        predictedPeak = log.prediction?.predictedPeakBytes
        timeRemaining = log.secondsLeft(of: steps).map { .seconds($0) }
        if case .paused(let reason) = controller.state { pause = .init(rawValue: reason.rawValue) } else { pause = nil }
        // Other members and the thrown error say these.
        let others = ["pause", "resume", "resumed", "error"]
        notices = told + log.events.filter { !others.contains($0.name) }.map(\.message.localized)
    }
}
