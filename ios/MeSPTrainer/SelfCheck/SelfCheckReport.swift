import Foundation
import MeSPBundle
import MeSPCore
import MeSPFiles
import MeSPSentences

public struct SelfCheckReport: Codable, Sendable {
    package var start: Start
    public var checks = [Check]()
    package var end: End?

    package struct Start: Codable, Sendable {
        package var version: String
        package var mlxVersion: String
        package var host: String
        package var gpu: String?
        package var gpuArchitecture: String?
        package var bundle: String
        package var device: String
        package var dtype: String
        /// The state of the GPU's neural accelerators: `absent`, `off`, `checking`, `failed` or `on`.
        package var neuralAccelerators: String
        package var settings: SelfCheck.Settings
        package var names: [String]
    }

    public struct Check: Codable, Sendable, Identifiable {
        public var name: String
        public var verdict: Verdict
        public var sentence: Sentence
        package var measured: [Measurement]
        package var seconds: Double

        public var id: String { name }
    }

    public enum Verdict: String, Codable, Sendable, CaseIterable {
        case pass, fail
        /// A measurement without a pass or a failure.
        case note
        case skipped
    }

    package struct Measurement: Codable, Sendable, Equatable {
        package var name: String
        package var value: Double?
        /// The unit: `s`, `bytes`, `bytes/s`, `FLOP/s`, or empty for a plain number.
        package var unit: String

        init(_ name: String, _ value: Double, _ unit: String = "") {
            (self.name, self.value, self.unit) = (name, value.isFinite ? value : nil, unit)
        }
    }

    /// The measured constants. A constant is nil if it was not measured. All except `metalBytes` predict the time of a step:
    ///
    ///     seconds = evals · evalSeconds + kernels · kernelSeconds + new buffers · newBufferSeconds + maps · mapSeconds
    ///               + bytes / bytesPerSecond + FLOP / flopsPerSecond
    package struct Constants: Codable, Sendable, Equatable {
        package var evalSeconds: Double?
        /// The time of a kernel that waits for another kernel.
        package var kernelSeconds: Double?
        /// The time to allocate a new buffer of 1 MiB.
        package var newBufferSeconds: Double?
        /// The additional time of the first use of a map of a block's file, including the mapping.
        package var mapSeconds: Double?
        /// The rate of reading plus writing memory.
        package var bytesPerSecond: Double?
        /// The growth of the footprint by the first use of MLX and the first steps, without arrays, in bytes.
        package var metalBytes: Double?
        /// The rate of the products that training uses: the lowest rate among the forms of product, each with its fastest number of rows of W.
        package var flopsPerSecond: Double?
    }

    package struct End: Codable, Sendable {
        package var verdict: Verdict
        package var constants: Constants
        package var seconds: Double
    }

    package var json: Data {
        get throws {
            let encoder = JSONEncoder.snakeCase
            encoder.outputFormatting = [.prettyPrinted, .sortedKeys, .withoutEscapingSlashes]
            return try encoder.encode(self)
        }
    }
}

extension SelfCheckReport {
    static let (metalFootprint, afterStep) = ("metal.footprint", "after the first step")

    /// Makes plans use the latest measurements of Metal's memory in a folder of reports. Ignores reports of another machine or another version of
    /// MLX.
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
