#if os(iOS)
    import MeSPCore
    import UIKit

    /// The state of the app and its device, as the system reports it.
    @MainActor public final class SystemMonitor: DeviceMonitor {
        public private(set) var scene: AppScene
        private var watchedBattery = false
        /// The monitoring of the battery is of the process. After a run it is as before.
        public var isInUse = false {
            didSet {
                guard isInUse != oldValue else { return }
                let device = UIDevice.current
                if isInUse { watchedBattery = device.isBatteryMonitoringEnabled }
                device.isBatteryMonitoringEnabled = isInUse || watchedBattery
            }
        }
        public var observers = [(DeviceEvent) -> Void]()

        public var thermalState: ThermalState { .current }

        public var battery: Battery? {
            let device = UIDevice.current
            guard device.batteryState != .unknown else { return nil }
            return Battery(level: device.batteryLevel, isCharging: device.batteryState != .unplugged)
        }

        public var isLowPower: Bool { ProcessInfo.processInfo.isLowPowerModeEnabled }

        public var availableMemory: Int? { systemMemoryLimit() }

        /// - Parameters:
        ///   - scene: the present scene of the app. The default is the background, because the system may have launched the app there.
        ///   - watchesBattery: whether ``battery`` is known while no run is in progress.
        public init(scene: AppScene = .background, watchesBattery: Bool = true) {
            self.scene = scene
            if watchesBattery { UIDevice.current.isBatteryMonitoringEnabled = true }
            observe(UIApplication.willResignActiveNotification) { $0.enter(.inactive) }
            observe(UIApplication.didEnterBackgroundNotification) { monitor in
                // The background task keeps iOS from suspending the app before the block in progress has ended.
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
            // Unlike the other notifications, these may be posted on any thread.
            for name in [ProcessInfo.thermalStateDidChangeNotification, .NSProcessInfoPowerStateDidChange] {
                _ = NotificationCenter.default.addObserver(forName: name, object: nil, queue: nil) { [weak self] _ in
                    Task { @MainActor [weak self] in self?.tell(.change) }
                }
            }
        }

        package static var ofLaunchedApp: SystemMonitor {
            let scene: AppScene =
                switch UIApplication.shared.applicationState {
                case .active: .active
                case .inactive: .inactive
                case .background: .background
                @unknown default: .background
                }
            return SystemMonitor(scene: scene, watchesBattery: false)
        }

        private func enter(_ scene: AppScene) {
            self.scene = scene
            tell(.change)
        }

        private func tell(_ event: DeviceEvent) {
            for observer in observers { observer(event) }
        }

        /// Calls `body` synchronously for each notification, before the poster of the notification continues.
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

    /// The state of a computer, which trains whether or not an app is in front.
    @MainActor public final class SystemMonitor: DeviceMonitor {
        public var observers = [(DeviceEvent) -> Void]()
        public var isInUse = false

        public var scene: AppScene { .active }
        public var thermalState: ThermalState { .current }
        /// Always nil, so a run never waits for the battery. A Mac sleeps before its battery is empty.
        public var battery: Battery? { nil }
        public var isLowPower: Bool { false }
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
                // This notification may be posted on any thread.
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
