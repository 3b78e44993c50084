import Foundation
import MLX
import MeSPAppModel
import MeSPSentences
import Testing

@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPFiles

@Suite(.serialized) struct RunTests {
    private let output = temporaryFolder()
    private let whole = temporaryFolder()

    private func settings(_ output: URL? = nil) throws -> RunSettings {
        var settings = try RunSettings.ofATest(output ?? self.output)
        settings.valBatches = 2
        return settings
    }

    @Test func writesLogAndAdapters() throws {
        let settings = try settings()
        try Run.run(settings)

        let records = try logRecords(output)
        let types = records.compactMap { $0["type"] as? String }
        #expect(types == ["start", "plan", "eval"] + Array(repeating: "step", count: 6) + ["eval", "end"])
        #expect(records.last?["reason"] as? String == "finished")
        let steps = try logRecords(output, "step")
        #expect(steps.compactMap { $0["step"] as? Int } == Array(1...6))
        #expect(
            steps.allSatisfy { ($0["footprint_peak_bytes"] as? Int ?? 0) >= ($0["footprint_bytes"] as? Int ?? 0) / 2 })

        let adapters = try adapterArrays(of: output)
        let architecture = try ModelBundle(url: URL(fileURLWithPath: settings.bundle)).architecture
        #expect(adapters.count == architecture.numHiddenLayers * architecture.modules.count * 2)
        for (name, array) in adapters where name.hasSuffix("lora_b") {
            #expect(array.square().sum().item(Float.self) > 0, "\(name) was trained")
        }
        let files = try FileManager.default.contentsOfDirectory(atPath: output.appendingPathComponent("adapters").path)
        #expect(Set(files) == ["adapters.safetensors", "adapter_config.json", "peft"])
    }

    @Test func adaptersSayTheirDropoutAsBothLibrariesDo() throws {
        var settings = try settings()
        (settings.steps, settings.dropout) = (0, 0.25)
        try Run.run(settings)
        func config(_ folder: String) throws -> [String: Any] {
            try output.appendingPathComponent("\(folder)/adapter_config.json").readJSON()
        }
        let parameters = try #require(try config("adapters")["lora_parameters"] as? [String: Any])
        #expect(parameters["dropout"] as? Double == 0.25)
        #expect(try config("adapters/peft")["lora_dropout"] as? Double == 0.25)
    }

    @Test func aRunOfNoStepsEvaluatesAndSavesWhatItStartsFrom() throws {
        var settings = try settings()
        settings.steps = 0
        try Run.run(settings)
        #expect(try logRecords(output).compactMap { $0["type"] as? String } == ["start", "plan", "eval", "end"])
        let adapters = try adapterArrays(of: output)
        #expect(adapters.contains { $0.key.hasSuffix("lora_a") && $0.value.square().sum().item(Float.self) > 0 })
        #expect(adapters.allSatisfy { $0.key.hasSuffix("lora_a") || $0.value.square().sum().item(Float.self) == 0 })
    }

    /// With SGD on B alone, a run can begin with another run's B and continue its steps. Both together equal one long run.
    @Test func goesOnFromTheStepsOfOthers() throws {
        var settings = try settings(whole)
        (settings.freezeA, settings.dropout) = (true, 0.2)
        try Run.run(settings)
        let half = settings.steps / 2
        settings.steps = half
        for (part, first) in [(output.appendingPathComponent("0"), 0), (output.appendingPathComponent("1"), half)] {
            settings.output = part.path
            settings.firstStep = first
            try Run.run(settings)
            let onlyB = newFolder()
            try save(
                arrays: adapterArrays(of: part).filter { $0.key.hasSuffix("lora_b") },
                url: onlyB.appendingPathComponent("adapters.safetensors"))
            let config = "adapters/adapter_config.json"
            try part.appendingPathComponent(config).copy(to: onlyB.appendingPathComponent("adapter_config.json"))
            settings.adapters = onlyB.path
        }
        expectEqual(try adapterArrays(of: output.appendingPathComponent("1")), try adapterArrays(of: whole))
    }

    @Test func stopsWhenAskedAndSaves() throws {
        var steps = 0
        try Run.run(
            try settings(), report: { record, _ in if case .step = record { steps += 1 } },
            atBlock: { _ in if steps == 2 { throw CancellationError() } })
        let end = try #require(try logRecords(output).last)
        #expect(end["reason"] as? String == "stopped")
        #expect(end["step"] as? Int == 2)
        #expect(output.appendingPathComponent("adapters/adapters.safetensors").exists)
    }

    @Test(arguments: [
        "momentum", "adamw", "adamw8bit", "adamw8bit offloaded", "accumulation", "by blocks", "mezo", "bfloat16",
        "B alone", "B of some", "the last block", "some of the blocks", "dropout", "dora", "dora offloaded",
    ])
    func resumesAsIfNothingHadHappened(_ kind: String) throws {
        func settings(_ output: URL) throws -> RunSettings {
            var settings = try self.settings(output)
            (settings.evalEvery, settings.saveEvery, settings.schedule) = (2, 1, .cosine)
            switch kind {
            case "momentum": settings.momentum = 0.9
            case "adamw": (settings.optimizer, settings.learningRate) = (.adamw, 1e-3)
            case "adamw8bit": (settings.optimizer, settings.learningRate) = (.adamw8bit, 1e-3)
            case "adamw8bit offloaded":
                (settings.optimizer, settings.learningRate, settings.offload) = (.adamw8bit, 1e-3, .all)
                (settings.maxGradNorm, settings.skipBadSteps) = (0.5, true)
            case "accumulation":
                (settings.batchSize, settings.gradAccumulationSteps, settings.maxGradNorm) = (2, 2, 0.5)
            case "by blocks": (settings.batchSize, settings.offload, settings.order) = (3, .inputs, .blocks)
            case "mezo": (settings.method, settings.learningRate) = (.mezo, 1e-3)
            case "bfloat16": settings.loraDtype = .bfloat16
            case "B alone": settings.freezeA = true
            case "B of some":
                (settings.freezeA, settings.projections, settings.optimizer) = (true, ["q", "down"], .adamw8bit)
            case "dropout": (settings.dropout, settings.batchSize, settings.optimizer) = (0.2, 2, .adamw8bit)
            case "dora": (settings.dora, settings.optimizer, settings.learningRate) = (true, .adamw, 1e-3)
            case "dora offloaded":
                (settings.dora, settings.dropout, settings.offload) = (true, 0.2, .all)
                (settings.projections, settings.numLayers, settings.loraDtype) = (["q", "down"], 2, .bfloat16)
            case "the last block": (settings.numLayers, settings.momentum, settings.offload) = (1, 0.9, .all)
            case "some of the blocks": (settings.blocksPerStep, settings.optimizer) = (0.5, .adamw8bit)
            default: break
            }
            return settings
        }
        func losses(_ folder: URL) throws -> [String] {
            try logRecords(folder).compactMap { record in
                (record["loss"] as? Double).map { "\(record["type"] ?? "") \(record["step"] ?? "") \($0)" }
            }
        }
        try Run.run(try settings(whole))
        for blocks in [3, 7, 2] {  // stops at the 30th, the 70th and the 20th boundary
            var (left, resumed) = (blocks * 10, try settings(output))
            resumed.resume = SavedState.url(in: output).exists
            try Run.run(
                resumed,
                atBlock: { _ in
                    left -= 1
                    if left <= 0 { throw CancellationError() }
                })
        }
        var last = try settings(output)
        last.resume = true
        try Run.run(last)
        #expect(try losses(output) == losses(whole))
        #expect(try logRecords(output, "end").count == 1)
        expectEqual(try adapterArrays(of: output), try adapterArrays(of: whole))
    }

    @Test func aStateFromBeforeASettingWasThereIsResumed() throws {
        var settings = try settings()
        try Run.run(settings)
        func part(_ setting: String, of text: String) throws -> String {
            try #require([setting + ",", "," + setting].first { text.contains($0) })
        }
        let log = try Data(contentsOf: LogWriter.url(in: output)).split(separator: UInt8(ascii: "\n"))
        let start = String(decoding: try #require(log.first), as: UTF8.self)
        let old = Data(start.replacingOccurrences(of: try part(#""freeze_a":false"#, of: start), with: "").utf8)
        guard case .start(let read) = try LogRecord.read(old).0 else { throw MeSPError("no start record") }
        settings.device = .cpu
        #expect(read.settings == settings)
        let url = SavedState.url(in: output)
        var file = try StateFile(url)
        try file.change {
            var settings = try #require($0["settings"] as? [String: Any])
            #expect(settings.removeValue(forKey: "freeze_a") != nil)
            $0["settings"] = settings
        }
        try file.data().write(to: url)
        settings.steps += 1
        settings.resume = true
        try Run.run(settings)
        #expect(try #require(try SavedState.load(from: output, settings)).state.step == settings.steps)
    }

    @Test func savesByTimeToo() throws {
        let settings = try settings()
        let bundle = try ModelBundle(url: URL(fileURLWithPath: settings.bundle))
        var (time, saved) = (ContinuousClock.now, [Int]())
        var hooks = RunHooks()
        hooks.now = { time }
        hooks.report = { record, _ in
            guard case .step = record else { return }
            time += .seconds(65)
            saved.append((try SavedState.load(from: output, settings))?.state.step ?? 0)
        }
        try bundle.withDevice { try Run.run(settings, bundle, hooks) }
        #expect(saved == [0, 1, 1, 1, 4, 4], "what is there after each step")
    }

    @Test(arguments: ["cut off", "zeros", "zeros beyond", "zeros within", "half a line", "empty", "no start"])
    func aDamagedLogGoesOnFromTheState(_ damage: String) throws {
        try Run.run(try settings(whole))
        var settings = try settings()
        settings.steps = 4
        try Run.run(settings)
        let log = LogWriter.url(in: output)
        let sound = try Data(contentsOf: log)
        let kept = sound.dropLast(700)
        let second = try #require(sound.firstIndex(of: UInt8(ascii: "\n"))) + 1
        let damaged =
            switch damage {
            case "cut off": kept
            case "zeros": kept + Data(count: 700)
            case "zeros beyond": kept + Data(count: 4096)
            case "zeros within": sound.prefix(second + 600) + Data(count: 300) + sound.dropFirst(second + 900)
            case "half a line": kept + Data("\n".utf8)
            case "empty": Data()
            default: Data(count: 300) + sound.dropFirst(300)
            }
        try damaged.write(to: log)
        (settings.steps, settings.resume) = (6, true)
        try Run.run(settings)

        let records = try logRecords(output)
        #expect(records.first?["type"] as? String == "start")
        #expect(records.contains { $0["event"] as? String == "log_cut_off" })
        #expect(try LogOutline(folder: output).lastStep == 6)
        func losses(_ records: [[String: Any]]) -> [Double] {
            records.filter { ($0["step"] as? Int ?? 0) > 4 && $0["type"] as? String == "step" }
                .compactMap { $0["loss"] as? Double }
        }
        #expect(losses(records).count == 2)
        #expect(losses(records) == losses(try logRecords(whole)))
    }

    @Test func otherLimitsTakeAnotherPlan() throws {
        var settings = try settings()
        (settings.steps, settings.memoryLimitMb) = (1, 1000)
        try Run.run(settings)
        settings.resume = true
        let changes: [(inout RunSettings) -> Void] = [
            { _ in }, { $0.memoryLimitMb = 500 }, { $0.offload = .all }, { $0.order = .sequences },
            { $0.device = .gpu },
        ]
        for (index, change) in changes.enumerated() {
            var other = settings
            change(&other)
            let saved = try #require(try SavedState.load(from: output, other))
            #expect((saved.plan != nil) == (index == 0), "\(index)")
        }
    }

    @Test func theKeyOfTheNoiseIsItsOwnersAlone() throws {
        let folder = newFolder()
        _ = try SecretKey(in: folder, resumes: false)
        let rights = try FileManager.default.attributesOfItem(atPath: SecretKey.url(in: folder).path)
        #expect(rights[.posixPermissions] as? Int == 0o600)
    }

    @Test func refusesToResumeWhatItCannot() throws {
        var resumed = try settings()
        resumed.resume = true
        func said() -> String { message { try Run.run(resumed) } }
        #expect(said().contains("no run to resume"))
        try Run.run(try settings())
        resumed.learningRate = 0.2
        #expect(said().contains("other settings"))
        resumed.learningRate = 0.1
        try SavedState.url(in: output).write("{}")
        #expect(said().contains("damaged"))
    }

    @Test func adaptersHaveTheTermsOfTheirModel() throws {
        let changing = try Changing()
        try changing.replace("config.json", by: "LICENSE.txt") { $0 = Data("You may.".utf8) }
        try Run.run(changing.settings)
        for folder in ["adapters", "adapters/peft"] {
            let text = try Data(contentsOf: changing.output.appendingPathComponent("\(folder)/LICENSE.txt"))
            #expect(text == Data("You may.".utf8))
        }
    }

    private final class Changing {
        let folder = newFolder()
        var settings: RunSettings
        var bundle: URL { folder.appendingPathComponent("bundle.mesp") }
        var output: URL { folder.appendingPathComponent("run") }

        init() throws {
            settings = try RunSettings.ofATest(folder)
            try tiedBundle().copy(to: bundle)
            (settings.bundle, settings.output) = (bundle.path, output.path)
            (settings.steps, settings.valBatches) = (2, 1)
        }

        func replace(_ path: String, by newPath: String? = nil, _ change: (inout Data) -> Void = { _ in }) throws {
            var data = try Data(contentsOf: bundle.appendingPathComponent(path))
            change(&data)
            try FileManager.default.removeItem(at: bundle.appendingPathComponent(path))
            let place = bundle.appendingPathComponent(newPath ?? path)
            try place.deletingLastPathComponent().makeFolder()
            try data.write(to: place)
            let entry: [String: Any] = ["path": newPath ?? path, "size": data.count, "sha256": sha256(data)]
            try bundle.appendingPathComponent("manifest.json").changeJSON {
                let files = try #require($0["files"] as? [[String: Any]])
                $0["files"] = files.filter { $0["path"] as? String != path } + [entry]
                guard let newPath else { return }
                $0["data"] = try #require($0["data"] as? [String: [String: Any]]).mapValues {
                    $0["file"] as? String == path ? $0.merging(["file": newPath]) { $1 } : $0
                }
            }
        }

        func resume() throws -> (message: String, changed: Bool) {
            func contents() throws -> [String: Data] {
                let paths = try FileManager.default.subpathsOfDirectory(atPath: output.path).filter { $0 != ".lock" }
                return Dictionary(
                    uniqueKeysWithValues: paths.map {
                        ($0, (try? Data(contentsOf: output.appendingPathComponent($0))) ?? Data())
                    })
            }
            let before = try contents()
            var resumed = settings
            (resumed.resume, resumed.steps) = (true, 4)
            let sentence = message { try Run.run(resumed) }
            return (sentence, try contents() != before)
        }
    }

    private func turned(_ data: inout Data) {
        data = stride(from: 0, to: data.count, by: 4).reversed().reduce(into: Data()) { $0 += data[$1..<$1 + 4] }
    }

    @Test(arguments: ["train", "valid"]) func aResumeOnOtherDataIsRefused(_ split: String) throws {
        let run = try Changing()
        try Run.run(run.settings)
        try run.replace("data/\(split).bin", turned)
        let (message, changed) = try run.resume()
        #expect(
            message
                == "The \(split) data has changed since the run in \(run.output.path) was started; start a new run, with --adapters \(run.output.path)/adapters to continue from its adapters."
        )
        #expect(!changed)
    }

    @Test(arguments: ["blocks/01.bin", "embedding.bin"]) func aResumeWithOtherWeightsIsRefused(_ file: String) throws {
        let run = try Changing()
        try Run.run(run.settings)
        try run.replace(file) { $0[0] ^= 1 }
        let (message, changed) = try run.resume()
        #expect(
            message
                == "The bundle's weights are not those that the run in \(run.output.path) was started with; resume it with its own bundle, or start a new run."
        )
        #expect(!changed)
    }

    @Test func aResumeMindsNothingElse() throws {
        let run = try Changing()
        run.settings.valBatches = 0
        try Run.run(run.settings)
        try run.replace("data/train.bin", by: "data.2/train.bin")
        try run.replace("data/valid.bin", turned)
        let moved = run.folder.appendingPathComponent("moved.mesp")
        try FileManager.default.moveItem(at: run.bundle, to: moved)
        run.settings.bundle = moved.path
        #expect(try run.resume().message.isEmpty)
        #expect(try LogOutline(folder: run.output).lastStep == 4)
    }

    @Test(arguments: [(31, true), (32, false), (8, false)]) func moreTokensThanPositionsAreRefused(
        _ positions: Int, _ isRefused: Bool
    ) throws {
        let run = try Changing()
        try run.replace("config.json") {
            let stretched = positions < 31 ? ", \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0}" : ""
            $0 = Data("{\"max_position_embeddings\": \(positions)\(stretched)}".utf8)
        }
        let sentence = message { try Run.run(run.settings) }
        let wanted =
            "\(try ModelBundle(url: run.bundle).manifest.name) was trained for 31 positions, and sequences of 32 tokens have more; take sequences of up to 31."
        #expect(sentence == (isRefused ? wanted : ""))
        #expect(run.output.exists == !isRefused)
    }

    @Test(arguments: [
        ("\"type\": \"longrope\"", 8, "Beyond 16 tokens "), ("\"llama_4_scaling_beta\": 0.1", 32, "From 16 tokens on "),
    ]) func lengthsOfOtherFrequenciesAreRefused(_ scaling: String, _ length: Int, _ said: String) throws {
        let run = try Changing()
        try run.replace("config.json") {
            $0 = Data("{\"rope_scaling\": {\(scaling), \"original_max_position_embeddings\": 16}}".utf8)
        }
        run.settings.seqLen = length
        #expect(message { try Run.run(run.settings) }.hasPrefix(said))
        #expect(!run.output.exists)
    }

    @Test(arguments: ["train", "replay", "general"]) func aResumeOnAnotherTextIsRefused(_ text: String) throws {
        let run = try Changing()
        let data = newFolder()
        let count = 4 * run.settings.seqLen + 1
        let tokens = try Data(contentsOf: run.bundle.appendingPathComponent("data/train.bin")).prefix(4 * count)
        try tokens.write(to: data.appendingPathComponent("train.bin"))
        try data.appendingPathComponent("data.json").write(#"{"train": {"file": "train.bin", "tokens": \#(count)}}"#)
        switch text {
        case "train": (run.settings.data, run.settings.valBatches) = (data.path, 0)
        case "replay": (run.settings.replay, run.settings.replayShare) = (data.path, 0.5)
        default: (run.settings.general, run.settings.maxForgetting) = (data.path, 5)
        }
        try Run.run(run.settings)
        var other = tokens
        turned(&other)
        try other.write(to: data.appendingPathComponent("train.bin"))
        let (message, changed) = try run.resume()
        #expect(message.hasPrefix("The \(text) data has changed since the run in"))
        #expect(!changed)
        try tokens.write(to: data.appendingPathComponent("train.bin"))
        #expect(try run.resume().message.isEmpty)
    }

    @Test func aStateWithAChangedByteIsRefused() throws {
        let run = try Changing()
        try Run.run(run.settings)
        let url = SavedState.url(in: run.output)
        let sound = try Data(contentsOf: url)
        let header = 8 + Int(sound[0]) + Int(sound[1]) << 8
        let places = Array(0..<header) + stride(from: header, to: sound.count, by: 997) + sound.indices.suffix(40)
        for place in places {
            var damaged = sound
            damaged[place] ^= 1 << UInt8(place % 8)
            try damaged.write(to: url)
            #expect(
                message { _ = try SavedState.load(from: run.output, run.settings) }
                    == "\(url.path) is damaged; start the run again in another folder.", "byte \(place)")
        }
        try sound.write(to: url)
        #expect(try run.resume().message.isEmpty)
    }

    @Test func aStateOfAnEarlierVersionIsNamed() throws {
        let run = try Changing()
        try Run.run(run.settings)
        let url = SavedState.url(in: run.output)
        var file = try StateFile(url)
        try file.change { ($0["format"], $0["sources"]) = (1, nil) }
        try file.data(seals: false).write(to: url)
        let (message, changed) = try run.resume()
        #expect(
            message
                == "\(url.path) was saved by another version of the trainer, in format 1 and not 2; start the run again in another folder."
        )
        #expect(!changed)
    }

    @Test(arguments: RunSettings.Schedule.allCases)
    func aScheduleOfOtherStepsIsSaid(_ schedule: RunSettings.Schedule) throws {
        let run = try Changing()
        (run.settings.schedule, run.settings.warmup) = (schedule, 1)
        try Run.run(run.settings)
        (run.settings.resume, run.settings.steps) = (true, 4)
        for _ in 0..<2 { try Run.run(run.settings) }
        let events = try logRecords(run.output).filter { $0["event"] as? String == "schedule" }
        let expected = schedule == .constant ? [] : ["the schedule is now that of 4 steps; it was that of 2"]
        #expect(events.compactMap { $0["message"] as? String } == expected)
    }

    @Test func stopsEarly() throws {
        var settings = try settings()
        (settings.evalEvery, settings.earlyStopping, settings.steps) = (1, 2, 50)
        settings.learningRate = 20  // so high that the loss rises
        try Run.run(settings)
        let records = try logRecords(output)
        #expect(records.contains { $0["event"] as? String == "early_stopping" })
        #expect(records.last?["reason"] as? String == "finished")
        #expect(records.last?["step"] as? Int ?? 50 < 50)
    }

    @Test func refusesAnOutputThatHoldsARun() throws {
        try Run.run(try settings())
        let before = try Data(contentsOf: output.appendingPathComponent("metrics.jsonl"))
        #expect(throws: MeSPError("\(output.path) already holds a run; resume it or choose another output folder.")) {
            try Run.run(try settings())
        }
        #expect(try Data(contentsOf: output.appendingPathComponent("metrics.jsonl")) == before)
    }

    struct BadSetting: Sendable, CustomTestStringConvertible {
        let named: String
        let change: @Sendable (inout RunSettings) -> Void
        var testDescription: String { named }

        init(_ named: String, _ change: @escaping @Sendable (inout RunSettings) -> Void) {
            (self.named, self.change) = (named, change)
        }
    }

    @Test(arguments: [
        BadSetting("steps") { $0.steps = -1 }, BadSetting("rank") { $0.rank = 0 },
        BadSetting("steps must be at most 1000000") { $0.steps = 1_000_001 },
        BadSetting("momentum must be below 1") { $0.momentum = 1 },
        BadSetting("group_size must be at most 1024") { $0.groupSize = 1025 },
        BadSetting("dropout must be below 1") { $0.dropout = 1 },
        BadSetting("dropout must be at least 0") { $0.dropout = -0.1 },
        BadSetting("method must be mesp with dropout") { ($0.dropout, $0.method) = (0.1, .mezo) },
        BadSetting("method must be mesp with dropout") { ($0.dropout, $0.method) = (0.1, .mebp) },
        BadSetting("objective must be left out with dropout") { ($0.dropout, $0.objective) = (0.1, .dpo) },
        BadSetting("group_size must be left out with dropout") { ($0.dropout, $0.groupSize) = (0.1, 2) },
        BadSetting("loraplus_lr_ratio must be above 0") { $0.loraplusLrRatio = 0 },
        BadSetting("loraplus_lr_ratio must be 1 with freeze_a") { ($0.freezeA, $0.loraplusLrRatio) = (true, 2) },
        BadSetting("method must be mesp or mezo with dora") { ($0.dora, $0.method) = (true, .mebp) },
        BadSetting("projections must be without experts with dora") { ($0.dora, $0.projections) = (true, ["experts"]) },
        BadSetting("val_batches must be above 0 with test") { ($0.test, $0.valBatches) = (true, 0) },
        BadSetting("freeze_a must be left out with dora") { ($0.dora, $0.freezeA) = (true, true) },
        BadSetting("max_forgetting must be left out with dora") {
            ($0.dora, $0.maxForgetting, $0.general) = (true, 5, "/nowhere")
        },
        BadSetting("warmup must be less than steps") { $0.warmup = 6 },
        BadSetting("have at most rank 128; choose a smaller rank") { $0.rank = 129 },
        BadSetting("seq_len") { $0.seqLen = 0 }, BadSetting("learning_rate") { $0.learningRate = -1 },
        BadSetting("learning_rate") { $0.learningRate = .nan }, BadSetting("alpha") { $0.alpha = 0 },
        BadSetting("/nowhere") { $0.bundle = "/nowhere" }, BadSetting("/dev/null/x") { $0.output = "/dev/null/x" },
    ]) func refuses(_ bad: BadSetting) throws {
        var settings = try settings()
        bad.change(&settings)
        let said = message { try Run.run(settings) }
        #expect(said.contains(bad.named), "\(said)")
        #expect(!output.exists)
    }

    @Test(arguments: GradientMethod.allCases)
    func theDefaultUpdateIsThatOfMespTrain(_ method: GradientMethod) throws {
        let fixture = try Fixture(try #require(Fixture.tied), "gradients")
        var settings = RunSettings(bundle: "", output: "")
        settings.method = method
        #expect(settings.effectiveOptimizer.rawValue == (try fixture.word("default \(method)")))
        let cases = RunSettings.OptimizerKind.allCases.flatMap { [($0, nil), ($0, Objective.dpo)] }
        for (optimizer, objective) in cases {
            (settings.optimizer, settings.objective) = (optimizer, objective)
            let rate = try fixture.number("default \(method) \(optimizer)\(objective == nil ? "" : " dpo")")
            let difference = settings.effectiveLearningRate(for: fixture.bundle.architecture) - rate
            #expect(abs(difference) < 1e-6 * rate, "\(optimizer)")
        }
    }

    @Test func whatASettingsFileLeavesOutIsThePapers() throws {
        let file = temporaryFolder()
        try file.write(#"{"bundle": "b", "output": "o"}"#)
        let settings = try RunSettings(contentsOf: file)
        #expect(settings.optimizer == .sgd && settings.learningRate == 1e-4 && settings.schedule == .constant)
        #expect(settings.momentum == 0 && settings.batchSize == 1 && settings.projections == nil)
        try file.write(#"{"bundle": "b", "output": "o", "optimizer": null, "learning_rate": null}"#)
        let unset = try RunSettings(contentsOf: file)
        #expect(unset.optimizer == nil && unset.learningRate == nil && unset.effectiveOptimizer == .adamw8bit)
    }

    @Test func aRunThatNamesNoUpdateTakesTheDefault() throws {
        var (settings, same) = (try self.settings(), try self.settings(whole))
        (settings.optimizer, settings.learningRate) = (nil, nil)
        let manifest = try ModelBundle(url: URL(fileURLWithPath: settings.bundle)).manifest
        let rate = 0.007 / Float(manifest.architecture.hiddenSize).squareRoot()
        (same.optimizer, same.learningRate) = (.adamw8bit, rate)
        let plan = try Planner(manifest, same).plan()
        #expect(Planner(manifest, settings).peak(plan) == Planner(manifest, same).peak(plan))

        settings.steps = 3
        try Run.run(settings)
        (settings.steps, settings.resume) = (6, true)
        try Run.run(settings)
        try Run.run(same)
        let logged = try #require(try logRecords(output).first?["settings"] as? [String: Any])
        #expect(logged["optimizer"] as? String == "adamw8bit")
        #expect((logged["learning_rate"] as? Double).map(Float.init) == rate)
        expectEqual(try adapterArrays(of: output), try adapterArrays(of: whole))
    }
}
