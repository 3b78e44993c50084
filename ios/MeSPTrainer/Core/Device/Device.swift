import Foundation
import MLX
import MeSPBundle
import MeSPSentences

extension ModelBundle {
    package var mlxDevice: Device { Device(device == .cpu || Device.gpuIsSimulated ? .cpu : .gpu) }

    /// - Throws: the errors of `body` and of MLX; `MeSPError` if the machine lacks the device or MLX cannot use it.
    package func withDevice<R>(_ body: () throws -> R) throws -> R {
        if let refusal = device.refusal { throw MeSPError(refusal, .unsupportedDevice) }
        _ = firstUseOfMLX
        guard device == .cpu || Device.gpuIsSimulated || !Device.isCPU else {
            throw MeSPError("This machine has no GPU that MLX can use; choose the device cpu.", .unsupportedDevice)
        }
        return try MLXWork.run(on: mlxDevice, as: backend) {
            try device == .cpu ? MetalMemory.withSmallCache(body) : body()
        }
    }
}

extension Device {
    /// Whether the CPU does the GPU's work, in tests on a machine without a GPU. It changes only while no work with MLX is in progress.
    package nonisolated(unsafe) static var gpuIsSimulated = false

    static var isCPU: Bool { defaultDevice().deviceType == .cpu }

    /// The default device before the outermost `MLXWork.run`; nil outside of `MLXWork.run`.
    @TaskLocal static var outer: Device?

    /// Calls `body` with `device` as C++'s default device too. C++ has a default of its own, which Swift's default does not change. On iOS,
    /// `compile` fuses nothing while C++'s default is the CPU.
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
