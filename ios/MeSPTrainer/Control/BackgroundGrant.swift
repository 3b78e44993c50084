public enum BackgroundGrant: String, Sendable, CaseIterable {
    /// Time with the GPU to continue a run that the person started (`BGContinuedProcessingTask`).
    case continuedOnGPU
    /// Time without the GPU to continue a run that the person started.
    case continued
    /// Time while the device charges, usually at night (`BGProcessingTask`).
    case overnight
}
