import MeSPCore
import MeSPSentences

/// A reason why a run waits. If several apply, the first in this order is reported.
public enum PauseReason: String, Sendable, CaseIterable {
    case user
    /// The app uses MLX for other work.
    case app
    /// The app is not in front and may not train now.
    case away
    case memory
    case heat
    case battery
    case lowPower
    /// The device does not charge, as overnight background time requires.
    case charger

    public var sentence: Sentence {
        switch self {
        case .user: "Paused by hand."
        case .app: "The app is busy with other work."
        case .away: "The app is not in front, and iOS gives it no time to train."
        case .memory: "The device is short of memory."
        case .heat: "The device is too warm."
        case .battery: "The battery is below 20% and not charging."
        case .lowPower: "Low Power Mode is on."
        case .charger: "The device is not on its charger."
        }
    }

    package var remedy: Sentence {
        switch self {
        case .user: "Resume it to continue."
        case .app: "Training continues when the app is done."
        case .away: "Open the app to continue."
        case .memory: "Training continues when there is more."
        case .heat: "Training continues when it has cooled down."
        case .lowPower: "Connect the charger or turn Low Power Mode off to continue."
        case .battery, .charger: "Connect the charger to continue."
        }
    }

    package var advice: Sentence { "\(sentence). \(remedy)." }
}

extension PauseReason {
    /// Returns the reasons why a run must wait, except memory, the app and the person. The set is empty if the run may train:
    ///
    /// | | active | inactive | background | background with `continued` | background with `overnight` |
    /// |---|---|---|---|---|---|
    /// | CPU | trains | trains | away | trains | trains while charging |
    /// | GPU | trains | away | away | away | away |
    ///
    /// With `continuedOnGPU` a run trains in every scene. In any state, a run waits while the device is too warm, or while the battery is below 20%
    /// or Low Power Mode is on, and the battery is not charging. iOS refuses the GPU to a background app without `continuedOnGPU`. An inactive app may soon be in the background.
    ///
    /// - Parameters:
    ///   - battery: the state of the battery, or nil if there is none or it is unknown. Then nothing waits for the battery or the charger.
    static func reasons(
        scene: AppScene = .active, usesGPU: Bool = true, grant: BackgroundGrant? = nil,
        thermalState: ThermalState = .nominal, battery: Battery? = nil, isLowPower: Bool = false
    ) -> Set<PauseReason> {
        var reasons = Set<PauseReason>()
        switch (scene, usesGPU, grant) {
        case (.active, _, _), (.inactive, false, _), (.background, false, .continued), (_, _, .continuedOnGPU): break
        case (.background, false, .overnight): if let battery, !battery.isCharging { reasons.insert(.charger) }
        case (.inactive, true, _), (.background, true, _), (.background, false, nil): reasons.insert(.away)
        }
        if thermalState == .serious || thermalState == .critical { reasons.insert(.heat) }
        if let battery, !battery.isCharging {
            if battery.level < 0.2 { reasons.insert(.battery) }
            if isLowPower { reasons.insert(.lowPower) }
        }
        return reasons
    }
}
