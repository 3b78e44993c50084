import Foundation
import MeSPControl
import MeSPCore
import MeSPSentences

public struct RunNotification: Sendable, Equatable {
    public var title: Sentence
    public var text: Sentence
    /// The seconds until the notification is shown. `NotificationDisplay.clear()` cancels a notification that is not yet shown.
    public var delay: Double
}

@MainActor public protocol NotificationDisplay: AnyObject {
    /// Asks for permission to show notifications. If the system shows a dialog, returns after the person's answer.
    func askPermission() async
    func show(_ notification: RunNotification)
    func clear()
}

@MainActor final class RunNotifications {
    /// The seconds after which a notification says that the run waits for the app.
    static let patience = 60.0

    private let controller: RunController
    private let monitor: any DeviceMonitor
    private let display: any NotificationDisplay
    private var told = RunController.State.idle

    init(controller: RunController, monitor: any DeviceMonitor, display: any NotificationDisplay) {
        (self.controller, self.monitor, self.display) = (controller, monitor, display)
        controller.observers.append { [weak self] in self?.update() }
        monitor.observers.append { [weak self] _ in self?.update() }
    }

    private func update() {
        guard monitor.scene != .active else { return clear() }
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
