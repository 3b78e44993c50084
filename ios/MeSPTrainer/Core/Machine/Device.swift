import Foundation
import MLX
import MeSPBundle
import MeSPSentences

extension ModelBundle {
    /// The device that the bundle was exported for.
    package var device: Device { Device(manifest.device == .cpu ? .cpu : .gpu) }

    /// Calls `body` with the bundle's device as MLX's default device.
    ///
    /// - Throws: the errors of `body` and of MLX; `MeSPError` if the machine lacks the device or MLX cannot use it.
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
    static var isCPU: Bool { defaultDevice().deviceType == .cpu }

    /// The default device before the outermost `MLXWork.run`; nil outside of `MLXWork.run`.
    @TaskLocal static var outer: Device?

    /// Calls `body` with `device` as C++'s default device too. C++ has a default of its own, which Swift's default does not change. `vjp` uses C++'s
    /// default for some arrays. On iOS, `compile` fuses nothing while C++'s default is the CPU.
    static func withGlobal<R>(_ device: Device, _ body: () throws -> R) rethrows -> R {
        let own = Device.self as any GlobalDevice.Type
        own.setGlobal(device)
        defer { own.setGlobal(.outer ?? .defaultDevice()) }
        return try body()
    }
}

/// A protocol that calls a deprecated setter without a warning. MLX Swift has no other setter of C++'s default device.
private protocol GlobalDevice {
    static func setGlobal(_ device: Device)
}

extension Device: GlobalDevice {
    @available(*, deprecated) fileprivate static func setGlobal(_ device: Device) { setDefault(device: device) }
}
