import Foundation
import MeSPFiles
import MeSPSentences

#if canImport(Metal) && !targetEnvironment(simulator)
    import Metal
#endif

/// The neural accelerators of the GPUs of A19, M5 and later chips.
///
/// MLX multiplies 16-bit matrices on the neural accelerators regardless of `MLX_ENABLE_TF32`. Until a self-check has passed on the device, `hide`
/// gives MLX the name of the last GPU generation without neural accelerators, so that MLX uses other kernels. MLX reads this name when it creates its
/// device.
package final class NeuralAccelerators: @unchecked Sendable {
    /// The neural accelerators of this device, as this process uses them.
    package static let current = NeuralAccelerators(
        architecture: systemArchitecture, system: ProcessInfo.processInfo.operatingSystemVersion,
        record: supportFolder.appendingPathComponent("MeSP/neural-accelerators"))

    package enum State: String, Sendable {
        /// The GPU has no neural accelerators, the system is too old for MLX to use them, or the environment names an architecture.
        case absent
        /// No self-check has passed.
        case off
        /// A self-check uses them.
        case checking
        /// A self-check that used the neural accelerators has failed. MLX uses them until the process ends.
        case failed
        /// A self-check has passed.
        case on
    }

    /// The environment variable that gives MLX the name of the GPU's architecture (utils.h; device.cpp reads it in `Device::Device`).
    static let variable = "MLX_METAL_GPU_ARCH"

    private let architecture: String
    /// The file that records the last passed self-check, in one line.
    private let record: URL
    private let lock = NSLock()
    private var present: State  // guarded by the lock

    /// - Parameters:
    ///   - architecture: the architecture of the GPU, as Metal names it; nil if there is none.
    ///   - system: the version of the operating system.
    ///   - record: the file that records the last passed self-check.
    init(architecture: String?, system: OperatingSystemVersion, record: URL) {
        (self.architecture, self.record) = (architecture ?? "", record)
        guard Self.areUsed(of: self.architecture, system), getenv(Self.variable) == nil else {
            present = .absent
            return
        }
        let passed = regularFile(record).map { String(decoding: $0, as: UTF8.self) }
        present = passed == Self.line(self.architecture) ? .on : .off
    }

    /// Gives MLX the name of the last generation without neural accelerators, unless a self-check has passed. Call it before the first use of MLX in
    /// the process.
    func hide() {
        lock.withLock { if present == .off { setenv(Self.variable, Self.generationBefore(architecture), 1) } }
    }

    package var state: State { lock.withLock { present } }

    /// The reason why work on the GPU is refused in this process; nil if such work is allowed.
    package var refusal: Sentence? {
        state == .failed
            ? "The self-check of this GPU's neural accelerators did not pass, and MLX uses them until the process ends; restart the app or the command, which then works without them."
            : nil
    }

    /// Lets MLX use the neural accelerators for a self-check. Call it before the first use of MLX in the process.
    package func beginCheck() {
        lock.withLock {
            guard present == .off else { return }
            unsetenv(Self.variable)
            present = .checking
        }
    }

    /// Ends the check that `beginCheck` began, and records for later processes whether it has passed.
    package func endCheck(hasPassed: Bool) {
        lock.withLock {
            guard present == .checking else { return }
            present = hasPassed ? .on : .failed
            guard hasPassed else { return }
            // If the record cannot be written, the next process does not use the neural accelerators.
            try? FileManager.default.createDirectory(
                at: record.deletingLastPathComponent(), withIntermediateDirectories: true)
            try? Data(Self.line(architecture).utf8).write(to: record, options: .atomic)
        }
    }

    /// Returns the line of the record. The line names the versions of the system, which compiles the kernels, and of MLX, which has the sources of
    /// the kernels.
    private static func line(_ architecture: String) -> String {
        "\(architecture) \(ProcessInfo.processInfo.operatingSystemVersionString) MLX \(MLXSupport.version)\n"
    }

    /// Returns whether MLX uses the neural accelerators of a GPU, as `is_nax_available` in device.cpp does.
    private static func areUsed(of architecture: String, _ system: OperatingSystemVersion) -> Bool {
        guard let (generation, kind) = parts(of: architecture) else { return false }
        return (system.majorVersion, system.minorVersion) >= (26, 2) && generation >= firstGeneration(kind)
    }

    /// Returns the first generation with neural accelerators: that of A19 for GPUs whose names end in p, and that of M5 for all other GPUs.
    private static func firstGeneration(_ kind: Character) -> Int { kind == "p" ? 18 : 17 }

    /// Returns the name of the last generation without neural accelerators.
    private static func generationBefore(_ architecture: String) -> String {
        guard let (_, kind) = parts(of: architecture) else { return architecture }
        return architecture.dropLast(3) + "\(firstGeneration(kind) - 1)\(kind)"
    }

    /// Returns the parts of a name such as `applegpu_g18p`: the generation, which is two digits, and the last character.
    private static func parts(of architecture: String) -> (generation: Int, kind: Character)? {
        guard let kind = architecture.last, let generation = Int(architecture.dropLast().suffix(2)) else { return nil }
        return (generation, kind)
    }

    private static var supportFolder: URL {
        let files = FileManager.default
        return files.urls(for: .applicationSupportDirectory, in: .userDomainMask).first ?? files.temporaryDirectory
    }

    private static var systemArchitecture: String? {
        #if canImport(Metal) && !targetEnvironment(simulator)
            MTLCreateSystemDefaultDevice()?.architecture.name
        #else
            nil
        #endif
    }
}
