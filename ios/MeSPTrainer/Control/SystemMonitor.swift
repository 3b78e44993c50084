#if os(iOS)
    import MeSPCore
    import UIKit

    /// The device that the app runs on, as the system describes it.
    @MainActor public final class SystemMonitor: DeviceMonitor {
        public private(set) var scene: AppScene
        public var observers = [(DeviceEvent) -> Void]()

        public var thermalState: ThermalState { .current }

        public var battery: Battery? {
            let device = UIDevice.current
            guard device.batteryState != .unknown else { return nil }
            return Battery(level: device.batteryLevel, isCharging: device.batteryState != .unplugged)
        }

        public var availableMemory: Int? { systemMemoryLimit() }

        /// - Parameter scene: where the app is now. The system may have started it for work in the background: it is in front when it says so.
        public init(scene: AppScene = .background) {
            self.scene = scene
            UIDevice.current.isBatteryMonitoringEnabled = true
            observe(UIApplication.willResignActiveNotification) { $0.enter(.inactive) }
            observe(UIApplication.didEnterBackgroundNotification) { monitor in
                // iOS must not suspend the app before the block in progress has ended.
                let wait = UIApplication.shared.beginBackgroundTask(withName: "leaving", expirationHandler: nil)
                monitor.enter(.background)
                UIApplication.shared.endBackgroundTask(wait)
            }
            observe(UIApplication.willEnterForegroundNotification) { $0.enter(.inactive) }
            observe(UIApplication.didBecomeActiveNotification) { $0.enter(.active) }
            observe(UIApplication.protectedDataDidBecomeAvailableNotification) { $0.tell(.change) }
            observe(UIApplication.didReceiveMemoryWarningNotification) { $0.tell(.memoryWarning) }
            observe(UIDevice.batteryLevelDidChangeNotification) { $0.tell(.change) }
            observe(UIDevice.batteryStateDidChangeNotification) { $0.tell(.change) }
            // Posted on any thread, unlike the others.
            _ = NotificationCenter.default.addObserver(
                forName: ProcessInfo.thermalStateDidChangeNotification, object: nil, queue: nil
            ) { [weak self] _ in Task { @MainActor [weak self] in self?.tell(.change) } }
        }

        /// The monitor of an app that has been launched.
        package static var ofLaunchedApp: SystemMonitor {
            switch UIApplication.shared.applicationState {
            case .active: SystemMonitor(scene: .active)
            case .inactive: SystemMonitor(scene: .inactive)
            case .background: SystemMonitor(scene: .background)
            @unknown default: SystemMonitor(scene: .background)
            }
        }

        private func enter(_ scene: AppScene) {
            self.scene = scene
            tell(.change)
        }

        private func tell(_ event: DeviceEvent) {
            for observer in observers { observer(event) }
        }

        /// Without a queue `body` runs before the post returns: leaving the app has to take effect before iOS continues.
        private func observe(_ name: Notification.Name, _ body: @escaping @MainActor @Sendable (SystemMonitor) -> Void)
        {
            _ = NotificationCenter.default.addObserver(forName: name, object: nil, queue: nil) { [weak self] _ in
                MainActor.assumeIsolated {
                    if let self { body(self) }
                }
            }
        }
    }
#else
    import Foundation
    import MeSPCore

    /// The computer that the process runs on, which trains whether an app is in front or not.
    @MainActor public final class SystemMonitor: DeviceMonitor {
        public var observers = [(DeviceEvent) -> Void]()

        public var scene: AppScene { .active }
        public var thermalState: ThermalState { .current }
        /// A Mac goes to sleep by itself before its battery is empty.
        public var battery: Battery? { nil }
        public var availableMemory: Int? { systemMemoryLimit() }

        package static var ofLaunchedApp: SystemMonitor { SystemMonitor() }

        #if canImport(Darwin)
            private let pressure = DispatchSource.makeMemoryPressureSource(
                eventMask: [.warning, .critical], queue: .main)

            public init() {
                pressure.setEventHandler { [weak self] in
                    MainActor.assumeIsolated { self?.tell(.memoryWarning) }
                }
                pressure.activate()
                // Posted on any thread.
                _ = NotificationCenter.default.addObserver(
                    forName: ProcessInfo.thermalStateDidChangeNotification, object: nil, queue: nil
                ) { [weak self] _ in Task { @MainActor [weak self] in self?.tell(.change) } }
            }

            private func tell(_ event: DeviceEvent) {
                for observer in observers { observer(event) }
            }
        #else
            public init() {}
        #endif
    }
#endif
