import Foundation
import MeSPControl
import MeSPCore
import MeSPSentences

public struct LiveActivityContent: Sendable, Equatable {
    public var progress: RunProgress
    /// The reason why the run waits, or how it ended. It is nil while the run trains.
    public var note: Sentence?
    /// The seconds until the content is shown as out of date, or nil if it never is.
    public var lifetime: Double?
}

@MainActor public protocol LiveActivityDisplay: AnyObject {
    /// Starts to show a run. Call this only while the app is active.
    func begin(title: Sentence, _ content: LiveActivityContent)
    func update(_ content: LiveActivityContent)
    /// Ends the display. `last` stays visible. If `last` is nil, the display disappears at once.
    func end(_ last: LiveActivityContent?)
}

/// Keeps the run's Live Activity up to date.
///
/// The activity starts while the app is active, as iOS requires. During a `BGContinuedProcessingTask` iOS itself shows the run.
@MainActor final class LiveActivityUpdates {
    private let controller: RunController
    private let monitor: any DeviceMonitor
    private let display: any LiveActivityDisplay
    /// The minimum time between two updates with the same note. iOS limits the number of updates.
    private static let interval = Duration.seconds(5)
    private static let lifetime = 120.0
    private var shown: LiveActivityContent?
    private var lastChange = ContinuousClock.now

    init(controller: RunController, monitor: any DeviceMonitor, display: any LiveActivityDisplay) {
        (self.controller, self.monitor, self.display) = (controller, monitor, display)
        controller.observers.append { [weak self] in self?.update() }
        monitor.observers.append { [weak self] _ in self?.update() }
    }

    private func update() {
        guard let content, controller.isRunning, controller.grant == nil || controller.grant == .overnight else {
            if shown != nil { display.end(monitor.scene == .active || controller.isRunning ? nil : content) }
            shown = nil
            return
        }
        if shown == nil {
            guard monitor.scene == .active, let start = controller.log.start else { return }
            display.begin(title: "Training \(start.model.name)", content)
        } else {
            guard monitor.scene != .active, content != shown,
                content.note != shown?.note || ContinuousClock.now - lastChange >= Self.interval
            else { return }
            display.update(content)
        }
        (shown, lastChange) = (content, .now)
    }

    private var content: LiveActivityContent? {
        controller.settings.map {
            let note = controller.state.note
            return LiveActivityContent(
                progress: RunProgress(controller.log, steps: $0.steps), note: note,
                lifetime: note == nil ? max(Self.lifetime, 3 * (controller.log.stepSeconds ?? 0)) : nil)
        }
    }
}

extension RunController.State {
    fileprivate var note: Sentence? {
        switch self {
        case .idle, .preparing, .training: nil
        case .paused(let reason): reason.advice
        case .finished(.finished): "Training is done."
        case .finished: "Training was stopped."
        case .failed(let sentence): sentence
        }
    }
}
