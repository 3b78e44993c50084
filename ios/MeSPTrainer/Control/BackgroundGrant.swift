/// Time in the background that the system has given.
public enum BackgroundGrant: String, Sendable, CaseIterable {
    /// To continue what the person started (`BGContinuedProcessingTask`), with the GPU.
    case continuedOnGPU
    /// To continue what the person started, without the GPU.
    case continued
    /// In the night, on the charger (`BGProcessingTask`).
    case overnight
}
