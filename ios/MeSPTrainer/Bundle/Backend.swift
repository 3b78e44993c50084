/// The device that a bundle was exported for. The device decides how the model is computed.
///
///     cpu    a block's forward pass is the formulas, called one by one; products are in float32; temporaries are cut by rows of W
///     gpu    a block's forward pass is the bundle's function; products are by `quantizedMM` in the dtype of the activations; temporaries
///            are cut by tokens, and MLX encodes one piece of work after the other
public enum Backend: String, Codable, Sendable {
    case cpu, gpu
}
