import Foundation
import MeSPBundle
import MeSPCore
import MeSPFiles
import MeSPSentences

/// A machine's self-check: one finding a line, and the constants that it measured.
public struct SelfCheckReport: Codable, Sendable {
    /// The machine and the model of the run.
    package var start: Start
    public var checks = [Check]()
    /// nil until every check has run. A report that stays so is of a process that was ended: by the check after the last one here.
    package var end: End?

    package struct Start: Codable, Sendable {
        package var version: String
        package var mlxVersion: String
        /// Machine and system.
        package var host: String
        /// The GPU's name and architecture, as the system has them; nil where MLX's GPU is not Apple's, or there is none.
        package var gpu: String?
        package var gpuArchitecture: String?
        /// The bundle's name.
        package var bundle: String
        /// `cpu` or `gpu`: where the bundle runs.
        package var device: String
        package var dtype: String
        /// How MLX used the GPU's neural accelerators: `absent`, `off` until a self-check has passed, `checking`,
        /// `failed` or `on`.
        package var neuralAccelerators: String
        package var settings: SelfCheck.Settings
        /// The checks to come, in their order.
        package var names: [String]
    }

    /// The result of one check.
    public struct Check: Codable, Sendable, Identifiable {
        public var name: String
        public var verdict: Verdict
        /// The finding, or why the check was left out.
        public var sentence: Sentence
        package var measured: [Measurement]
        /// The time of the check.
        package var seconds: Double

        public var id: String { name }
    }

    public enum Verdict: String, Codable, Sendable, CaseIterable {
        case pass, fail
        /// A measurement, which is neither right nor wrong.
        case note
        case skipped
    }

    package struct Measurement: Codable, Sendable, Equatable {
        package var name: String
        /// nil where it is not finite.
        package var value: Double?
        /// `s`, `bytes`, `bytes/s`, `FLOP/s`, or empty for a number without one.
        package var unit: String

        init(_ name: String, _ value: Double, _ unit: String = "") {
            (self.name, self.value, self.unit) = (name, value.isFinite ? value : nil, unit)
        }
    }

    /// The constants of a model of a step's time, nil where they were not measured:
    ///
    ///     seconds = evals · evalSeconds + kernels · kernelSeconds + new buffers · newBufferSeconds + maps · mapSeconds
    ///               + the larger of  bytes / bytesPerSecond  and  FLOP / flopsPerSecond
    package struct Constants: Codable, Sendable, Equatable {
        /// An `eval`, without its kernels.
        package var evalSeconds: Double?
        /// A kernel that waits for the one before it.
        package var kernelSeconds: Double?
        /// A buffer of 1 MiB that MLX's cache does not have.
        package var newBufferSeconds: Double?
        /// Mapping a block's file, and its first use.
        package var mapSeconds: Double?
        /// Reading and writing memory.
        package var bytesPerSecond: Double?
        /// The memory that MLX adds to the footprint besides its arrays, after a step: on a GPU Metal's libraries, kernels and command
        /// buffers.
        package var metalBytes: Double?
        /// The products that training uses on the device, at the tile where they are fastest: the slower of x Wᵀ and dy W.
        package var flopsPerSecond: Double?
    }

    package struct End: Codable, Sendable {
        /// `fail` where a check failed.
        package var verdict: Verdict
        package var constants: Constants
        package var seconds: Double
    }

    package init(_ start: Start) { self.start = start }

    /// The report as one JSON document, with snake-case keys.
    package var json: Data {
        get throws {
            let encoder = JSONEncoder.snakeCase
            encoder.outputFormatting = [.prettyPrinted, .sortedKeys, .withoutEscapingSlashes]
            return try encoder.encode(self)
        }
    }
}

extension SelfCheckReport {
    /// The name of the check that measures Metal's memory, and of its value after a step.
    static let (metalFootprint, afterStep) = ("metal.footprint", "after the first step")

    /// Has plans count what the newest reports in a folder measured of Metal's memory on this machine with this version of MLX, in place of
    /// an assumption. Files that are no reports are passed over.
    package static func useMeasurements(in folder: URL) {
        let keys: Set<URLResourceKey> = [.contentModificationDateKey]
        let files = try? FileManager.default.contentsOfDirectory(at: folder, includingPropertiesForKeys: Array(keys))
        func date(_ file: URL) -> Date {
            (try? file.resourceValues(forKeys: keys).contentModificationDate) ?? .distantPast
        }
        for file in (files ?? []).sorted(by: { date($0) < date($1) }) where file.pathExtension == "json" {
            guard let json = regularFile(file), json.count < 1 << 20,
                let report = try? JSONDecoder.snakeCase.decode(SelfCheckReport.self, from: json),
                report.start.host == LogRecord.Start.host, report.start.mlxVersion == MLXSupport.version,
                let backend = Backend(rawValue: report.start.device),
                let check = report.checks.first(where: { $0.name == metalFootprint }),
                let bytes = check.measured.first(where: { $0.name == afterStep })?.value, 0...1e9 ~= bytes
            else { continue }
            MetalMemory[backend] = Int(bytes)
        }
    }
}

/// A part of a report, as it comes.
package enum SelfCheckRecord: Sendable {
    case start(SelfCheckReport.Start)
    case check(SelfCheckReport.Check)
    case end(SelfCheckReport.End)
}
