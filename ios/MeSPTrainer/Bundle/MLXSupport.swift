import Foundation
import MLX
import MeSPSentences

#if os(iOS) && !targetEnvironment(simulator)
    import Metal
#endif

/// The devices that MLX can use here. The system is asked and not MLX, which starts Metal when it is first used, for the CPU too: that
/// takes memory, and where MLX cannot use the GPU it ends the process.
public enum MLXSupport {
    #if MESP_HOST_MLX
        package static let version = hostMLXVersion
    #else
        /// The MLX that mlx-swift 0.32.3 carries.
        package static let version = "0.32.2"
    #endif

    /// Sets the variables of the environment that MLX reads, unless they are set already. They are of the whole process, so this is for a
    /// process that trains and does little else. To be called before MLX is used.
    package static func setEnvironment() {
        // On GPUs with neural accelerators (A19, M5) MLX 0.32.2 otherwise rounds the operands of float32 products to TF32.
        setenv("MLX_ENABLE_TF32", "0", 0)
        setenv(commandBufferVariable, "\(operationsOfShortBuffer)", 0)
        NeuralAccelerators.current.hide()
    }

    /// The variable of the environment that says how many operations MLX encodes into one of Metal's command buffers before it commits
    /// it. MLX reads it when it first uses Metal.
    package static let commandBufferVariable = "MLX_MAX_OPS_PER_BUFFER"

    /// So many that several buffers fit into a workspace.
    ///
    /// The arrays of a command buffer are alive until it is complete. MLX's own numbers, 20 on an iPhone and 40 or 50 on an iPad or a Mac
    /// (MLX 0.32.2, device.cpp:605), make the memory of a step depend on the device, and leave one buffer running where memory is short:
    /// `eval` then polls for its end and keeps a core busy, where it sleeps while two or more run (scheduler.h:56).
    private static let operationsOfShortBuffer = 4

    /// Whether several command buffers fit into a workspace. Where the variable is not set, MLX's own number is larger.
    package static var hasShortCommandBuffers: Bool {
        let set = getenv(commandBufferVariable).flatMap { Int(String(cString: $0)) }
        return set.map { $0 <= operationsOfShortBuffer } ?? false
    }

    /// Why MLX cannot run here; nil where it can.
    public static var refusal: Sentence? {
        #if targetEnvironment(simulator)
            noGPU
        #else
            nil
        #endif
    }

    /// Why MLX cannot run a bundle for the GPU here; nil where it can, or where only MLX knows.
    public static let gpuRefusal: Sentence? = {
        #if os(iOS) && !targetEnvironment(simulator)
            // Its kernels reduce over SIMD groups and multiply SIMD-group matrices, which older families lack.
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
