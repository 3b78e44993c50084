import Foundation
import MeSPControl
import MeSPCore
import MeSPSentences

/// A message about a run for a person who has left the app.
public struct RunNotification: Sendable, Equatable {
    public var title: Sentence
    public var text: Sentence
    /// Seconds until it is shown, where nothing takes it back in the meantime.
    public var delay: Double
}

/// A way to show messages: in the app the system's notifications.
@MainActor public protocol NotificationDisplay: AnyObject {
    /// Asks the person whether messages may be shown; the system asks once. Where its question covers the app, this returns when they have
    /// answered.
    func askPermission() async
    /// Shows `notification` in place of the last.
    func show(_ notification: RunNotification)
    /// Takes back what is shown or waits to be.
    func clear()
}

/// Tells a person who has left the app what has become of the run: that it is done, that it waits and why, or that it has failed.
@MainActor final class RunNotifications {
    /// The seconds between a run's pause for the app and the notification of it: most people come back at once.
    static let patience = 60.0

    private let controller: RunController
    private let monitor: any DeviceMonitor
    private let display: any NotificationDisplay
    /// The state that the last message was about.
    private var told = RunController.State.idle

    init(controller: RunController, monitor: any DeviceMonitor, display: any NotificationDisplay) {
        (self.controller, self.monitor, self.display) = (controller, monitor, display)
        controller.observers.append { [weak self] in self?.update() }
        monitor.observers.append { [weak self] _ in self?.update() }
    }

    private func update() {
        guard monitor.scene != .active else {
            return clear()
        }
        guard controller.state != told else { return }
        if let notification = notification(controller.state) {
            display.show(notification)
            told = controller.state
        } else {
            clear()
        }
    }

    private func clear() {
        if told != .idle { display.clear() }
        told = .idle
    }

    private func notification(_ state: RunController.State) -> RunNotification? {
        switch state {
        case .finished(.finished):
            let steps = controller.settings?.steps ?? controller.log.lastStep
            let progress = RunProgress(controller.log, steps: steps).sentence
            return RunNotification(title: "Training Is Done", text: "\(progress).", delay: 0)
        case .failed(let sentence): return RunNotification(title: "Training Has Failed", text: sentence, delay: 0)
        case .paused(.user): return nil
        case .paused(let reason):
            return RunNotification(
                title: "Training Waits", text: reason.advice, delay: reason == .away ? Self.patience : 0)
        case .idle, .preparing, .training, .finished: return nil
        }
    }
}
