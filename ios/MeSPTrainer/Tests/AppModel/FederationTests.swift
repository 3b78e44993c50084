import Foundation
import MeSPSentences
import Testing

@testable import MeSPAdapters
@testable import MeSPAppModel
@testable import MeSPBundle
@testable import MeSPControl
@testable import MeSPCore
@testable import MeSPFederation

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

@Suite(.serialized) @MainActor final class FederationTests {
    private let documents = temporaryFolder()
    private let monitor = TestMonitor()
    private let scheduler = Scheduler()
    private let host = UUID().uuidString.lowercased() + ".test"
    deinit { try? FileManager.default.removeItem(at: documents) }

    private func model(heartbeat: Double = 30) async throws -> AppModel {
        try FileManager.default.createDirectory(at: documents, withIntermediateDirectories: true)
        monitor.battery = Battery(level: 0.9, isCharging: true)
        let model = AppModel(
            monitor: monitor, folder: DocumentsFolder(documents: documents), scheduler: scheduler,
            loadTokenizer: { _ in ByteTokenizer() })
        model.federation.open = { server, folder, mostBytes, _ in
            try SuperNode(
                server: server, folder: folder, mostBytes: mostBytes, transport: SuperLink.transport(),
                seconds: .init(heartbeat: heartbeat, poll: 0.01, lease: 0))
        }
        let fixture = try #require(Fixture.tied).appendingPathComponent("bundle.mesp").resolvingSymlinksInPath()
        await model.importBundle(at: fixture)
        model.federation.address = "https://\(host):8000"
        return model
    }

    private final class Scheduler: BackgroundScheduler {
        var onGrant: ((any BackgroundTime) -> Void)?
        let givesGPU = true
        var asked = [BackgroundGrant]()
        func ask(for grant: BackgroundGrant, title: Sentence) { asked.append(grant) }
        func withdraw(_ grant: BackgroundGrant) {}
    }

    private func question(_ model: AppModel, steps: Int64 = 2, exchange: String = "float32") throws -> FlowerRecords {
        let manifest = try #require(model.form.bundle?.manifest)
        let (architecture, kind) = (manifest.architecture, exchange == "float32" ? FlowerArray.Kind.float32 : .uint16)
        var arrays = [String: FlowerArray]()
        for module in architecture.modules {
            let blocks = (0..<architecture.numHiddenLayers).map { architecture.block($0) }
                .filter { $0.modules.contains(module) }
            let shape = [blocks.count, manifest.ranks[0], blocks[0].dimensions(module).outputs]
            arrays[module.name + ".lora_b"] = FlowerArray(
                kind, shape: shape, data: Data(count: shape.reduce(kind == .float32 ? 4 : 2, *)))
        }
        let model = [manifest.model.id, manifest.model.revision].compactMap { $0 }.joined(separator: "@")
        return FlowerRecords(
            arrays: ["arrays": arrays],
            configs: [
                "config": [
                    "model": .text(model), "exchange": .text(exchange), "timeout": .double(600),
                    "server-round": .int(1),
                    "steps": .int(steps), "seq_len": .int(Int64(manifest.seqLens[0])),
                    "rank": .int(Int64(manifest.ranks[0])),
                    "alpha": .double(4), "freeze_a": .flag(true), "optimizer": .text("sgd"),
                    "learning_rate": .double(0.1), "output": .text("/etc"),
                ]
            ])
    }

    private func round(_ model: AppModel) async throws -> Federation.Round {
        let part = Task { await model.joinFederation() }
        while model.federation.rounds.first?.bytesUp == nil {
            try #require(model.problem == nil)
            try await Task.sleep(for: .milliseconds(5))
        }
        model.federation.leave()
        await part.value
        return try #require(model.federation.rounds.first)
    }

    @Test(arguments: ["float32", "bfloat16"]) func trainsAsTheServerAsks(exchange: String) async throws {
        let model = try await model()
        try SuperLink.ask(host, question(model, exchange: exchange))
        let round = try await round(model)
        #expect(round.problem?.english == nil)
        #expect(scheduler.asked == [.overnight], "to go on at once is for what a person has started")
        #expect(round.bytesUp ?? 0 > 0 && !model.federation.isOn && model.isFree)
        let answer = try #require(try SuperLink.answered(host).1)

        let manifest = try #require(model.form.bundle?.manifest)
        var settings = RunSettings(
            bundle: try #require(model.form.bundle).url.path, output: documents.appendingPathComponent("by hand").path)
        (settings.steps, settings.rank, settings.alpha, settings.freezeA) = (2, manifest.ranks[0], 4, true)
        (settings.optimizer, settings.learningRate) = (.sgd, 0.1)
        (settings.seqLen, settings.valBatches) = (manifest.seqLens[0], 0)
        let hand = settings
        try await Task.detached { try Run.run(hand) }.value
        let folder = URL(fileURLWithPath: settings.output).appendingPathComponent("adapters")
        let expected = try Safetensors(folder.appendingPathComponent("adapters.safetensors"))
        for (name, array) in try #require(answer.arrays["arrays"]) {
            let numbers = expected.names.filter { $0.hasSuffix("." + name) }
                .sorted { $0.localizedStandardCompare($1) == .orderedAscending }
                .flatMap { expected[$0]?.asArray(Float.self) ?? [] }
            let sent: [Float] = array.data.withUnsafeBytes { bytes in
                exchange == "float32"
                    ? Array(bytes.bindMemory(to: Float.self))
                    : bytes.bindMemory(to: UInt16.self).map { Float(bitPattern: UInt32($0) << 16) }
            }
            // B was 0 before the round. bfloat16 has 8 significant bits, so each number of B is rounded by at most 2⁻⁸ of its size.
            #expect(sent.count == numbers.count && numbers.contains { $0 != 0 })
            #expect(zip(sent, numbers).allSatisfy { abs($0 - $1) <= (exchange == "float32" ? 0 : abs($1) / 256) })
        }
        let metrics = try #require(answer.metrics["metrics"])
        #expect(metrics["num-examples"] == .int(Int64(2 * manifest.seqLens[0])))
        #expect(try FileManager.default.contentsOfDirectory(atPath: documents.path).contains("runs") == false)
    }

    @Test func waitsForTheCharger() async throws {
        let model = try await model()
        monitor.battery = Battery(level: 0.9, isCharging: false)
        try SuperLink.ask(host, question(model))
        let part = Task { await model.joinFederation() }
        while model.federation.state != .waitingForCharger { try await Task.sleep(for: .milliseconds(5)) }
        #expect(!model.controller.isRunning && !model.isFree)
        monitor.battery = Battery(level: 0.9, isCharging: true)
        while model.federation.rounds.first?.bytesUp == nil { try await Task.sleep(for: .milliseconds(5)) }
        model.federation.leave()
        await part.value
    }

    @Test func followsTheChargerWhileTheServerCannotBeReached() async throws {
        let model = try await model(heartbeat: 0.01)
        let (federation, controller) = (model.federation, model.controller)
        func wait(until isSo: () -> Bool) async throws {
            while !isSo() {
                try #require(model.problem == nil)
                try await Task.sleep(for: .milliseconds(5))
            }
        }
        try SuperLink.ask(host, question(model, steps: 1_000_000))
        let part = Task { await model.joinFederation() }
        try await wait { controller.state == .training }
        SuperLink.with(host) { $0.faults["send-node-heartbeat"] = Array(repeating: (0, ""), count: 100) }
        try await wait { federation.unreachable != nil }
        #expect(federation.status == federation.unreachable && federation.state == .training(round: "1"))
        monitor.battery = Battery(level: 0.9, isCharging: false)
        try await wait { controller.state == .paused(.user) }
        monitor.battery = Battery(level: 0.9, isCharging: true)
        try await wait { controller.state == .training }

        SuperLink.with(host) { $0.faults = [:] }
        try await wait { federation.unreachable == nil }
        #expect(federation.status == "Training in round 1")
        monitor.battery = Battery(level: 0.9, isCharging: false)
        try await wait { controller.state == .paused(.user) }
        federation.needsCharger = false
        try await wait { controller.state == .training }
        federation.needsCharger = true
        try await wait { controller.state == .paused(.user) }
        federation.leave()
        await part.value
    }

    @Test func aRoundThatIsOverIsNotTrained() async throws {
        let model = try await model()
        try SuperLink.ask(host, question(model), age: 601)
        #expect(try await round(model).problem?.english.contains("no longer waits") == true)
        #expect(try SuperLink.answered(host).reason == "The node could not do it.")
        #expect(model.controller.state == .idle)
    }

    @Test func whatNoRunHasIsRefusedInASentence() async throws {
        let model = try await model()
        let bundle = try #require(model.form.bundle).url
        let asked = try question(model)
        func run(_ change: (inout FlowerRecords) -> Void) throws -> FederatedRun {
            var records = asked
            change(&records)
            let folder = documents.appendingPathComponent(UUID().uuidString)
            let question = SuperNode.Question(
                id: "", node: 1, type: "train", run: 1, group: "1", created: .now, records: records, folder: folder)
            return try FederatedRun(question, bundle: bundle)
        }
        #expect(try run { _ in }.settings.firstStep == 0)
        #expect(try run { $0.configs["config"]?["server-round"] = .int(3) }.settings.firstStep == 4)
        let bad: [(String, [FlowerValue])] = [
            (
                "server-round",
                [.int(0), .int(.max), .int(.min), .double(1e300), .double(-.infinity), .double(.nan), .unsigned(.max)]
            ),
            ("steps", [.int(.max), .int(.min), .int(-1), .double(.nan)]),
            ("learning_rate", [.double(.nan), .double(.infinity), .double(1e300)]),
            ("proximal-mu", [.double(.nan), .double(1e300)]),
            ("timeout", [.double(.nan), .double(.infinity), .double(-1e300), .int(-1)]),
            ("alpha", [.double(.nan), .double(-1)]), ("rank", [.int(0), .int(.max)]),
            ("batch_size", [.int(0), .int(.max), .int(1_000_000)]),
            ("grad_accumulation_steps", [.int(-1), .int(65537)]),
        ]
        for (name, values) in bad {
            for value in values {
                #expect(throws: MeSPError.self, "\(name) \(value)") {
                    try run { $0.configs["config"]?[name] = value }
                }
            }
        }
        let (name, array) = try #require(asked.arrays["arrays"]?.first)
        for shape in [[array.shape[0], 1 << 40, 0], [array.shape[0], 0, 1 << 40], [1, 1], [], [1 << 40, 0, 1]] {
            let other = FlowerArray(.float32, shape: shape, data: Data(count: shape.reduce(4, *)))
            #expect(throws: MeSPError.self, "\(shape)") { try run { $0.arrays["arrays"]?[name] = other } }
        }
    }

    /// The server sets the number of sequences in a step. Their tokens also count toward the node's memory limit.
    @Test func aNodesLimitHoldsForTheServersSequences() async throws {
        let model = try await model()
        let bundle = try #require(model.form.bundle)
        let manifest = try #require(bundle.manifest)
        var records = try question(model)
        records.configs["config"]?["batch_size"] = .int(256)
        records.configs["config"]?["grad_accumulation_steps"] = .int(256)
        let question = SuperNode.Question(
            id: "", node: 1, type: "train", run: 1, group: "1", created: .now, records: records,
            folder: documents.appendingPathComponent("question"))
        var settings = try FederatedRun(question, bundle: bundle.url, memoryLimit: 25_000_000).settings
        #expect(settings.memoryLimitMb == 25)
        let error = #expect(throws: MeSPError.self) { try Planner(manifest, settings, systemLimit: nil).plan() }
        #expect(error?.sentence.english.contains("fewer in a step") == true)
        settings.memoryLimitMb = nil
        func peak(_ batch: Int) throws -> Int {
            settings.batchSize = batch
            let planner = Planner(manifest, settings, systemLimit: nil)
            return planner.peak(Plan(tileBytes: 1 << 20, order: .sequences))
        }
        let counted = try peak(256) - peak(2)
        settings.batchSize = 256
        let data = try Splits(ModelBundle(url: bundle.url, checksums: false), settings)
        let before = memoryFootprint()
        let sequences = data.sequences(step: 0)
        let taken = memoryFootprint() - before
        #expect(sequences.count == 256 * 256)
        #expect(taken < counted + counted / 10 && taken > counted / 3, "\(taken) taken, \(counted) counted")
    }

    @Test func saysWhyARoundWasNotAnswered() async throws {
        let model = try await model()
        var asked = try question(model)
        asked.configs["config"]?["model"] = .text("another/model")
        try SuperLink.ask(host, asked)
        #expect(try await round(model).problem?.english.contains("the round is for another model") == true)
        #expect(try SuperLink.answered(host).reason == "The node could not do it.")
    }

    @Test func saysWhyAMessageWasPassedOver() async throws {
        let model = try await model()
        SuperLink.with(host) { $0.faults["pull-messages"] = [(200, "\u{12}\u{0}\u{1A}\u{0}")] }
        let part = Task { await model.joinFederation() }
        func wait(until isSo: () -> Bool) async throws {
            while !isSo() {
                try #require(model.problem == nil)
                try await Task.sleep(for: .milliseconds(5))
            }
        }
        try await wait { model.federation.passedOver != nil }
        #expect(model.federation.passedOver?.english.contains("object tree") == true)
        #expect(model.federation.state == .waiting && model.federation.rounds.isEmpty)
        try SuperLink.ask(host, question(model))
        try await wait { model.federation.rounds.first?.bytesUp != nil }
        #expect(model.federation.passedOver == nil)
        model.federation.leave()
        await part.value
    }

    @Test func isLeftAtOnceWhileTheServerKeepsItBusy() async throws {
        let model = try await model()
        try SuperLink.ask(host, question(model))
        SuperLink.with(host) { $0.faults["pull-object"] = Array(repeating: (SuperLink.never, ""), count: 100) }
        let part = Task { await model.joinFederation() }
        while SuperLink.with(host, { !$0.calls.contains("pull-object") }) {
            try await Task.sleep(for: .milliseconds(5))
        }
        model.federation.leave()
        await part.value
        #expect(model.problem == nil && !model.federation.isOn)
    }

    @Test func anAddressThatIsNoneIsRefused() async throws {
        let model = try await model()
        for address in ["", "phone", "ftp://here", "http://links.example.org:8000"] {
            (model.federation.address, model.problem) = (address, nil)
            await model.joinFederation()
            #expect(model.problem?.english.contains("address") == true && !model.federation.isOn)
        }
    }
}
