import MeSPCore
import Observation

/// What becomes of the phone's screen during a run.
@MainActor @Observable public final class Screen {
    /// What the person wants of the screen while a run is in progress.
    public var keepsAwake = true
    /// In front all night, with the screen dark.
    public var isOvernight = false

    @ObservationIgnored private let phone: any Phone
    @ObservationIgnored private let controller: RunController

    init(phone: any Phone, controller: RunController) { (self.phone, self.controller) = (phone, controller) }

    /// Whether the screen is to stay on.
    public var staysAwake: Bool { controller.isRunning && (keepsAwake || isOvernight) }

    /// Whether the screen is to be dark.
    public var isDimmed: Bool { controller.isRunning && isOvernight }

    /// What to do for a run that takes the night.
    public var overnightAdvice: String {
        let battery = phone.battery.map { !$0.isCharging } ?? false
        return (battery ? "Connect the charger: below 20% the run pauses. " : "")
            + "Leave the app in front and don't lock the phone: iOS stops training in the background, and it goes on only when you come back."
    }
}
