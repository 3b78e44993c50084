// The part of UIKit that the app and `SystemMonitor` use.

@_exported import Foundation

// developer.apple.com/documentation/corefoundation/cgfloat
public typealias CGFloat = Foundation.CGFloat
// developer.apple.com/documentation/uikit/uidevice
@MainActor open class UIDevice {
    public static let current = UIDevice()
    public var isBatteryMonitoringEnabled = false
    public enum BatteryState: Int, Sendable { case unknown, unplugged, charging, full }
    public var batteryState: BatteryState { .full }
    public var batteryLevel: Float { 1 }
    public nonisolated static let batteryLevelDidChangeNotification = Notification.Name("a")
    public nonisolated static let batteryStateDidChangeNotification = Notification.Name("b")
}

// developer.apple.com/documentation/uikit/uiscene, …/uiscreen, …/uiwindowscene
@MainActor public class UIScene: Hashable {
    nonisolated public static func == (a: UIScene, b: UIScene) -> Bool { a === b }
    nonisolated public func hash(into h: inout Hasher) {}
}
@MainActor public class UIScreen { public var brightness: CGFloat = 0 }
@MainActor public class UIWindowScene: UIScene { public var screen: UIScreen { UIScreen() } }

// developer.apple.com/documentation/uikit/uiapplication
public struct UIBackgroundTaskIdentifier: Sendable {}
@MainActor open class UIApplication {
    public static let shared = UIApplication()
    public enum State: Int, Sendable { case active, inactive, background }
    public var applicationState: State { .active }
    public var isIdleTimerDisabled = false
    public var connectedScenes: Set<UIScene> { [] }
    public nonisolated static let willResignActiveNotification = Notification.Name("a"),
        didEnterBackgroundNotification = Notification.Name("b"),
        willEnterForegroundNotification = Notification.Name("c"), didBecomeActiveNotification = Notification.Name("d"),
        didReceiveMemoryWarningNotification = Notification.Name("e"),
        protectedDataDidBecomeAvailableNotification = Notification.Name("f")
    nonisolated public func beginBackgroundTask(
        withName name: String?, expirationHandler: (@MainActor @Sendable () -> Void)? = nil
    )
        -> UIBackgroundTaskIdentifier
    { .init() }
    nonisolated public func endBackgroundTask(_ identifier: UIBackgroundTaskIdentifier) {}
}
