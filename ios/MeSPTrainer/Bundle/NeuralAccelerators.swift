import Foundation
import MeSPFiles
import MeSPSentences

#if canImport(Metal) && !targetEnvironment(simulator)
    import Metal
#endif

/// The neural accelerators in the GPUs of A19, M5 and later chips.
///
/// From system version 26.2 on, MLX uses them for matrix products. Until a self-check has passed on the device, `hide` gives MLX the name of an older
/// GPU generation, so that MLX uses other kernels.
package final class NeuralAccelerators: @unchecked Sendable {
    package static let current = NeuralAccelerators(
        architecture: systemArchitecture, system: ProcessInfo.processInfo.operatingSystemVersion,
        record: .inSupport("neural-accelerators"))

    package enum State: String, Sendable {
        /// MLX does not use neural accelerators here, or the environment sets the GPU's architecture.
        case absent
        case off
        case checking
        /// A self-check has failed. MLX uses the neural accelerators until the process ends.
        case failed
        case on
    }

    static let variable = "MLX_METAL_GPU_ARCH"

    private let architecture: String
    private let record: URL
    private let lock = NSLock()
    private var present: State  // guarded by the lock

    init(architecture: String?, system: OperatingSystemVersion, record: URL) {
        (self.architecture, self.record) = (architecture ?? "", record)
        guard Self.areUsed(of: self.architecture, system), getenv(Self.variable) == nil else {
            present = .absent
            return
        }
        let passed = regularFile(record).map { String(decoding: $0, as: UTF8.self) }
        present = passed == Self.line(self.architecture) ? .on : .off
    }

    /// Hides the neural accelerators from MLX if the state is `off`. Call this before the first use of MLX.
    func hide() {
        lock.withLock { if present == .off { setenv(Self.variable, Self.generationBefore(architecture), 1) } }
    }

    package var state: State { lock.withLock { present } }

    package var refusal: Sentence? {
        state == .failed
            ? "The self-check of this GPU's neural accelerators did not pass, and MLX uses them until the process ends; restart the app or the command, which then works without them."
            : nil
    }

    /// Lets MLX use the neural accelerators for a self-check. Call this before the first use of MLX.
    package func beginCheck() {
        lock.withLock {
            guard present == .off else { return }
            unsetenv(Self.variable)
            present = .checking
        }
    }

    package func endCheck(hasPassed: Bool) {
        lock.withLock {
            guard present == .checking else { return }
            present = hasPassed ? .on : .failed
            guard hasPassed else { return }
            // Without a record, the next process hides the neural accelerators again, so a failure to write is harmless.
            try? FileManager.default.createDirectory(
                at: record.deletingLastPathComponent(), withIntermediateDirectories: true)
            try? Data(Self.line(architecture).utf8).write(to: record, options: .atomic)
        }
    }

    /// Returns the record's contents. A new version of the system or of MLX may have other kernels, so it needs a new self-check.
    private static func line(_ architecture: String) -> String {
        "\(architecture) \(ProcessInfo.processInfo.operatingSystemVersionString) MLX \(MLXSupport.version)\n"
    }

    /// Returns whether MLX uses the GPU's neural accelerators, as `is_nax_available` in MLX's device.cpp does.
    private static func areUsed(of architecture: String, _ system: OperatingSystemVersion) -> Bool {
        guard let (generation, kind) = parts(of: architecture) else { return false }
        return (system.majorVersion, system.minorVersion) >= (26, 2) && generation >= firstGeneration(kind)
    }

    /// Returns the first GPU generation with neural accelerators: A19's for names ending in p, and M5's for others.
    private static func firstGeneration(_ kind: Character) -> Int { kind == "p" ? 18 : 17 }

    private static func generationBefore(_ architecture: String) -> String {
        guard let (_, kind) = parts(of: architecture) else { return architecture }
        return architecture.dropLast(3) + "\(firstGeneration(kind) - 1)\(kind)"
    }

    /// Returns the generation and the last character of a name, such as 18 and `p` for `applegpu_g18p`.
    private static func parts(of architecture: String) -> (generation: Int, kind: Character)? {
        guard let kind = architecture.last, let generation = Int(architecture.dropLast().suffix(2)) else { return nil }
        return (generation, kind)
    }

    private static var systemArchitecture: String? {
        #if canImport(Metal) && !targetEnvironment(simulator)
            MTLCreateSystemDefaultDevice()?.architecture.name
        #else
            nil
        #endif
    }
}
