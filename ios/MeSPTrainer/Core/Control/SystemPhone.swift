#if os(iOS)
    import UIKit

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

        public var availableMemory: Int? { systemMemoryLimit() }

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
