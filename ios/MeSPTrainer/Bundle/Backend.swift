/// The device that a bundle was exported for.
///
/// - `cpu`: the forward pass calls the block's formulas one by one, with products in float32.
/// - `gpu`: the forward pass can call the block's function from the bundle, with products by `quantizedMM` in the dtype of the activations.
public enum Backend: String, Codable, Sendable {
    case cpu, gpu
}
