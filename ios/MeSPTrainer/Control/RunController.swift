import Foundation
import MeSPBundle
import MeSPCore
import MeSPFiles
import MeSPSentences
import Observation

/// A training run with an explicit state. The usual order of the states is:
///
///     idle → preparing → training ⇄ paused(reason) → finished or failed → preparing …
///
/// The run trains on the thread of `MLXWork`. The run pauses at block boundaries and keeps the step's state in memory. `PauseReason` lists the
/// reasons for a pause.
@MainActor @Observable public final class RunController {
    public enum State: Sendable, Equatable {
        case idle
        case preparing
        case training
        case paused(PauseReason)
        case finished(LogRecord.End.Reason)
        case failed(Sentence)
    }

    public private(set) var state = State.idle {
        didSet {
            if !isRunning {
                (pauseWanted, memoryIsShort) = (false, false)
                memoryCheck?.cancel()
            }
            monitor.isInUse = isRunning
            tellObservers()
        }
    }
    /// What a run that is in training does.
    package private(set) var phase = RunPhase.training {
        didSet { if phase != oldValue, isRunning { tellObservers() } }
    }
    /// The settings of the current or last run; nil before the first run. For a replay, the settings in the replayed log, once they are read.
    public private(set) var settings: RunSettings?
    /// The run's log so far.
    public private(set) var log = LogSummary()
    /// Whether the person has asked for a pause. The run pauses at the next block.
    public private(set) var pauseWanted = false
    /// Whether the person has asked for the end of the run. The run saves its adapters before the state changes.
    public private(set) var stopWanted = false

    /// The granted background time; nil if there is none.
    package var grant: BackgroundGrant? { didSet { update() } }
    /// Closures to call when the state or the log has changed.
    @ObservationIgnored package var observers = [() -> Void]()

    /// Whether the run uses the GPU. A resumed run stays on its device.
    package var usesGPU: Bool { (settings?.device ?? log.start?.device ?? .standard) == .gpu }

    /// The number of boundaries that the run has passed since the last logged step. See `BoundaryGate.boundaries`.
    package var blocksOfStep: Int { boundaries - blocksAtLastStep }
    package var boundaries: Int { gate.boundaries }

    public var isRunning: Bool {
        switch state {
        case .preparing, .training, .paused: true
        case .idle, .finished, .failed: false
        }
    }

    /// The minimum duration of a pause after a memory warning.
    static let memoryPause = Duration.seconds(15)

    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private let clock: any Clock<Duration>
    @ObservationIgnored private var gate = BoundaryGate()
    @ObservationIgnored private var trace = RunTrace()
    @ObservationIgnored private var blocksAtLastStep = 0
    @ObservationIgnored private var memoryIsShort = false
    @ObservationIgnored private var others = [BoundaryGate]()
    @ObservationIgnored private var holds = 0
    @ObservationIgnored private var receiving: Task<Void, Never>?
    /// The footprint of the process when the run began, in bytes.
    @ObservationIgnored private var besideBytes = 0
    @ObservationIgnored private var memoryCheck: Task<Void, Never>?

    /// - Parameters:
    ///   - monitor: the source of scene, temperature, battery and memory; `SystemMonitor` in an app.
    ///   - clock: times the pause after a memory warning, and replays.
    package init(monitor: any DeviceMonitor, clock: any Clock<Duration> = ContinuousClock()) {
        (self.monitor, self.clock) = (monitor, clock)
        monitor.observers.append { [weak self] event in
            switch event {
            case .change: self?.update()
            case .memoryWarning: self?.memoryWarning()
            }
        }
    }

    // MARK: - What a person does

    /// Begins or resumes a run (`settings.resume`), unless another run is in progress.
    ///
    /// Without a device in the settings, a new run that begins in the background takes the CPU, unless the background time includes the GPU.
    ///
    /// - Returns: a function that stops this run, but no later run.
    @discardableResult package func start(_ settings: RunSettings) -> @Sendable () -> Void {
        guard !isRunning else { return {} }
        let settings = withDevice(settings)
        self.settings = settings
        // The log is replaced before the state changes, because observers read both.
        (stopWanted, log, phase) = (false, LogSummary(), .training)
        state = .preparing

        let (gate, beside) = (BoundaryGate(), memoryFootprint())
        (self.gate, besideBytes, blocksAtLastStep) = (gate, beside, 0)
        update()
        let messages = gate.start("training", sending: Message.self, isUrgent: grant != .overnight) { send in
            if settings.resume, let past = try? LogSummary(folder: URL(fileURLWithPath: settings.output)) {
                send(.past(past))
            }
            try Run.run(
                settings, report: { record, _ in send(.record(record)) },
                atBlock: { log in
                    try gate.pass { reason in
                        try log(reason.event)
                        send(.waits(reason))
                    }
                }, besideBytes: beside, memoryIsShort: gate.takeMemoryWarning, battery: { gate.battery },
                atPhase: { send(.phase($0)) })
        }
        receiving = Task {
            do {
                for try await message in messages { receive(message) }
            } catch is GPUWithdrawn {
                state = .finished(.stopped)  // the run had not begun
            } catch {
                state = .failed(error.plainSentence)
            }
        }
        return { gate.stop() }
    }

    private func withDevice(_ settings: RunSettings) -> RunSettings {
        guard settings.device == nil, !settings.resume else { return settings }
        var settings = settings
        settings.device = monitor.scene == .background && grant != .continuedOnGPU ? .cpu : .standard
        return settings
    }

    /// Replays a recorded run, one record per `interval`. `pause()`, `resume()` and `stop()` apply to the replay. Does nothing while a run is in
    /// progress.
    ///
    /// - Parameters:
    ///   - folder: the folder of the recorded run.
    ///   - interval: the time between two records.
    package func replay(_ folder: URL, interval: Duration = .milliseconds(100)) {
        guard !isRunning else { return }
        (settings, log, stopWanted) = (nil, LogSummary(), false)
        state = .preparing
        Task {
            do {
                for record in try await Task.detached(operation: { try LogRecord.readAll(in: folder).map(\.record) })
                    .value
                {
                    if case .start(let start) = record { settings = start.settings }
                    while pauseWanted, !stopWanted {
                        if state != .paused(.user) { state = .paused(.user) }
                        try await clock.sleep(for: interval)
                    }
                    if stopWanted {
                        state = .finished(.stopped)
                        return
                    }
                    if state == .paused(.user) { state = .training }
                    receive(.record(record))
                    try await clock.sleep(for: interval)
                }
                if isRunning { state = .finished(.stopped) }  // the recording is incomplete
            } catch {
                state = .failed(error.plainSentence)
            }
        }
    }

    /// Begins a run and returns when it has ended. If the task is cancelled, the run ends as with `stop()`.
    ///
    /// - Throws: `MeSPError` if the run fails, or if another run is in progress.
    package func run(_ settings: RunSettings) async throws {
        guard !isRunning else { throw MeSPError("A run is in progress; stop it first.", .busy) }
        let stop = start(settings)
        await withTaskCancellationHandler {
            await receiving?.value
        } onCancel: {
            stop()
        }
        if case .failed(let problem) = state { throw MeSPError(problem) }
    }

    /// Makes the run and all other work wait at the next block. Returns when all of them wait or have ended. Each call needs a call of `release()`.
    package func hold() async {
        holds += 1
        update()
        for gate in [gate] + others { await gate.restBegins() }
    }

    package func release() {
        holds -= 1
        update()
    }

    /// Calls `body` with a gate for work other than the run. The gate makes that work wait while the app is not active, and between `hold()` and
    /// `release()`. Returns when `body` has returned and the work waits at the gate or has ended.
    package func doOther(_ body: (BoundaryGate) async throws -> Void) async rethrows {
        let gate = BoundaryGate()
        others.append(gate)
        update()
        func end() async {
            await gate.restBegins()
            others.removeAll { $0 === gate }
        }
        do { try await body(gate) } catch {
            await end()
            throw error
        }
        await end()
    }

    /// Pauses the run at the next block, until `resume()` is called. If no run is in progress, pauses the next run.
    public func pause() {
        pauseWanted = true
        update()
    }

    public func resume() {
        pauseWanted = false
        update()
    }

    /// Ends the run at the next block and saves its adapters. A step that has begun to change the adapters is completed first. A run that may not use
    /// its GPU ends at its last saved state.
    public func stop() {
        stopWanted = true
        gate.stop()
    }

    // MARK: - What the phone does

    private func memoryWarning() {
        memoryIsShort = true
        gate.warnOfMemory()
        update()
        memoryCheck?.cancel()
        memoryCheck = Task { [clock] in
            repeat {
                do { try await clock.sleep(for: Self.memoryPause) } catch { return }
                if Task.isCancelled { return }  // another warning has arrived
            } while !hasMemory
            memoryIsShort = false
            update()
        }
    }

    /// Whether the phone has the additional memory that a step needs; true if this is unknown.
    private var hasMemory: Bool {
        guard let available = monitor.availableMemory, let prediction = log.prediction else { return true }
        return available >= prediction.predictedPeakBytes - (memoryFootprint() - besideBytes)
    }

    private func update() {
        var reasons = PauseReason.reasons(
            scene: monitor.scene, usesGPU: usesGPU, grant: grant, thermalState: monitor.thermalState,
            battery: monitor.battery, isLowPower: monitor.isLowPower)
        if pauseWanted { reasons.insert(.user) }
        if holds > 0 { reasons.insert(.app) }
        if memoryIsShort { reasons.insert(.memory) }
        gate.battery = monitor.battery
        gate.set(reasons, isWithdrawn: usesGPU && reasons.contains(.away))
        for other in others { other.set(reasons.intersection([.app]).union(monitor.scene == .active ? [] : [.away])) }
        // In the background iOS may refuse the GPU or suspend the app as soon as this method returns. Waiting here lets the block in progress end.
        if monitor.scene == .background {
            if reasons.contains(.away) { gate.waitUntilAtRest(seconds: BoundaryGate.secondsToLeave) }
            for other in others { other.waitUntilAtRest(seconds: BoundaryGate.secondsToLeave) }
        }
    }

    // MARK: - What the run does

    private enum Message: Sendable {
        /// The run's log before it was resumed.
        case past(LogSummary)
        case record(LogRecord)
        case waits(PauseReason?)
        case phase(RunPhase)
    }

    private func receive(_ message: Message) {
        switch message {
        case .past(let past):
            log = past
            log.end = nil
            update()
            tellObservers()
        case .record(let record):
            if case .start = record { log = LogSummary() }  // a run that has saved nothing begins again
            log.append(record)
            switch record {
            case .start: update()  // the reasons to pause depend on the bundle's device, which this record has
            case .step: blocksAtLastStep = gate.boundaries
            default: break
            }
            if case .end(let end) = record, end.reason != .failed {
                state = .finished(end.reason)
            } else if state == .preparing {
                state = .training
            } else {
                tellObservers()
            }
        case .waits(let reason): state = reason.map { .paused($0) } ?? .training
        case .phase(let phase): self.phase = phase
        }
    }

    private func tellObservers() {
        switch state {
        case .training: trace.enter("\(phase)")
        case .failed: trace.enter("failed")  // the sentence may name a person's files
        default: trace.enter("\(state)")
        }
        for observer in observers { observer() }
    }
}

extension PauseReason? {
    fileprivate var event: LogRecord.Event {
        guard let self else { return .init(event: "resume", message: "Training continues.") }
        return .init(event: "pause", message: self.sentence)
    }
}
