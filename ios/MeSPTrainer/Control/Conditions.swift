import MeSPCore

/// A time in the background that the system has given.
public enum BackgroundGrant: String, Sendable, CaseIterable {
    /// To continue what the person started (`BGContinuedProcessingTask`), with the GPU.
    case continuedOnGPU
    /// To continue what the person started, without the GPU.
    case continued
    /// In the night, on the charger (`BGProcessingTask`).
    case overnight
}

extension PauseReason {
    /// Why a run has to wait, besides memory and the person's choice; none where it may train. This is the one place that says which run
    /// may train when:
    ///
    /// | | active | inactive | background | … `continued` | … `continuedOnGPU` | … `overnight` |
    /// |---|---|---|---|---|---|---|
    /// | CPU | trains | trains | away | trains | trains | trains on the charger |
    /// | GPU | trains | away | away | away | trains | away |
    ///
    /// and nowhere while the device is too warm, or the battery low and not charging. Without `continuedOnGPU` iOS refuses the GPU to an
    /// app in the background, and work that it refuses is done again in front (`MLXErrors`). An app that is inactive may be in the
    /// background in a moment, and with `continuedOnGPU` trains too.
    ///
    /// - Parameters:
    ///   - usesGPU: whether the bundle is for the GPU.
    ///   - battery: nil if there is none, or nobody knows.
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
