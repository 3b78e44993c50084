import Foundation
import MLX
import MeSPBundle
import MeSPSentences

extension ModelBundle {
    /// The device that the functions were exported for, and that everything runs on.
    package var device: Device { Device(manifest.device == .cpu ? .cpu : .gpu) }

    /// Calls `body` with the bundle's device as MLX's default; see `MLXWork`.
    ///
    /// - Throws: `MeSPError`, also where the device is not there, or MLX cannot use it.
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
    /// Whether MLX computes on a CPU now. In tests it does so the GPU's way too.
    static var isCPU: Bool { defaultDevice().deviceType == .cpu }

    /// The default device around the trainer's work, which C++ has too.
    @TaskLocal static var outer: Device?

    /// Calls `body` with `device` as the default device of C++ too. C++ has one of its own for all threads, the GPU, which Swift's does not
    /// change. `vjp` runs three things on it: the copies of evaluated inputs (MLX 0.32.2, transforms.cpp:33), gradients that are 0 (:550),
    /// and the subtraction in softmax's derivative (primitives.cpp:5419). `compile` fuses nothing on iOS while it is the CPU.
    static func withGlobal<R>(_ device: Device, _ body: () throws -> R) rethrows -> R {
        let own = Device.self as any GlobalDevice.Type
        own.setGlobal(device)
        defer { own.setGlobal(.outer ?? .defaultDevice()) }
        return try body()
    }
}

/// Only a deprecated function sets C++'s device, so it is called through a protocol.
private protocol GlobalDevice {
    static func setGlobal(_ device: Device)
}

extension Device: GlobalDevice {
    @available(*, deprecated) fileprivate static func setGlobal(_ device: Device) { setDefault(device: device) }
}
