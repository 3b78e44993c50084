import MeSPCore
import MeSPSentences

/// A reason why a run waits, with its sentences; `reasons` below says when each holds. Of several that hold, the first in this order is
/// told.
public enum PauseReason: String, Sendable, CaseIterable {
    /// The person asked for it.
    case user
    /// The app that the run is in uses MLX itself.
    case app
    /// The app is not in front, and may not train where it is.
    case away
    /// The system ran short of memory.
    case memory
    /// The device is too warm.
    case heat
    /// The battery is low and not charging.
    case battery
    /// The night's time in the background is for a phone on its charger.
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

    /// The reason and what ends it.
    package var advice: Sentence { "\(sentence). \(remedy)." }
}

extension PauseReason {
    /// The reasons why a run has to wait, except memory and the person's choice; none where the run may train. No other place decides that:
    ///
    /// | | active | inactive | background | … `continued` | … `continuedOnGPU` | … `overnight` |
    /// |---|---|---|---|---|---|---|
    /// | CPU | trains | trains | away | trains | trains | trains on the charger |
    /// | GPU | trains | away | away | away | trains | away |
    ///
    /// No run trains while the device is too warm, nor while the battery is below 20% and not charging. Without `continuedOnGPU` iOS refuses
    /// the GPU to an app in the background, and work that it refuses is done again in front (`MLXErrors`). An app that is inactive may be
    /// in the background in a moment, and with `continuedOnGPU` trains too.
    ///
    /// - Parameters:
    ///   - usesGPU: whether the bundle is for the GPU.
    ///   - battery: nil if there is none, or it is not known.
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
