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
    /// To be called after each change of the scene, the thermal state or the battery.
    var onChange: () -> Void { get set }
    /// To be called when the system runs short of memory.
    var onMemoryWarning: () -> Void { get set }
}

#if os(iOS)
    import UIKit
    import os

    /// The device that the app runs on.
    @MainActor public final class SystemPhone: Phone {
        public private(set) var scene = AppScene.active
        public var onChange: () -> Void = {}
        public var onMemoryWarning: () -> Void = {}

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
            observe(UIApplication.didReceiveMemoryWarningNotification) { $0.onMemoryWarning() }
            observe(UIDevice.batteryLevelDidChangeNotification) { $0.onChange() }
            observe(UIDevice.batteryStateDidChangeNotification) { $0.onChange() }
            // Posted on any thread, unlike the others.
            NotificationCenter.default.addObserver(
                forName: ProcessInfo.thermalStateDidChangeNotification, object: nil, queue: nil
            ) { [weak self] _ in Task { @MainActor in self?.onChange() } }
        }

        private func enter(_ scene: AppScene) {
            self.scene = scene
            onChange()
        }

        /// Without a queue `body` runs before the post returns: leaving the app has to take effect before iOS goes on.
        private func observe(_ name: Notification.Name, _ body: @escaping @MainActor @Sendable (SystemPhone) -> Void) {
            NotificationCenter.default.addObserver(forName: name, object: nil, queue: nil) { [weak self] _ in
                MainActor.assumeIsolated {
                    if let self { body(self) }
                }
            }
        }
    }
#endif
