import MLX
import MeSPFunctionCheck

/// The device that a bundle was exported for, and how its model is computed there.
///
///     cpu    a block's forward pass is the formulas, called one by one; products are in float32; temporaries are cut by rows of W
///     gpu    a block's forward pass is the bundle's function; products are by `quantizedMM` in the dtype of the activations; temporaries
///            are cut by tokens, and MLX encodes one piece of work after the other
public enum Backend: String, Codable, Sendable {
    case cpu, gpu

    var device: Device { self == .cpu ? .cpu : .gpu }
}

extension Device {
    /// Whether MLX computes on a CPU now. In tests it does so the GPU's way too.
    static var isCPU: Bool { defaultDevice().deviceType == .cpu }
}

extension ElementType {
    package var dtype: DType {
        switch self {
        case .bool: .bool
        case .uint8: .uint8
        case .uint32: .uint32
        case .uint64: .uint64
        case .int32: .int32
        case .float32: .float32
        case .bfloat16: .bfloat16
        }
    }
}
