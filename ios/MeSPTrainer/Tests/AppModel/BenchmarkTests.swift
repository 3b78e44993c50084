import Foundation
import Testing

@testable import MeSPAppModel
@testable import MeSPControl
@testable import MeSPCore

@Suite(.serialized) @MainActor final class BenchmarkTests {
    private let folder = temporaryFolder()

    private func settings() throws -> RunSettings {
        var settings = RunSettings(bundle: try tiedBundle().path, output: "")
        settings.usePaperUpdate()
        (settings.seqLen, settings.steps) = (32, 2)
        return settings
    }

    @Test func measuresTheThreeMethods() async throws {
        let benchmark = Benchmark(controller: RunController(monitor: TestMonitor()))
        await benchmark.run(try settings()) { folder.appendingPathComponent($0.rawValue) }
        #expect(benchmark.problem == nil && benchmark.running == nil)
        #expect(benchmark.rows.map(\.method) == [.mesp, .mebp, .mezo])
        for row in benchmark.rows {
            #expect(row.steps == 2 && row.seconds > 0 && row.footprintPeakBytes > 0 && row.predictedPeakBytes > 0)
            #expect(row.paperBytes == nil, "the paper has no such model")
        }
        #expect(benchmark.rows[1].timeOfMebp == 1)
        #expect(benchmark.rows.allSatisfy { $0.timeOfMebp != nil })

        let json = try JSONSerialization.jsonObject(with: benchmark.json) as? [String: [[String: Any]]]
        #expect(json?["rows"]?.compactMap { $0["method"] as? String } == ["mesp", "mebp", "mezo"])
        let lines = benchmark.csv.components(separatedBy: "\r\n")
        #expect(lines.count == 5 && lines[4].isEmpty)
        #expect(lines[0].hasPrefix("model,method,seq_len") && lines[1].contains(",mesp,32,8,2,"))
    }

    @Test func hasThePapersFiguresBeside() throws {
        var log = LogSummary()
        log.append(
            .start(
                .init(
                    version: "", mlxVersion: "", device: .gpu, host: "iPhone18,1",
                    model: .init(name: "Qwen2.5-0.5B-Instruct", id: "", layers: 24), settings: try settings())))
        log.append(
            .plan(
                Plan(tileBytes: 0),
                .init(
                    method: .mesp, seqLen: 256, rank: 8, predictedPeakBytes: 1, leastPeakBytes: 1, mappedBytes: 1)))
        for (step, state) in ["fair", "serious", "nominal"].enumerated() {
            log.append(.step(.ofATest(step + 1, seconds: Double(step), thermalState: state)))
        }
        log.append(.end(.init(reason: .finished, step: 3, seconds: 3, footprintPeakBytes: 7)))
        let row = try #require(Benchmark.Row(log, before: 8))
        #expect(row.paperBytes == 136_200_000 && row.paperTimeOfMebp == 1.28)
        #expect(row.seconds == 1 && row.thermalState == "serious" && row.footprintPeakBytes == 7)
    }

    @Test func endsWithASentenceWhereAMethodFails() async throws {
        let benchmark = Benchmark(controller: RunController(monitor: TestMonitor()))
        var settings = try settings()
        settings.rank = 1 << 20
        await benchmark.run(settings) { folder.appendingPathComponent($0.rawValue) }
        #expect(benchmark.rows.isEmpty)
        #expect(benchmark.problem?.english.hasPrefix("The rank is 1048576") == true)
    }

    @Test func cancellingEndsIt() async throws {
        let controller = RunController(monitor: TestMonitor())
        let benchmark = Benchmark(controller: controller)
        var settings = try settings()
        settings.steps = 1_000_000
        let (folder, unending) = (folder, settings)
        let task = Task { await benchmark.run(unending) { folder.appendingPathComponent($0.rawValue) } }
        while controller.log.steps.isEmpty { try await Task.sleep(for: .milliseconds(5)) }
        task.cancel()
        await task.value
        #expect(benchmark.rows.isEmpty && benchmark.problem == nil && benchmark.running == nil)
    }
}
