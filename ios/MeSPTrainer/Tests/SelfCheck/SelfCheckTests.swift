import Foundation
import MLX
import Testing

@testable import MeSPCore

@Suite(.serialized) struct SelfCheckTests {
    private func settings(_ folder: URL? = Fixture.tied) throws -> SelfCheck.Settings {
        let bundle = try #require(folder).appendingPathComponent("bundle.mesp")
        var settings = SelfCheck.Settings(bundle: bundle.path)
        (settings.repeats, settings.seconds) = (3, 0.02)
        return settings
    }

    private func bench(
        _ settings: SelfCheck.Settings, tamper: @escaping (_ check: String, MLXArray) -> MLXArray = { $1 }
    ) throws -> Bench {
        Bench(bundle: try ModelBundle(url: URL(fileURLWithPath: settings.bundle)), settings: settings, tamper: tamper)
    }

    private func result(_ name: String, _ bench: Bench) throws -> SelfCheckReport.Check {
        try SelfCheck.result(try #require(bench.checks.first { $0.name == name }), bench.bundle)
    }

    @Test func everyCheckRunsAndNoneFails() throws {
        var settings = try settings()
        settings.minutes = 0.001
        var (names, lines, ended) = ([String](), [SelfCheckReport.Check](), false)
        let report = try SelfCheck(settings).run(report: { record in
            switch record {
            case .start(let start): names = start.names
            case .check(let check): lines.append(check)
            case .end: ended = true
            }
        })
        #expect(ended && lines.map(\.name) == names && report.checks.map(\.name) == names)
        let lengths = try ModelBundle(url: URL(fileURLWithPath: settings.bundle)).manifest.seqLens
        let all =
            [
                "machine", "gpu", "map.no_copy", "map.footprint", "map.first_use", "eval.empty", "kernel.dependent",
                "buffer.new", "memory.bandwidth", "product.transposed", "product.plain", "product.dequantized",
                "block.outputs", "gradients.cpu", "gradients.mebp", "head.few_targets", "repeats", "resume",
                "decode.attention", "decode.gated_delta_net", "decode.short_convolution",
            ] + lengths.flatMap { ["peak.\($0)", "time.\($0)"] } + ["throttling"]
        #expect(Set(names) == Set(all) && names.count == all.count)
        for line in lines {
            #expect(line.verdict != .fail, "\(line.name): \(line.sentence.english)")
            #expect((line.verdict == .skipped) == (line.name == "gpu"), "\(line.name): \(line.sentence.english)")
            #expect(line.verdict == .skipped || !line.measured.isEmpty, "\(line.name)")
            #expect(line.measured.allSatisfy { $0.value != nil }, "\(line.name): \(line.measured)")
        }
        let end = try #require(report.end)
        #expect(end.verdict == .pass)
        let c = end.constants
        for constant in [c.bytesPerSecond, c.flopsPerSecond] { #expect(try #require(constant) > 0) }
        for constant in [c.evalSeconds, c.kernelSeconds, c.newBufferSeconds, c.mapSeconds] {
            #expect(try #require(constant) >= 0)
        }
        let json = try JSONSerialization.jsonObject(with: report.json) as? [String: Any]
        #expect((json?["checks"] as? [[String: Any]])?.compactMap { $0["verdict"] as? String }.count == all.count)
    }

    /// Families with norms of other places, several modules in one, biases; and activations in bfloat16.
    @Test(arguments: (Fixture.cases + Fixture.roundedCases).filter { !Fixture.noisyCases.contains($0) })
    func everyBundleFollowsTheFormulas(_ folder: URL) throws {
        let bench = try bench(settings(folder))
        for name in ["block.outputs", "gradients.cpu", "head.few_targets"] {
            let result = try result(name, bench)
            #expect(result.verdict == .pass, "\(name): \(result.sentence.english)")
        }
    }

    @Test(arguments: [
        "map.no_copy", "block.outputs", "gradients.cpu", "gradients.mebp", "head.few_targets", "repeats", "resume",
        "decode.attention", "decode.gated_delta_net", "decode.short_convolution",
    ])
    func anErrorIsFound(_ name: String) throws {
        // One part in a thousand of one number is enough for what must be equal, and the smallest error that counts for the rest.
        let faulty = try bench(settings()) { check, array in
            guard check == name else { return array }
            return array.dtype == .uint32 ? array + MLXArray(UInt32(0)) : array * 1.001
        }
        let found = try result(name, faulty)
        #expect(found.verdict == .fail, "\(found.sentence.english)")
        #expect(try result(name, bench(settings())).verdict == .pass)
    }

    @Test func whatIsNotANumberFails() throws {
        let faulty = try bench(settings()) { $0 == "gradients.cpu" ? $1 * Float.nan : $1 }
        let found = try result("gradients.cpu", faulty)
        #expect(found.verdict == .fail && found.sentence.english.contains("not finite"))
        #expect(found.measured.contains { $0.value == nil })
        _ = try JSONEncoder().encode(found)
    }

    @Test func aCopyShowsInTheFootprint() {
        #expect(Bench.verdict(footprintOfMap: 100_000_000, size: 100_000_000) == .fail)
        #expect(Bench.verdict(footprintOfMap: 30_000, size: 100_000_000) == .pass)
        #expect(Bench.verdict(footprintOfMap: 300_000, size: 300_000) == .note, "too small a file to tell")
    }

    @Test func aCheckThatThrowsIsALineThatFails() throws {
        let bench = try bench(settings())
        let failing = Bench.Check(name: "x") { throw MeSPError("It broke.") }
        let result = try SelfCheck.result(failing, bench.bundle)
        #expect(result.verdict == .fail && result.sentence == "It broke.")
        let skipped = Bench.Check(name: "x") { throw Skipped(reason: "Not here.") }
        #expect(try SelfCheck.result(skipped, bench.bundle).verdict == .skipped)
    }

    @Test func stoppingEndsIt() throws {
        // How many boundaries there are before depends on the machine's speed, and a step that has changed parameters goes on.
        var (boundaries, checks) = (0, 0)
        #expect(throws: CancellationError.self) {
            try SelfCheck(settings()).run(
                atBlock: {
                    boundaries += 1
                    if boundaries >= 40 { throw CancellationError() }
                },
                report: { if case .check = $0 { checks += boundaries >= 40 ? 1 : 0 } })
        }
        #expect(boundaries >= 40 && checks <= 1, "the check at most that was running")
    }

    @Test func settingsAreChecked() throws {
        let file = temporaryFolder()
        defer { try? FileManager.default.removeItem(at: file) }
        func read(_ json: String) throws -> SelfCheck.Settings {
            try Data(json.utf8).write(to: file)
            return try SelfCheck.Settings(contentsOf: file)
        }
        #expect(try read(#"{"bundle": "a", "repeats": 7}"#).repeats == 7)
        #expect(message { _ = try read("{}") }.hasSuffix("is not valid: bundle is missing."))
        for json in [#""repeats": 0"#, #""seconds": 0"#, #""minutes": -1"#] {
            let settings = try read(#"{"bundle": "a", "# + json + "}")
            #expect(message { try SelfCheck(settings).run() }.contains("must be"))
        }
        #expect(message { try SelfCheck(.init(bundle: "/nowhere")).run() }.contains("is not a bundle"))
    }
}
