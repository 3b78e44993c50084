/// A kind of background time that the system has granted.
public enum BackgroundGrant: String, Sendable, CaseIterable {
    /// Time to continue work that the person started (`BGContinuedProcessingTask`), with the GPU.
    case continuedOnGPU
    /// Time to continue work that the person started, without the GPU.
    case continued
    /// Time at night, on the charger (`BGProcessingTask`).
    case overnight
}
