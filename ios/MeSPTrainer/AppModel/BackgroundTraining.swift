import Foundation
import MeSPControl
import MeSPCore
import MeSPSentences

@MainActor public protocol BackgroundTime: AnyObject {
    var grant: BackgroundGrant { get }
    var onExpiration: (() -> Void)? { get set }
    func show(_ progress: RunProgress)
    func end(success: Bool)
}

@MainActor public protocol BackgroundScheduler: AnyObject {
    var onGrant: ((any BackgroundTime) -> Void)? { get set }
    var givesGPU: Bool { get }
    /// Requests a period, which may never be granted.
    func ask(for grant: BackgroundGrant, title: Sentence)
    func withdraw(_ grant: BackgroundGrant)
}

/// Requests background time for runs and tells the run controller what the system has granted.
///
/// A run that the person started may continue in the background. At night, while charging, an unfinished run on the CPU may continue even if the app
/// was terminated.
@MainActor final class BackgroundTraining {
    private let controller: RunController
    private let monitor: any DeviceMonitor
    private let scheduler: any BackgroundScheduler
    private let isStartedByPerson: () -> Bool
    private let resume: (BackgroundGrant) async -> Bool
    private var times = [any BackgroundTime]() { didSet { followProgress() } }
    private var reports: Task<Void, Never>?
    private var askedFor: String?

    /// The interval between progress reports. It is short because the system ends a background task that reports no progress.
    private static let reportInterval = Duration.seconds(1)

    init(
        controller: RunController, monitor: any DeviceMonitor, scheduler: any BackgroundScheduler,
        isStartedByPerson: @escaping () -> Bool, resume: @escaping (BackgroundGrant) async -> Bool
    ) {
        (self.controller, self.monitor, self.scheduler) = (controller, monitor, scheduler)
        (self.isStartedByPerson, self.resume) = (isStartedByPerson, resume)
        scheduler.onGrant = { [weak self] in self?.take($0) }
        controller.observers.append { [weak self] in self?.runChanged() }
    }

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
            // Overnight time may be requested at any time. Other background time may be requested only while the app is active and only for a run
            // that the person started.
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
