import Foundation
import MeSPFiles
import MeSPSentences

#if canImport(Metal) && !targetEnvironment(simulator)
    import Metal
#endif

/// The neural accelerators of the GPUs of A19, M5 and later chips.
///
/// MLX multiplies 16-bit matrices on them, whatever `MLX_ENABLE_TF32` says. Until a self-check has passed on the device, `hide` tells MLX that
/// the GPU is of the generation before, so it takes other kernels. MLX reads the name when it makes its device.
package final class NeuralAccelerators: @unchecked Sendable {
    /// The device's, for this process.
    package static let current = NeuralAccelerators(
        architecture: systemArchitecture, system: ProcessInfo.processInfo.operatingSystemVersion,
        record: supportFolder.appendingPathComponent("MeSP/neural-accelerators"))

    package enum State: String, Sendable {
        /// The GPU has none, the system gives MLX none, or the environment names an architecture.
        case absent
        /// No self-check has passed.
        case off
        /// A self-check uses them.
        case checking
        /// A self-check used them and has not passed. MLX keeps them until the process ends.
        case failed
        /// A self-check has passed.
        case on
    }

    /// The variable of the environment that names the GPU's architecture to MLX (utils.h; device.cpp reads it in `Device::Device`).
    static let variable = "MLX_METAL_GPU_ARCH"

    private let architecture: String
    /// The file with a line for what has passed a self-check.
    private let record: URL
    private let lock = NSLock()
    private var present: State  // under the lock

    /// - Parameters:
    ///   - architecture: the GPU's, as Metal names it; nil where there is none.
    ///   - system: the version of the operating system.
    ///   - record: the file with what has passed a self-check.
    init(architecture: String?, system: OperatingSystemVersion, record: URL) {
        (self.architecture, self.record) = (architecture ?? "", record)
        guard Self.areUsed(of: self.architecture, system), getenv(Self.variable) == nil else {
            present = .absent
            return
        }
        let passed = regularFile(record).map { String(decoding: $0, as: UTF8.self) }
        present = passed == Self.line(self.architecture) ? .on : .off
    }

    /// Names the generation before to MLX, where no self-check has passed. To be called before anything in the process has used MLX.
    func hide() {
        lock.withLock { if present == .off { setenv(Self.variable, Self.generationBefore(architecture), 1) } }
    }

    package var state: State { lock.withLock { present } }

    /// Why work on the GPU is refused in this process; nil where it is not.
    package var refusal: Sentence? {
        state == .failed
            ? "The self-check of this GPU's neural accelerators did not pass, and MLX uses them until the process ends; restart the app or the command, which then works without them."
            : nil
    }

    /// Lets MLX use them. To be called by a self-check before anything in the process has used MLX.
    package func beginCheck() {
        lock.withLock {
            guard present == .off else { return }
            unsetenv(Self.variable)
            present = .checking
        }
    }

    /// Ends what `beginCheck` began, and records for later processes that the check has passed.
    package func endCheck(hasPassed: Bool) {
        lock.withLock {
            guard present == .checking else { return }
            present = hasPassed ? .on : .failed
            guard hasPassed else { return }
            // Without the record the next process goes on without them.
            try? FileManager.default.createDirectory(
                at: record.deletingLastPathComponent(), withIntermediateDirectories: true)
            try? Data(Self.line(architecture).utf8).write(to: record, options: .atomic)
        }
    }

    /// The record's line: the system compiles the kernels, and MLX has their sources.
    private static func line(_ architecture: String) -> String {
        "\(architecture) \(ProcessInfo.processInfo.operatingSystemVersionString) MLX \(MLXSupport.version)\n"
    }

    /// Whether MLX uses the neural accelerators of a GPU, as device.cpp's `is_nax_available` has it.
    private static func areUsed(of architecture: String, _ system: OperatingSystemVersion) -> Bool {
        guard let (generation, kind) = parts(of: architecture) else { return false }
        return (system.majorVersion, system.minorVersion) >= (26, 2) && generation >= firstGeneration(kind)
    }

    /// The first generation with neural accelerators: A19's of the GPUs whose names end in p, M5's of the others.
    private static func firstGeneration(_ kind: Character) -> Int { kind == "p" ? 18 : 17 }

    /// The name of the last generation without neural accelerators.
    private static func generationBefore(_ architecture: String) -> String {
        guard let (_, kind) = parts(of: architecture) else { return architecture }
        return architecture.dropLast(3) + "\(firstGeneration(kind) - 1)\(kind)"
    }

    /// The parts of a name like `applegpu_g18p`: the generation, two digits before the last character, and that character.
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
