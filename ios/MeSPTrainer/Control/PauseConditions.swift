import MeSPCore
import MeSPSentences

/// A reason why a run waits, with sentences about the reason. The function `reasons` decides when a reason applies. If several reasons apply, the
/// first in this order is reported.
public enum PauseReason: String, Sendable, CaseIterable {
    /// The person asked for the pause.
    case user
    /// The app uses MLX for its own work.
    case app
    /// The app is not in front, and may not train in its present state.
    case away
    /// The system ran short of memory.
    case memory
    /// The device is too warm.
    case heat
    /// The battery is low and not charging.
    case battery
    /// The granted overnight time requires a phone on its charger.
    case charger

    /// The reason as a sentence.
    public var sentence: Sentence {
        switch self {
        case .user: "Paused by hand."
        case .app: "The app is busy with other work."
        case .away: "The app is not in front, and iOS gives it no time to train."
        case .memory: "The device is short of memory."
        case .heat: "The device is too warm."
        case .battery: "The battery is below 20% and not charging."
        case .charger: "The device is not on its charger."
        }
    }

    /// The event that ends the pause, as a sentence.
    package var remedy: Sentence {
        switch self {
        case .user: "Resume it to continue."
        case .app: "Training continues when the app is done."
        case .away: "Open the app to continue."
        case .memory: "Training continues when there is more."
        case .heat: "Training continues when it has cooled down."
        case .battery, .charger: "Connect the charger to continue."
        }
    }

    /// The reason and the remedy.
    package var advice: Sentence { "\(sentence). \(remedy)." }
}

extension PauseReason {
    /// Returns the reasons why a run has to wait, except memory, the app and the person's choice. The set is empty if the run may train. Only this
    /// function decides where a run trains:
    ///
    /// | | active | inactive | background | … `continued` | … `continuedOnGPU` | … `overnight` |
    /// |---|---|---|---|---|---|---|
    /// | CPU | trains | trains | away | trains | trains | trains on the charger |
    /// | GPU | trains | away | away | away | trains | away |
    ///
    /// No run trains while the device is too warm, or while the battery is below 20% and not charging. Without `continuedOnGPU` iOS refuses the GPU
    /// to an app in the background, and refused work is repeated when the app is in front (`MLXErrors`). An inactive app may soon be in the
    /// background, so on the GPU it trains only with `continuedOnGPU`.
    ///
    /// - Parameters:
    ///   - usesGPU: whether the bundle is for the GPU.
    ///   - battery: the state of the battery; nil if there is none, or if it is unknown.
    static func reasons(
        scene: AppScene = .active, usesGPU: Bool = true, grant: BackgroundGrant? = nil,
        thermalState: ThermalState = .nominal, battery: Battery? = nil
    ) -> Set<PauseReason> {
        var reasons = Set<PauseReason>()
        switch (scene, usesGPU, grant) {
        case (.active, _, _), (.inactive, false, _), (.background, false, .continued), (_, _, .continuedOnGPU): break
        case (.background, false, .overnight): if let battery, !battery.isCharging { reasons.insert(.charger) }
        case (.inactive, true, _), (.background, true, _), (.background, false, nil): reasons.insert(.away)
        }
        if thermalState == .serious || thermalState == .critical { reasons.insert(.heat) }
        if let battery, battery.level < 0.2, !battery.isCharging { reasons.insert(.battery) }
        return reasons
    }
}
