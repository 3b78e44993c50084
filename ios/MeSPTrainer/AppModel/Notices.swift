import Foundation
import MeSPControl
import MeSPCore

/// A message about a run for a person who has left the app.
public struct Notice: Sendable, Equatable {
    public var title: Sentence
    public var text: Sentence
    /// Seconds until it is shown, where nothing takes it back in the meantime.
    public var delay: Double
}

/// A way to show messages: in the app the system's notifications.
@MainActor public protocol NoticeBoard: AnyObject {
    /// Asks the person whether messages may be shown; the system asks once. Where its question covers the app, this returns when they have
    /// answered.
    func askPermission() async
    /// Shows `notice` in place of the last.
    func show(_ notice: Notice)
    /// Takes back what is shown or waits to be.
    func clear()
}

/// Tells a person who has left the app what has become of the run: that it is done, that it waits and why, or that it has failed.
@MainActor final class Notices {
    /// The seconds that a run waits for the app to come back before it notifies: most people come back at once.
    static let patience = 60.0

    private let controller: RunController
    private let monitor: any DeviceMonitor
    private let board: any NoticeBoard
    /// The state that the last message was about.
    private var told = RunController.State.idle

    init(controller: RunController, monitor: any DeviceMonitor, board: any NoticeBoard) {
        (self.controller, self.monitor, self.board) = (controller, monitor, board)
        controller.observers.append { [weak self] in self?.update() }
        monitor.observers.append { [weak self] _ in self?.update() }
    }

    private func update() {
        guard monitor.scene != .active else {
            return clear()
        }
        guard controller.state != told else { return }
        if let notice = notice(controller.state) {
            board.show(notice)
            told = controller.state
        } else {
            clear()
        }
    }

    private func clear() {
        if told != .idle { board.clear() }
        told = .idle
    }

    private func notice(_ state: RunController.State) -> Notice? {
        switch state {
        case .finished(.finished):
            let steps = controller.settings?.steps ?? controller.log.lastStep
            let progress = RunProgress(controller.log, steps: steps).sentence
            return Notice(title: "Training Is Done", text: "\(progress).", delay: 0)
        case .failed(let sentence): return Notice(title: "Training Has Failed", text: sentence, delay: 0)
        case .paused(.user): return nil
        case .paused(let reason):
            return Notice(
                title: "Training Waits", text: reason.advice, delay: reason == .away ? Self.patience : 0)
        case .idle, .preparing, .training, .finished: return nil
        }
    }
}
