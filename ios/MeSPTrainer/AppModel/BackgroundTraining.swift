import Foundation
import MeSPControl
import MeSPCore
import MeSPSentences

/// A time in the background that the system has given: in the app a `BGTask`.
@MainActor public protocol BackgroundTime: AnyObject {
    var grant: BackgroundGrant { get }
    /// To be called when the system takes it back.
    var onExpiration: (() -> Void)? { get set }
    /// Shows the person how far the run is.
    func show(_ progress: RunProgress)
    func end(success: Bool)
}

/// A source of time in the background: in the app the system's scheduler.
@MainActor public protocol BackgroundScheduler: AnyObject {
    /// To be called with each time that is given.
    var onGrant: ((any BackgroundTime) -> Void)? { get set }
    /// Whether the device gives an app in the background the GPU.
    var givesGPU: Bool { get }
    /// Asks for a time, which may never be given. It replaces one that was asked for before and not given yet.
    func ask(for grant: BackgroundGrant, title: Sentence)
    /// Takes back what was asked for.
    func withdraw(_ grant: BackgroundGrant)
}

/// Asks for time in the background for runs that may train there (`PauseReason.reasons`), and gives it to them.
///
/// A run that the person has started may continue when the app is left. At night, on the charger, an unfinished run continues, also
/// one that the system has ended in the meantime.
@MainActor final class BackgroundTraining {
    private let controller: RunController
    private let monitor: any DeviceMonitor
    private let scheduler: any BackgroundScheduler
    private let isStartedByPerson: () -> Bool
    private let resume: (BackgroundGrant) async -> Bool
    private var times = [any BackgroundTime]() { didSet { followProgress() } }
    private var reports: Task<Void, Never>?
    /// The folder of the run that time was asked for.
    private var askedFor: String?

    /// The time between two reports of progress to the system, which ends a task without progress; a step can take minutes.
    private static let reportInterval = Duration.seconds(1)

    /// - Parameters:
    ///   - isStartedByPerson: whether the run in progress was.
    ///   - resume: continues with a run that was cut off and may train in such a time, and returns whether there was one.
    init(
        controller: RunController, monitor: any DeviceMonitor, scheduler: any BackgroundScheduler,
        isStartedByPerson: @escaping () -> Bool, resume: @escaping (BackgroundGrant) async -> Bool
    ) {
        (self.controller, self.monitor, self.scheduler) = (controller, monitor, scheduler)
        (self.isStartedByPerson, self.resume) = (isStartedByPerson, resume)
        scheduler.onGrant = { [weak self] in self?.take($0) }
        controller.observers.append { [weak self] in self?.runChanged() }
    }

    /// The times in which the run in progress may train, once it is known what it runs on.
    private var usable: [BackgroundGrant] {
        guard controller.isRunning, controller.log.start != nil else { return [] }
        if !controller.usesGPU { return [.overnight, .continued] }
        return scheduler.givesGPU ? [.continuedOnGPU] : []
    }

    private func runChanged() {
        guard controller.isRunning else {
            if !times.isEmpty || askedFor != nil { runEnded() }
            return
        }
        if let settings = controller.settings, askedFor != settings.output, !usable.isEmpty {
            askedFor = settings.output
            // Times other than the night's may be asked for in front only, for what the person has started.
            let mayAsk = monitor.scene == .active && isStartedByPerson()
            for grant in usable where grant == .overnight || mayAsk { scheduler.ask(for: grant, title: title) }
        }
        showProgress()
    }

    private func showProgress() {
        guard controller.isRunning, let settings = controller.settings else { return }
        let progress = RunProgress(controller.log, steps: settings.steps, blocks: controller.blocksOfStep)
        for time in times { time.show(progress) }
    }

    /// Tells of the progress within a step for as long as there is a time.
    private func followProgress() {
        guard !times.isEmpty else {
            reports?.cancel()
            reports = nil
            return
        }
        guard reports == nil else { return }
        reports = Task { [weak self] in
            while !Task.isCancelled {
                self?.showProgress()
                try? await Task.sleep(for: Self.reportInterval)
            }
        }
    }

    private var title: Sentence { "Training \(controller.log.start?.model.name ?? "")" }

    private func runEnded() {
        askedFor = nil
        for grant in BackgroundGrant.allCases { scheduler.withdraw(grant) }
        for time in times { time.end(success: controller.state == .finished(.finished)) }
        times = []
        controller.grant = nil
    }

    private func take(_ time: any BackgroundTime) {
        times.append(time)
        time.onExpiration = { [weak self, weak time] in
            if let self, let time { expire(time) }
        }
        useTimes()
        guard !controller.isRunning else { return }
        Task {
            if !(await resume(time.grant)) { runEnded() }
        }
    }

    private func expire(_ time: any BackgroundTime) {
        times.removeAll { $0 === time }
        useTimes()  // which waits until the block in progress has ended
        time.end(success: false)
        if time.grant == .overnight, usable.contains(.overnight) { scheduler.ask(for: .overnight, title: title) }
    }

    private func useTimes() {
        controller.grant = BackgroundGrant.allCases.first { grant in times.contains { $0.grant == grant } }
    }
}
