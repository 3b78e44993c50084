import Foundation

/// Where an app is: in front, about to leave or partly covered, or out of sight.
public enum AppScene: String, Sendable, CaseIterable { case active, inactive, background }

/// How warm the device is, as `ProcessInfo.ThermalState` has it.
public enum ThermalState: String, Sendable, CaseIterable {
    case nominal, fair, serious, critical

    /// The device's present state; on Linux always `nominal`.
    public static var current: ThermalState {
        #if canImport(Darwin)
            switch ProcessInfo.processInfo.thermalState {
            case .fair: .fair
            case .serious: .serious
            case .critical: .critical
            default: .nominal
            }
        #else
            .nominal
        #endif
    }
}

public struct Battery: Sendable, Equatable {
    /// 0 to 1
    public var level: Float
    /// On the charger, also where it is full.
    public var isCharging: Bool

    public init(level: Float, isCharging: Bool) {
        (self.level, self.isCharging) = (level, isCharging)
    }
}

/// What `RunController` has to know of the device. `SystemPhone` asks the system; tests have one of their own.
@MainActor public protocol Phone: AnyObject {
    var scene: AppScene { get }
    var thermalState: ThermalState { get }
    /// nil where there is no battery, or nobody knows.
    var battery: Battery? { get }
    /// Bytes that the process may still take; nil where there is no limit.
    var availableMemory: Int? { get }
    /// To be called at each event, at once and in order.
    var observers: [(PhoneEvent) -> Void] { get set }
}

public enum PhoneEvent: Sendable {
    /// The scene, the thermal state or the battery is another.
    case change
    /// The system runs short of memory.
    case memoryWarning
}

#if os(iOS)
    import UIKit
    import os

    /// The device that the app runs on.
    @MainActor public final class SystemPhone: Phone {
        public private(set) var scene = AppScene.active
        public var observers = [(PhoneEvent) -> Void]()

        public var thermalState: ThermalState { .current }

        public var battery: Battery? {
            let device = UIDevice.current
            guard device.batteryState != .unknown else { return nil }
            return Battery(level: device.batteryLevel, isCharging: device.batteryState != .unplugged)
        }

        public var availableMemory: Int? { Int(os_proc_available_memory()) }

        public init() {
            UIDevice.current.isBatteryMonitoringEnabled = true
            observe(UIApplication.willResignActiveNotification) { $0.enter(.inactive) }
            observe(UIApplication.didEnterBackgroundNotification) { $0.enter(.background) }
            observe(UIApplication.willEnterForegroundNotification) { $0.enter(.inactive) }
            observe(UIApplication.didBecomeActiveNotification) { $0.enter(.active) }
            observe(UIApplication.didReceiveMemoryWarningNotification) { $0.tell(.memoryWarning) }
            observe(UIDevice.batteryLevelDidChangeNotification) { $0.tell(.change) }
            observe(UIDevice.batteryStateDidChangeNotification) { $0.tell(.change) }
            // Posted on any thread, unlike the others.
            _ = NotificationCenter.default.addObserver(
                forName: ProcessInfo.thermalStateDidChangeNotification, object: nil, queue: nil
            ) { [weak self] _ in Task { @MainActor in self?.tell(.change) } }
        }

        private func enter(_ scene: AppScene) {
            self.scene = scene
            tell(.change)
        }

        private func tell(_ event: PhoneEvent) {
            for observer in observers { observer(event) }
        }

        /// Without a queue `body` runs before the post returns: leaving the app has to take effect before iOS goes on.
        private func observe(_ name: Notification.Name, _ body: @escaping @MainActor @Sendable (SystemPhone) -> Void) {
            _ = NotificationCenter.default.addObserver(forName: name, object: nil, queue: nil) { [weak self] _ in
                MainActor.assumeIsolated {
                    if let self { body(self) }
                }
            }
        }
    }
#endif
