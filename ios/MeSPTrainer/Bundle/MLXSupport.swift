import Foundation
import MLX
import MeSPSentences

#if os(iOS) && !targetEnvironment(simulator)
    import Metal
#endif

/// Whether and how MLX can run on this device.
///
/// The properties ask the system instead of MLX. Asking MLX would start Metal, which takes memory and terminates the process if MLX cannot use the
/// GPU.
public enum MLXSupport {
    #if MESP_HOST_MLX
        package static let version = hostMLXVersion
    #else
        /// The version of MLX in mlx-swift 0.32.3.
        package static let version = "0.32.2"
    #endif

    /// Sets environment variables that MLX reads, unless they are already set. Call this before the first use of MLX.
    ///
    /// The variables affect the whole process, so call this only in a process that mainly trains.
    package static func setEnvironment() {
        // By default MLX 0.32.2 computes float32 products in TF32 on GPUs with neural accelerators (A19, M5).
        setenv("MLX_ENABLE_TF32", "0", 0)
        setenv(commandBufferVariable, "\(operationsOfShortBuffer)", 0)
        NeuralAccelerators.current.hide()
    }

    /// The environment variable that limits the number of operations in a Metal command buffer. MLX reads it at its first use of Metal.
    package static let commandBufferVariable = "MLX_MAX_OPS_PER_BUFFER"

    /// The maximum number of operations in one Metal command buffer.
    ///
    /// MLX keeps a command buffer's arrays until the buffer is complete, so short buffers save memory. They also save CPU time: `eval` polls while
    /// only one buffer runs, but sleeps while several run (MLX 0.32.2, scheduler.h:56).
    private static let operationsOfShortBuffer = 4

    package static var hasShortCommandBuffers: Bool {
        let set = getenv(commandBufferVariable).flatMap { Int(String(cString: $0)) }
        return set.map { $0 <= operationsOfShortBuffer } ?? false
    }

    public static var refusal: Sentence? {
        #if targetEnvironment(simulator)
            noGPU
        #else
            nil
        #endif
    }

    package static let gpuRefusal: Sentence? = {
        #if os(iOS) && !targetEnvironment(simulator)
            // MLX's kernels need SIMD-group reductions and matrices, which older GPU families lack.
            MTLCreateSystemDefaultDevice()?.supportsFamily(.apple7) == true ? nil : oldGPU
        #else
            nil
        #endif
    }()

    private static let noGPU: Sentence =
        "The iOS simulator lacks the GPU that MLX needs: train on an iPhone, an iPad or a Mac, or look at a recorded run."
    private static let oldGPU: Sentence =
        "MLX needs the GPU of an A14, an M1 or a later chip, and this device has an older one; choose the device cpu."
}
