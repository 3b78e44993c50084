import MeSPControl
import MeSPCore
import MeSPSentences
import Observation

@MainActor public protocol Display: AnyObject {
    /// The brightness, from 0 to 1; nil if there is no screen now.
    var brightness: Double? { get set }
}

@MainActor @Observable public final class ScreenPower {
    public var keepsAwake = true
    public var isOvernight = false { didSet { update() } }
    public private(set) var isDimmed = false

    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private let controller: RunController
    @ObservationIgnored private let display: (any Display)?
    @ObservationIgnored private var brightness: Double?

    init(monitor: any DeviceMonitor, controller: RunController, display: (any Display)?) {
        (self.monitor, self.controller, self.display) = (monitor, controller, display)
        monitor.observers.append { [weak self] _ in self?.update() }
        controller.observers.append { [weak self] in self?.update() }
    }

    public var staysAwake: Bool { controller.isRunning && (keepsAwake || isOvernight) }

    /// Dims the screen or restores its brightness. The change is immediate, because the app may soon be suspended.
    private func update() {
        let dims = controller.isRunning && isOvernight && monitor.scene == .active
        guard dims != isDimmed else { return }
        isDimmed = dims
        if dims {
            brightness = display?.brightness
            display?.brightness = 0
        } else if let brightness {
            display?.brightness = brightness
        }
    }

    public var overnightAdvice: Sentence {
        let advice: Sentence =
            controller.usesGPU
            ? "Leave the app in front and don't lock the phone: iOS stops training on the GPU in the background, and it continues only when you come back."
            : "With the app in front and the phone unlocked, training continues all night. In the background iOS decides when it trains, and only on the charger."
        guard let battery = monitor.battery, !battery.isCharging else { return advice }
        return "Connect the charger: below 20% the run pauses. \(advice)."
    }
}
