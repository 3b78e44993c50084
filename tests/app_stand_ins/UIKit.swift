// What the app and `SystemPhone` use of UIKit.

@_exported import Foundation

public typealias CGFloat = Foundation.CGFloat
@MainActor open class UIDevice {
    public static let current = UIDevice()
    public var isBatteryMonitoringEnabled = false
    public enum BatteryState: Int, Sendable { case unknown, unplugged, charging, full }
    public var batteryState: BatteryState { .full }
    public var batteryLevel: Float { 1 }
    public nonisolated static let batteryLevelDidChangeNotification = Notification.Name("a")
    public nonisolated static let batteryStateDidChangeNotification = Notification.Name("b")
}
@MainActor public class UIScene: Hashable {
    nonisolated public static func == (a: UIScene, b: UIScene) -> Bool { a === b }
    nonisolated public func hash(into h: inout Hasher) {}
}
@MainActor public class UIScreen { public var brightness: CGFloat = 0 }
@MainActor public class UIWindowScene: UIScene { public var screen: UIScreen { UIScreen() } }
@MainActor open class UIApplication {
    public static let shared = UIApplication()
    public var isIdleTimerDisabled = false
    public var connectedScenes: Set<UIScene> { [] }
    public nonisolated static let willResignActiveNotification = Notification.Name("a"),
        didEnterBackgroundNotification = Notification.Name("b"),
        willEnterForegroundNotification = Notification.Name("c"), didBecomeActiveNotification = Notification.Name("d"),
        didReceiveMemoryWarningNotification = Notification.Name("e")
}
