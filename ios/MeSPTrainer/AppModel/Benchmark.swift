import Foundation
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPFiles
import MeSPSentences
import Observation

@MainActor @Observable public final class Benchmark {
    public struct Row: Codable, Sendable, Equatable, Identifiable {
        public var model: String
        public var method: GradientMethod
        public var seqLen: Int
        public var rank: Int
        public var steps: Int
        package var host: String
        public var device: Backend
        /// The upper median of the durations of the last 20 steps, in seconds.
        public var seconds: Double
        public var timeOfMebp: Double?
        public var footprintPeakBytes: Int
        public var footprintBeforeBytes: Int
        package var mlxPeakBytes: Int
        public var predictedPeakBytes: Int
        /// The peak memory in bytes that the paper gives for MeSP on an iPhone 17 Pro. It is nil for other methods, and if the paper has no figure
        /// for this model, sequence length and rank.
        public var paperBytes: Int?
        public var paperTimeOfMebp: Double?
        public var thermalState: String

        public var id: GradientMethod { method }
    }

    package static let methods: [GradientMethod] = [.mesp, .mebp, .mezo]

    public private(set) var rows = [Row]()
    public private(set) var running: GradientMethod?
    public private(set) var problem: Sentence?

    @ObservationIgnored private let controller: RunController

    public init(controller: RunController) { self.controller = controller }

    /// Measures the methods one after another, without validation and saved states. Cancelling the task keeps the finished rows.
    ///
    /// - Parameters:
    ///   - settings: the settings of every run. The method, the output folder, `valBatches` and `saveEvery` are replaced.
    public func run(_ settings: RunSettings, folder: (GradientMethod) -> URL) async {
        guard running == nil else { return }
        (rows, problem) = ([], nil)
        defer { running = nil }
        for method in Self.methods {
            running = method
            var settings = settings
            (settings.method, settings.output) = (method, folder(method).path)
            (settings.valBatches, settings.saveEvery) = (0, 0)
            let before = memoryFootprint()
            do {
                try await controller.run(settings)
            } catch {
                problem = error.plainSentence
                return
            }
            guard controller.log.end?.reason == .finished else { return }
            if let row = Row(controller.log, before: before) { rows.append(row) }
            let mebp = rows.first { $0.method == .mebp }?.seconds
            for index in rows.indices { rows[index].timeOfMebp = mebp.map { rows[index].seconds / $0 } }
        }
    }

    public var json: Data {
        get throws {
            let encoder = JSONEncoder.snakeCase
            encoder.outputFormatting = [.prettyPrinted, .sortedKeys, .withoutEscapingSlashes]
            return try encoder.encode(["rows": rows])
        }
    }

    /// The rows as CSV (RFC 4180), with a header line.
    public var csv: String {
        let names = [
            "model", "method", "seq_len", "rank", "steps", "host", "device", "seconds", "time_of_mebp",
            "footprint_peak_bytes", "footprint_before_bytes", "mlx_peak_bytes", "predicted_peak_bytes", "paper_bytes",
            "paper_time_of_mebp", "thermal_state",
        ]
        func number(_ value: Double?) -> String { value.map { String(format: "%.3f", $0) } ?? "" }
        func quoted(_ text: String) -> String { "\"" + text.replacingOccurrences(of: "\"", with: "\"\"") + "\"" }
        let lines = rows.map {
            [
                quoted($0.model), $0.method.rawValue, "\($0.seqLen)", "\($0.rank)", "\($0.steps)", quoted($0.host),
                $0.device.rawValue, number($0.seconds), number($0.timeOfMebp), "\($0.footprintPeakBytes)",
                "\($0.footprintBeforeBytes)", "\($0.mlxPeakBytes)", "\($0.predictedPeakBytes)",
                $0.paperBytes.map { "\($0)" } ?? "", number($0.paperTimeOfMebp), $0.thermalState,
            ].joined(separator: ",")
        }
        return ([names.joined(separator: ",")] + lines).map { $0 + "\r\n" }.joined()
    }
}

extension Benchmark.Row {
    init?(_ log: LogSummary, before: Int) {
        guard let start = log.start, let plan = log.prediction, let seconds = log.stepSeconds, let end = log.end else {
            return nil
        }
        let states = ThermalState.allCases.map(\.rawValue)
        let paper = PaperFigures.figures.flatMap { plan.method == .mesp && plan.rank == $0.rank ? $0 : nil }
        let model = start.model.name.replacingOccurrences(of: "-Instruct", with: "")
        self.init(
            model: start.model.name, method: plan.method, seqLen: plan.seqLen, rank: plan.rank, steps: log.steps.count,
            host: start.host, device: start.device, seconds: seconds, footprintPeakBytes: end.footprintPeakBytes,
            footprintBeforeBytes: before, mlxPeakBytes: log.steps.map(\.mlxPeakBytes).max() ?? 0,
            predictedPeakBytes: plan.predictedPeakBytes,
            paperBytes: paper?.peak(model: model, seqLen: plan.seqLen),
            paperTimeOfMebp: paper.flatMap { $0.has(model: model) ? $0.timeOfMebp : nil },
            thermalState: log.steps.map(\.thermalState)
                .max { (states.firstIndex(of: $0) ?? 0) < (states.firstIndex(of: $1) ?? 0) } ?? "nominal")
    }
}
