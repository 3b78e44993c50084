import MeSPAppModel
import UserNotifications

@MainActor final class SystemNotifications: NotificationDisplay {
    private static let identifier = "run"

    private var center: UNUserNotificationCenter { .current() }

    func askPermission() async {
        #if os(macOS)
            // On a Mac the request is a banner that may stay unanswered, so the app does not wait for an answer.
            center.requestAuthorization(options: [.alert, .sound]) { @Sendable _, _ in }
        #else
            await withCheckedContinuation { continuation in
                center.requestAuthorization(options: [.alert, .sound]) { @Sendable _, _ in continuation.resume() }
            }
        #endif
    }

    func show(_ notification: RunNotification) {
        let content = UNMutableNotificationContent()
        (content.title, content.body, content.sound) = (
            notification.title.localized, notification.text.localized, .default
        )
        let trigger =
            notification.delay > 0
            ? UNTimeIntervalNotificationTrigger(timeInterval: notification.delay, repeats: false) : nil
        clear()
        center.add(UNNotificationRequest(identifier: Self.identifier, content: content, trigger: trigger))
    }

    func clear() {
        center.removePendingNotificationRequests(withIdentifiers: [Self.identifier])
        center.removeDeliveredNotifications(withIdentifiers: [Self.identifier])
    }
}
