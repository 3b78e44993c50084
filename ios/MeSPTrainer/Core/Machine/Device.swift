import Foundation
import MLX
import MeSPBundle
import MeSPSentences

extension ModelBundle {
    /// The device that the bundle was exported for, which is MLX's default device in work on the bundle.
    package var device: Device { Device(manifest.device == .cpu ? .cpu : .gpu) }

    /// Calls `body` with the bundle's device as MLX's default; see `MLXWork`.
    ///
    /// - Throws: `MeSPError`, also if the machine lacks the device or MLX cannot use it.
    package func withDevice<R>(_ body: () throws -> R) throws -> R {
        let gpuRefusal = manifest.device == .gpu ? MLXSupport.gpuRefusal ?? NeuralAccelerators.current.refusal : nil
        if let refusal = MLXSupport.refusal ?? gpuRefusal { throw MeSPError(refusal) }
        _ = firstUseOfMLX
        guard manifest.device == .cpu || !Device.isCPU else {
            throw MeSPError(
                "\(url.path) was exported for a GPU and this machine has none that MLX can use; export it again with --device cpu."
            )
        }
        return try MLXWork.run(on: device, as: backend) {
            try manifest.device == .cpu ? MetalMemory.withSmallCache(body) : body()
        }
    }
}

extension Device {
    /// Whether MLX computes on a CPU now. Tests also run the GPU's code on a CPU.
    static var isCPU: Bool { defaultDevice().deviceType == .cpu }

    /// The default device outside of the trainer's work, in Swift and in C++.
    @TaskLocal static var outer: Device?

    /// Calls `body` with `device` as the default device of C++ too. C++ has its own default for all threads, the GPU, and Swift's default does not
    /// change it. `vjp` uses C++'s default for three things: the copies of evaluated inputs (MLX 0.32.2, transforms.cpp:33), gradients that are 0
    /// (:550), and the subtraction in softmax's derivative (primitives.cpp:5419). On iOS, `compile` fuses nothing while C++'s default is the CPU.
    static func withGlobal<R>(_ device: Device, _ body: () throws -> R) rethrows -> R {
        let own = Device.self as any GlobalDevice.Type
        own.setGlobal(device)
        defer { own.setGlobal(.outer ?? .defaultDevice()) }
        return try body()
    }
}

/// A protocol for calling the deprecated setter of C++'s default device without a warning. There is no other setter.
private protocol GlobalDevice {
    static func setGlobal(_ device: Device)
}

extension Device: GlobalDevice {
    @available(*, deprecated) fileprivate static func setGlobal(_ device: Device) { setDefault(device: device) }
}
