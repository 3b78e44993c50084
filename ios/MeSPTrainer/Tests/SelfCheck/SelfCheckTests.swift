import Foundation
import MLX
import MeSPSentences
import Testing

@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPSelfCheck

@Suite(.serialized) struct SelfCheckTests {
    private func settings(_ folder: URL? = Fixture.tied, bundle: URL? = nil) throws -> SelfCheck.Settings {
        let bundle = try bundle ?? #require(folder).appendingPathComponent("bundle.mesp")
        var settings = SelfCheck.Settings(bundle: bundle.path)
        (settings.repeats, settings.seconds) = (3, 0.02)
        return settings
    }

    private func makeSuite(
        _ settings: SelfCheck.Settings, tamper: @escaping (_ check: String, MLXArray) -> MLXArray = { $1 }
    ) throws -> CheckSuite {
        var bundle = try ModelBundle(url: URL(fileURLWithPath: settings.bundle))
        if settings.bundle.contains("bfloat16") { bundle.dtype = .bfloat16 }
        return CheckSuite(bundle: bundle, settings: settings, tamper: tamper)
    }

    private func result(_ name: String, _ suite: CheckSuite) throws -> SelfCheckReport.Check {
        try SelfCheck.perform(try #require(suite.checks.first { $0.name == name }), suite.bundle)
    }

    @Test func everyCheckRunsAndNoneFails() throws {
        var settings = try settings()
        settings.minutes = 0.001
        _ = firstUseOfMLX  // of another test or of this one
        var reports = [SelfCheckReport]()
        let report = try SelfCheck(settings).run(report: { reports.append($0) })
        let (names, lines) = (report.start.names, report.checks)
        #expect(reports.map(\.checks.count) == Array(0...names.count) + [names.count] && reports.last?.end != nil)
        #expect(lines.map(\.name) == names)
        let lengths = try ModelBundle(url: URL(fileURLWithPath: settings.bundle)).manifest.seqLens
        let all =
            [
                "machine", "gpu", "metal.footprint", "leaving", "errors", "map.no_copy", "map.footprint",
                "map.first_use", "map.leak", "eval.empty", "kernel.dependent",
                "buffer.new", "memory.bandwidth", "product.transposed", "product.plain", "product.dequantized",
                "product.rows", "block.outputs", "gradients.cpu", "gradients.mebp", "gradients.differences", "tf32",
                "head.few_targets",
                "repeats", "resume", "decode.attention", "decode.gated_delta_net", "decode.short_convolution",
                "decode.mamba2",
            ] + lengths.flatMap { ["peak.\($0)", "time.\($0)"] } + ["throttling"]
        #expect(Set(names) == Set(all) && names.count == all.count)
        for line in lines {
            #expect(line.verdict != .fail, "\(line.name): \(line.sentence.english)")
            let isSkipped = ["gpu", "metal.footprint", "leaving", "product.rows"].contains(line.name)
            #expect((line.verdict == .skipped) == isSkipped, "\(line.name): \(line.sentence.english)")
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

    @Test(arguments: (Fixture.cases + Fixture.roundedCases).filter { !Fixture.noisyCases.contains($0) })
    func everyBundleFollowsTheFormulas(_ folder: URL) throws {
        var settings = try settings(folder)
        settings.seconds = 1  // for all of a model's gradients
        let suite = try makeSuite(settings)
        // Blocks with experts have no function, and plain functions are float32. A finite difference can cross a change of the chosen experts.
        let bundle = suite.bundle
        let hasExperts = bundle.architecture.hasExperts
        let skipped = [
            "block.outputs": !bundle.manifest.blocks.contains(where: \.hasFunctions) || bundle.dtype != .float32,
            "gradients.differences": hasExperts,
        ]
        for name in ["block.outputs", "gradients.cpu", "gradients.differences", "head.few_targets"] {
            let result = try result(name, suite)
            let isSkipped = skipped[name] == true
            #expect(result.verdict == (isSkipped ? .skipped : .pass), "\(name): \(result.sentence.english)")
        }
    }

    @Test func checksOfFunctionsAreSkippedWithoutThem() throws {
        let suite = try makeSuite(settings(bundle: copyWithoutFunctions(tiedBundle())))
        for name in ["block.outputs", "gradients.mebp", "gradients.cpu", "repeats", "resume"] {
            let found = try result(name, suite)
            let isSkipped = name == "block.outputs"
            #expect(found.verdict == (isSkipped ? .skipped : .pass), "\(name): \(found.sentence.english)")
        }
    }

    @Test(arguments: [
        "map.no_copy", "block.outputs", "gradients.cpu", "gradients.mebp", "gradients.differences", "head.few_targets",
        "repeats", "resume", "decode.attention", "decode.gated_delta_net", "decode.short_convolution",
        "decode.mamba2",
    ])
    func anErrorIsFound(_ name: String) throws {
        let faulty = try makeSuite(settings()) { check, array in
            guard check == name else { return array }
            return array.dtype == .uint32 ? array + MLXArray(UInt32(0)) : array * 1.001
        }
        let found = try result(name, faulty)
        #expect(found.verdict == .fail, "\(found.sentence.english)")
    }

    @Test(
        arguments: [
            ("hidden_act", "gelu"), ("rms_norm_eps", 0.02), ("attention_scale", 1.01), ("frequencies", 1.1),
            ("rope_scale", 1.01),
        ] as [(String, any Sendable)])
    func aWrongDerivativeIsFound(_ key: String, _ value: any Sendable) throws {
        let changed = try tiedBundle().copy()
        try changed.appendingPathComponent("manifest.json").changeJSON {
            var architecture = try #require($0["architecture"] as? [String: Any])
            if architecture[key] != nil {
                architecture[key] = value
            } else {
                var mixers = try #require(architecture["mixers"] as? [[String: Any]])
                let factor = try #require(value as? Double)
                if let numbers = mixers[0][key] as? [Double] {
                    mixers[0][key] = numbers.map { $0 * factor }
                } else {
                    mixers[0][key] = try #require(mixers[0][key] as? Double) * factor
                }
                architecture["mixers"] = mixers
            }
            $0["architecture"] = architecture
        }
        let suite = try makeSuite(settings())
        let wrong = try ModelBundle(url: changed)
        let check = CheckSuite.Check(name: "gradients.differences") {
            try suite.compareGradientsWithDifferences(of: wrong)
        }
        let result = try SelfCheck.perform(check, suite.bundle)
        #expect(result.verdict == .fail, "\(result.sentence.english)")
    }

    @Test func productsWithTF32AreFound() throws {
        // TF32 keeps 10 fraction bits and rounds to nearest.
        let numbers: [Float] = [1 + 0x1p-10, 1 + 0x1p-11, 1 + 0x1p-11 + 0x1p-23, -3 - 0x1p-10, .infinity]
        let rounded: [Float] = [1 + 0x1p-10, 1, 1 + 0x1p-10, -3, .infinity]
        #expect(TF32.rounded(MLXArray(numbers)).asArray(Float.self) == rounded)

        let before = getenv("MLX_ENABLE_TF32").map { String(cString: $0) }
        defer { if let before { setenv("MLX_ENABLE_TF32", before, 1) } else { unsetenv("MLX_ENABLE_TF32") } }
        let withTF32 = try makeSuite(settings()) { $0 == "tf32" ? TF32.rounded($1) : $1 }
        for (setting, verdict) in [("1", SelfCheckReport.Verdict.note), ("0", .fail)] {
            setenv("MLX_ENABLE_TF32", setting, 1)
            let found = try result("tf32", withTF32)
            #expect(found.verdict == verdict, "\(found.sentence.english)")
            #expect(found.measured.first { $0.name == "in force" }?.value == 1)
            #expect(try result("tf32", makeSuite(settings())).verdict == .pass)
        }
    }

    @Test(arguments: [Fixture.tied].compactMap { $0 } + Fixture.cases.filter { $0.path.hasSuffix("qwen3_5") })
    func eachGradientTellsWhatTF32WouldCost(_ folder: URL) throws {
        let found = try result("tf32", makeSuite(settings(folder)))
        let gradients = found.measured.filter { $0.name.hasSuffix(".A") || $0.name.hasSuffix(".B") }
        let modules = try ModelBundle(url: folder.appendingPathComponent("bundle.mesp")).architecture.modules
        #expect(gradients.count == 2 * modules.count)
        #expect(gradients.allSatisfy { (1e-4...1e-2).contains($0.value ?? 0) }, "\(gradients)")
    }

    @Test func anErrorThatIsNotSeenFails() throws {
        let suite = try makeSuite(settings())
        func verdict(_ provoke: @escaping () -> Void) throws -> SelfCheckReport.Verdict {
            try SelfCheck.perform(.init(name: "errors") { try suite.checkErrors(provoke: provoke) }, suite.bundle)
                .verdict
        }
        #expect(try verdict(CheckSuite.evaluateInsideTrace) == .pass)
        #expect(try verdict({}) == .fail)
    }

    @Test func whatMappingsLeaveBehindIsFound() throws {
        var kept = [MLXArray]()
        let leaking = try makeSuite(settings()) { check, array in
            if check == "map.leak" { kept.append(array) }
            return array
        }
        let found = try result("map.leak", leaking)
        #expect(found.verdict == .fail && kept.count == 11_000, "\(found.sentence.english)")
        kept = []
        #expect(try result("map.leak", makeSuite(settings())).verdict == .pass)
    }

    @Test func theFirstStepIsMeasuredOnceAndInAFreshProcess() throws {
        var boundaries = 0
        let bundle = try ModelBundle(url: URL(fileURLWithPath: settings().bundle))
        let suite = CheckSuite(bundle: bundle, settings: try settings(), isFirstUse: true, atBlock: { boundaries += 1 })
        let footprint = try result("metal.footprint", suite)
        #expect(footprint.verdict == .note && suite.constants.metalBytes ?? -1 >= 0)
        let inTwoSteps = boundaries
        #expect(inTwoSteps >= 4 * bundle.architecture.numHiddenLayers)
        let leaving = try result("leaving", suite)
        #expect(leaving.verdict == .note && boundaries == inTwoSteps)
        #expect(leaving.measured.allSatisfy { $0.value ?? 0 > 0 })

        let late = CheckSuite(bundle: bundle, settings: try settings(), isFirstUse: false)
        for name in ["metal.footprint", "leaving"] { #expect(try result(name, late).verdict == .skipped) }
        #expect(late.constants.metalBytes == nil)
    }

    @Test func leavingIsLimitedOnAGPU() {
        #expect(CheckSuite.verdict(leaving: 2.9, onGPU: true) == .pass)
        #expect(CheckSuite.verdict(leaving: 3.1, onGPU: true) == .fail)
        #expect(CheckSuite.verdict(leaving: 3.1, onGPU: false) == .note)
    }

    @Test func onlyTheChecksThatAreNamedRun() throws {
        var settings = try settings()
        settings.checks = ["errors", "machine"]
        let report = try SelfCheck(settings).run()
        #expect(report.checks.map(\.name) == ["machine", "errors"] && report.start.names == ["machine", "errors"])
        settings.checks = ["tf31"]
        #expect(message { try SelfCheck(settings).run() }.hasPrefix("There is no check tf31; there are machine, gpu, "))
    }

    /// A single wrong row is found, even if the error of the whole product is below the bound. A CPU sums in bfloat16, so the tolerance is larger
    /// than for a GPU.
    @Test(arguments: [9, 33, 256])
    func oneWrongRowIsFound(_ rows: Int) throws {
        func found(_ folder: URL?, wrong: Int?) throws -> SelfCheckReport.Check {
            let suite = try makeSuite(settings(folder)) { check, product in
                guard check == "product.rows", product.dim(0) == rows, let wrong else { return product }
                let factors = MLXArray((0..<rows).map { Float($0 == wrong ? 1.2 : 1) }, [rows, 1])
                return product * factors.asType(.bfloat16)
            }
            let check = CheckSuite.Check(name: "product.rows") { try suite.checkProductRows(tolerance: 0.05) }
            return try SelfCheck.perform(check, suite.bundle)
        }
        for folder in [Fixture.tied].compactMap({ $0 }) + Fixture.roundedCases.prefix(1) {
            let right = try found(folder, wrong: nil)
            #expect(right.verdict == .pass && right.measured.count == 6, "\(right.sentence.english)")
            for wrong in [0, rows - 1] {
                let found = try found(folder, wrong: wrong)
                #expect(found.verdict == .fail, "\(found.sentence.english)")
                let above = found.measured.filter { $0.value ?? .infinity > 0.05 }
                #expect(above.map(\.name) == ["\(rows) rows, plain", "\(rows) rows, quantized"])
            }
        }
    }

    @Test func whatIsNotANumberFails() throws {
        let faulty = try makeSuite(settings()) { $0 == "gradients.cpu" ? $1 * Float.nan : $1 }
        let found = try result("gradients.cpu", faulty)
        #expect(found.verdict == .fail && found.sentence.english.contains("not finite"))
        #expect(found.measured.contains { $0.value == nil })
        _ = try JSONEncoder().encode(found)
    }

    @Test func aCopyShowsInTheFootprint() {
        #expect(CheckSuite.verdict(footprintOfMap: 100_000_000, size: 100_000_000) == .fail)
        #expect(CheckSuite.verdict(footprintOfMap: 30_000, size: 100_000_000) == .pass)
        #expect(CheckSuite.verdict(footprintOfMap: 300_000, size: 300_000) == .note, "too small a file to tell")
    }

    @Test func aCheckThatThrowsIsALineThatFails() throws {
        let suite = try makeSuite(settings())
        let failing = CheckSuite.Check(name: "x") { throw MeSPError("It broke.") }
        let result = try SelfCheck.perform(failing, suite.bundle)
        #expect(result.verdict == .fail && result.sentence == "It broke.")
        let skipped = CheckSuite.Check(name: "x") { throw Skipped(reason: "Not here.") }
        #expect(try SelfCheck.perform(skipped, suite.bundle).verdict == .skipped)
    }

    @Test func stoppingEndsIt() throws {
        // The bounds are loose: the number of boundaries depends on the machine's speed, and a step that has changed parameters is completed.
        var (boundaries, checks) = (0, 0)
        #expect(throws: CancellationError.self) {
            try SelfCheck(settings()).run(
                atBlock: {
                    boundaries += 1
                    if boundaries >= 40 { throw CancellationError() }
                },
                report: { if !$0.checks.isEmpty { checks += boundaries >= 40 ? 1 : 0 } })
        }
        #expect(boundaries >= 40 && checks <= 1, "the check at most that was running")
    }

    @Test func settingsAreChecked() throws {
        let file = temporaryFolder()
        func read(_ json: String) throws -> SelfCheck.Settings {
            try file.write(json)
            return try SelfCheck.Settings(contentsOf: file)
        }
        #expect(try read(#"{"bundle": "a", "repeats": 7}"#).repeats == 7)
        #expect(try read(#"{"bundle": "a", "checks": ["gpu"]}"#).checks == ["gpu"])
        #expect(message { _ = try read("{}") }.hasSuffix("is not valid: bundle is missing."))
        for json in [#""repeats": 0"#, #""seconds": 0"#, #""minutes": -1"#] {
            let settings = try read(#"{"bundle": "a", "# + json + "}")
            #expect(message { try SelfCheck(settings).run() }.contains("must be"))
        }
        #expect(message { try SelfCheck(.init(bundle: "/nowhere")).run() }.contains("is not a bundle"))
    }
}
