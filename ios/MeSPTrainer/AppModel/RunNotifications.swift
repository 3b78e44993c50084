import Foundation
import MeSPControl
import MeSPCore
import MeSPSentences

/// A message about a run for a person who has left the app.
public struct RunNotification: Sendable, Equatable {
    public var title: Sentence
    public var text: Sentence
    /// The seconds until the message is shown, unless it is cleared before.
    public var delay: Double
}

/// A display of messages: in the app, the system's notifications.
@MainActor public protocol NotificationDisplay: AnyObject {
    /// Asks the person for permission to show messages. The system asks only once. If the system shows a dialog over the app, this function returns
    /// after the person's answer.
    func askPermission() async
    /// Shows `notification` in place of the last one.
    func show(_ notification: RunNotification)
    /// Removes the shown or pending message.
    func clear()
}

/// Sends messages about the run to a person who has left the app. A message says that the run has finished, that it has failed, or for which reason
/// it waits.
@MainActor final class RunNotifications {
    /// The delay, in seconds, of a message which says that the run waits for the app. Most people come back to the app sooner.
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
