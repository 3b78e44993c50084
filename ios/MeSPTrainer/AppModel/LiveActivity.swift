import Foundation
import MeSPControl
import MeSPCore
import MeSPSentences

/// The Live Activity of a run, which the lock screen shows.
public struct LiveActivityContent: Sendable, Equatable {
    public var progress: RunProgress
    /// Why the run waits and what to do, or how it has ended, in sentences; nil while it trains.
    public var note: Sentence?
    /// The seconds without a change after which it is out of date, as the app must have been ended; nil where it stays true.
    public var lifetime: Double?
}

/// A display of a run while the app is not in front: in the app a Live Activity.
@MainActor public protocol LiveActivityDisplay: AnyObject {
    /// Begins to show a run; to be called in front only.
    func begin(title: Sentence, _ content: LiveActivityContent)
    func update(_ content: LiveActivityContent)
    /// Ends the display. Leaves the last content for the person to find; nil removes the display at once.
    func end(_ last: LiveActivityContent?)
}

/// Shows the run in progress on the lock screen.
///
/// It begins in front, where iOS allows it, and changes while the app is not. During a `BGContinuedProcessingTask`
/// iOS shows the run itself.
@MainActor final class LiveActivityUpdates {
    private let controller: RunController
    private let monitor: any DeviceMonitor
    private let display: any LiveActivityDisplay
    /// The least time between two changes of the figures. iOS limits how many changes it shows.
    private static let interval = Duration.seconds(5)
    /// The least time for which figures count as current, in seconds.
    private static let lifetime = 120.0
    /// The content that is shown; nil for none.
    private var shown: LiveActivityContent?
    private var lastChange = ContinuousClock.now

    init(controller: RunController, monitor: any DeviceMonitor, display: any LiveActivityDisplay) {
        (self.controller, self.monitor, self.display) = (controller, monitor, display)
        controller.observers.append { [weak self] in self?.update() }
        monitor.observers.append { [weak self] _ in self?.update() }
    }

    private func update() {
        guard let content, controller.isRunning, controller.grant != .continued else {
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
