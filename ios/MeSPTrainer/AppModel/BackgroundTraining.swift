import Foundation
import MeSPControl
import MeSPCore
import MeSPSentences

/// A period of background time that the system has granted: in the app, a `BGTask`.
@MainActor public protocol BackgroundTime: AnyObject {
    var grant: BackgroundGrant { get }
    /// A closure to call when the system ends the period.
    var onExpiration: (() -> Void)? { get set }
    /// Shows the progress of the run to the person.
    func show(_ progress: RunProgress)
    func end(success: Bool)
}

/// A source of background time: in the app, the system's scheduler.
@MainActor public protocol BackgroundScheduler: AnyObject {
    /// A closure to call with each granted period.
    var onGrant: ((any BackgroundTime) -> Void)? { get set }
    /// Whether the device allows an app in the background to use the GPU.
    var givesGPU: Bool { get }
    /// Requests a period, which may never be granted. The request replaces an earlier one that was not granted yet.
    func ask(for grant: BackgroundGrant, title: Sentence)
    /// Withdraws a request.
    func withdraw(_ grant: BackgroundGrant)
}

/// Requests background time for a run that may train in the background, and tells the run controller which time the system has granted.
/// `PauseReason.reasons` decides whether a run may train in granted time.
///
/// A run that the person has started may continue in the background. At night, on the charger, an unfinished run continues, even if the system has
/// terminated the app in the meantime.
@MainActor final class BackgroundTraining {
    private let controller: RunController
    private let monitor: any DeviceMonitor
    private let scheduler: any BackgroundScheduler
    private let isStartedByPerson: () -> Bool
    private let resume: (BackgroundGrant) async -> Bool
    private var times = [any BackgroundTime]() { didSet { followProgress() } }
    private var reports: Task<Void, Never>?
    /// The folder of the run for which time was requested.
    private var askedFor: String?

    /// The time between two reports of progress to the system. The system ends a task without progress, and a step can take minutes.
    private static let reportInterval = Duration.seconds(1)

    /// - Parameters:
    ///   - isStartedByPerson: returns whether the person started the run in progress.
    ///   - resume: continues an interrupted run that may train in the given kind of background time. Returns false if there is no such run.
    init(
        controller: RunController, monitor: any DeviceMonitor, scheduler: any BackgroundScheduler,
        isStartedByPerson: @escaping () -> Bool, resume: @escaping (BackgroundGrant) async -> Bool
    ) {
        (self.controller, self.monitor, self.scheduler) = (controller, monitor, scheduler)
        (self.isStartedByPerson, self.resume) = (isStartedByPerson, resume)
        scheduler.onGrant = { [weak self] in self?.take($0) }
        controller.observers.append { [weak self] in self?.runChanged() }
    }

    /// The kinds of background time in which the run in progress may train; empty until the run's device is known.
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
            // Time other than overnight time may be requested only while the app is active, for a run that the person has started.
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

    /// Reports the progress to the system, also within a step, while there is granted time.
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
        useTimes()  // waits until the block in progress has ended
        time.end(success: false)
        if time.grant == .overnight, usable.contains(.overnight) { scheduler.ask(for: .overnight, title: title) }
    }

    private func useTimes() {
        controller.grant = BackgroundGrant.allCases.first { grant in times.contains { $0.grant == grant } }
    }
}
