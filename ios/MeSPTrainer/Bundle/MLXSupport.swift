import Foundation
import MLX
import MeSPSentences

#if os(iOS) && !targetEnvironment(simulator)
    import Metal
#endif

/// The devices that MLX can use here. The answers come from the system, not from MLX, because MLX starts Metal at its first use, even on the CPU.
/// Starting Metal takes memory, and ends the process if MLX cannot use the GPU.
public enum MLXSupport {
    #if MESP_HOST_MLX
        package static let version = hostMLXVersion
    #else
        /// The version of MLX in mlx-swift 0.32.3.
        package static let version = "0.32.2"
    #endif

    /// Sets the environment variables that MLX reads, unless they are set already. The variables affect the whole process, so call this function only
    /// in a process that mainly trains. Call it before the first use of MLX.
    package static func setEnvironment() {
        // By default MLX 0.32.2 rounds the operands of float32 products to TF32 on GPUs with neural accelerators (A19, M5).
        setenv("MLX_ENABLE_TF32", "0", 0)
        setenv(commandBufferVariable, "\(operationsOfShortBuffer)", 0)
        NeuralAccelerators.current.hide()
    }

    /// The environment variable that limits the number of operations in one Metal command buffer of MLX. MLX reads the variable at its first use of
    /// Metal.
    package static let commandBufferVariable = "MLX_MAX_OPS_PER_BUFFER"

    /// A number so small that several command buffers fit into a workspace.
    ///
    /// The arrays of a command buffer stay in memory until it is complete. MLX's defaults are 20 on an iPhone and 40 or 50 on an iPad or a Mac (MLX
    /// 0.32.2, device.cpp:605). With these defaults the memory of a step depends on the device, and only one buffer runs if memory is short. While
    /// one buffer runs, `eval` polls for its end and keeps a core busy. While two or more run, `eval` sleeps (scheduler.h:56).
    private static let operationsOfShortBuffer = 4

    /// Whether several command buffers fit into a workspace. MLX's default for an unset variable is too large.
    package static var hasShortCommandBuffers: Bool {
        let set = getenv(commandBufferVariable).flatMap { Int(String(cString: $0)) }
        return set.map { $0 <= operationsOfShortBuffer } ?? false
    }

    /// The reason why MLX cannot run here; nil if it can.
    public static var refusal: Sentence? {
        #if targetEnvironment(simulator)
            noGPU
        #else
            nil
        #endif
    }

    /// The reason why MLX cannot run a bundle for the GPU here; nil if MLX can run it, or if only MLX can tell.
    public static let gpuRefusal: Sentence? = {
        #if os(iOS) && !targetEnvironment(simulator)
            // MLX's kernels reduce over SIMD groups and multiply SIMD-group matrices, which older GPU families cannot do.
            MTLCreateSystemDefaultDevice()?.supportsFamily(.apple7) == true ? nil : oldGPU
        #else
            nil
        #endif
    }()

    private static let noGPU: Sentence =
        "The iOS simulator lacks the GPU that MLX needs: train on an iPhone, an iPad or a Mac, or look at a recorded run."
    private static let oldGPU: Sentence =
        "MLX needs the GPU of an A14, an M1 or a later chip, and this device has an older one; choose a bundle for the CPU, or export this one with --device cpu."
}
