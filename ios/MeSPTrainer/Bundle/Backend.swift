import MLX
import MeSPSentences

/// The processor that computes.
///
/// - `cpu`: the forward pass calls the block's formulas one by one, in float32.
/// - `gpu`: the forward pass can call the block's function from the bundle. Activations are bfloat16.
public enum Backend: String, Codable, Sendable {
    case cpu, gpu

    /// The processor of work that names none: the GPU if MLX can use it and no self-check has failed on it, otherwise the CPU.
    package static var standard: Backend {
        #if os(Linux)
            .cpu
        #else
            Backend.gpu.refusal == nil ? .gpu : .cpu
        #endif
    }

    package var name: String { rawValue.uppercased() }

    package var refusal: Sentence? {
        MLXSupport.refusal ?? (self == .gpu ? MLXSupport.gpuRefusal ?? NeuralAccelerators.current.refusal : nil)
    }

    package var dtype: DType { self == .gpu ? .bfloat16 : .float32 }
}
