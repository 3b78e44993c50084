import Foundation
import MLX
import MeSPBundle

extension ModelBundle {
    /// The device that the functions were exported for, and that everything runs on.
    package var device: Device { manifest.device == .cpu ? .cpu : .gpu }

    /// Calls `body` with the bundle's device as MLX's default. An error in MLX, which ends the process elsewhere, is thrown.
    ///
    /// - Throws: `MeSPError`, also where the device is not there, or MLX cannot use it.
    package func withDevice<R>(_ body: () throws -> R) throws -> R {
        if let refusal = MLXSupport.refusal ?? (manifest.device == .gpu ? MLXSupport.gpuRefusal : nil) {
            throw MeSPError(refusal)
        }
        _ = firstUseOfMLX
        guard manifest.device == .cpu || !Device.isCPU else {
            throw MeSPError(
                "\(url.path) was exported for a GPU and this machine has none that MLX can use; export it again with --device cpu."
            )
        }
        // Naming the device is the first thing that can fail.
        return try MLXErrors.collect {
            try Device.withDefaultDevice(device) {
                try manifest.device == .cpu ? MetalMemory.withSmallCache(body) : body()
            }
        }
    }
}

extension Device {
    /// Whether MLX computes on a CPU now. In tests it does so the GPU's way too.
    static var isCPU: Bool { defaultDevice().deviceType == .cpu }

    /// C++ has a default device of its own, the GPU, which Swift's does not change. `vjp` runs two operations on it: the copies of its
    /// inputs (transforms.cpp:337), and the subtraction in softmax's derivative (primitives.cpp:5049).
    /// - Returns: what it was before
    @discardableResult static func replaceGlobal(by device: Device) -> Device {
        let global = Device.self as any GlobalDevice.Type
        defer { global.setGlobal(device) }
        return global.global
    }
}

/// Only deprecated functions read and set C++'s device, so they are called through a protocol.
private protocol GlobalDevice {
    static var global: Device { get }
    static func setGlobal(_ device: Device)
}

extension Device: GlobalDevice {
    @available(*, deprecated) fileprivate static var global: Device { Device() }
    @available(*, deprecated) fileprivate static func setGlobal(_ device: Device) { setDefault(device: device) }
}
