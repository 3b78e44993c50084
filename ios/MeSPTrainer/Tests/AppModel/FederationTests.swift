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

@Suite(.serialized) @MainActor final class FederationTests: AppSuite {
    private let scheduler = Scheduler()
    private let host = UUID().uuidString.lowercased() + ".test"

    override func makeModel(_ loadTokenizer: @escaping LoadTokenizer) -> AppModel {
        AppModel(
            monitor: monitor, folder: DocumentsFolder(documents: documents), scheduler: scheduler,
            loadTokenizer: loadTokenizer)
    }

    private func prepare(heartbeat: Double = 30) async throws {
        monitor.battery = Battery(level: 0.9, isCharging: true)
        model.federation.open = { server, folder, mostBytes, _ in
            try SuperNode(
                server: server, folder: folder, mostBytes: mostBytes, transport: SuperLink.transport(),
                seconds: .init(heartbeat: heartbeat, poll: 0.01, lease: 0))
        }
        try await importTied()
        model.federation.address = "https://\(host):8000"
    }

    private final class Scheduler: BackgroundScheduler {
        var onGrant: ((any BackgroundTime) -> Void)?
        let givesGPU = true
        var asked = [BackgroundGrant]()
        func ask(for grant: BackgroundGrant, title: Sentence) { asked.append(grant) }
        func withdraw(_ grant: BackgroundGrant) {}
    }

    private func question(steps: Int64 = 2, exchange: String = "float32") throws -> FlowerRecords {
        let manifest = try #require(model.form.bundle?.manifest)
        return SuperLink.round(of: manifest, exchange: exchange, ["steps": .int(steps), "output": .text("/etc")])
    }

    private func until(_ condition: () -> Bool) async throws {
        try await wait { model.problem != nil || condition() }
        try #require(model.problem == nil)
    }

    private func inFederation(_ body: () async throws -> Void) async throws {
        let part = Task { await model.joinFederation() }
        try await body()
        model.federation.leave()
        await part.value
    }

    private func round() async throws -> Federation.Round {
        try await inFederation { try await until { model.federation.rounds.first?.bytesUp != nil } }
        return try #require(model.federation.rounds.first)
    }

    @Test(arguments: ["float32", "bfloat16"]) func trainsAsTheServerAsks(exchange: String) async throws {
        try await prepare()
        try SuperLink.ask(host, question(exchange: exchange))
        let round = try await round()
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
        try await prepare()
        monitor.battery = Battery(level: 0.9, isCharging: false)
        try SuperLink.ask(host, question())
        try await inFederation {
            try await until { model.federation.state == .waitingForCharger }
            #expect(!model.controller.isRunning && !model.isFree)
            monitor.battery = Battery(level: 0.9, isCharging: true)
            try await until { model.federation.rounds.first?.bytesUp != nil }
        }
    }

    @Test func followsTheChargerWhileTheServerCannotBeReached() async throws {
        try await prepare(heartbeat: 0.01)
        let (federation, controller) = (model.federation, model.controller)

        try SuperLink.ask(host, question(steps: 1_000_000))
        try await inFederation {
            try await until { controller.state == .training }
            SuperLink.with(host) { $0.faults["send-node-heartbeat"] = Array(repeating: (0, ""), count: 100) }
            try await until { federation.unreachable != nil }
            #expect(federation.status == federation.unreachable && federation.state == .training(round: "1"))
            monitor.battery = Battery(level: 0.9, isCharging: false)
            try await until { controller.state == .paused(.user) }
            monitor.battery = Battery(level: 0.9, isCharging: true)
            try await until { controller.state == .training }

            SuperLink.with(host) { $0.faults = [:] }
            try await until { federation.unreachable == nil }
            #expect(federation.status == "Training in round 1")
            monitor.battery = Battery(level: 0.9, isCharging: false)
            try await until { controller.state == .paused(.user) }
            federation.needsCharger = false
            try await until { controller.state == .training }
            federation.needsCharger = true
            try await until { controller.state == .paused(.user) }
        }
    }

    @Test func aRoundThatIsOverIsNotTrained() async throws {
        try await prepare()
        try SuperLink.ask(host, question(), age: 601)
        #expect(try await round().problem?.english.contains("no longer waits") == true)
        #expect(try SuperLink.answered(host).reason == "The node could not do it.")
        #expect(model.controller.state == .idle)
    }

    @Test func whatNoRunHasIsRefusedInASentence() async throws {
        try await prepare()
        let bundle = try #require(model.form.bundle).url
        let asked = try question()
        func run(_ change: (inout FlowerRecords) -> Void) throws -> FederatedRun {
            var records = asked
            change(&records)
            let folder = documents.appendingPathComponent(UUID().uuidString)
            return try FederatedRun(SuperLink.question(records, in: folder), bundle: bundle)
        }
        #expect(try run { _ in }.settings.firstStep == 0)
        #expect(try run { $0.configs["config"]?["server-round"] = .int(3) }.settings.firstStep == 4)
        let bad: [(String, [FlowerValue])] = [
            ("server-round", [.int(0), .int(.max), .int(.min), .double(1e300), .double(-.infinity), .double(.nan)]),
            ("server-round", [.unsigned(.max)]),
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
        try await prepare()
        let bundle = try #require(model.form.bundle)
        let manifest = try #require(bundle.manifest)
        var records = try question()
        records.configs["config"]?["batch_size"] = .int(256)
        records.configs["config"]?["grad_accumulation_steps"] = .int(256)
        func limited(serversLimit: Double? = nil) throws -> RunSettings {
            records.configs["config"]?["memory_limit_mb"] = serversLimit.map { .double($0) }
            let question = SuperLink.question(records, in: documents.appendingPathComponent("question"))
            return try FederatedRun(question, bundle: bundle.url, memoryLimit: 25_000_000).settings
        }
        #expect(try limited(serversLimit: 20).memoryLimitMb == 20)
        #expect(try limited(serversLimit: 1000).memoryLimitMb == 25)
        var settings = try limited()
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
        try await prepare()
        var asked = try question()
        asked.configs["config"]?["model"] = .text("another/model")
        try SuperLink.ask(host, asked)
        #expect(try await round().problem?.english.contains("the round is for another model") == true)
        #expect(try SuperLink.answered(host).reason == "The node could not do it.")
    }

    @Test func saysWhyAMessageWasPassedOver() async throws {
        try await prepare()
        SuperLink.with(host) { $0.faults["pull-messages"] = [(200, "\u{12}\u{0}\u{1A}\u{0}")] }
        try await inFederation {
            try await until { model.federation.passedOver != nil }
            #expect(model.federation.passedOver?.english.contains("object tree") == true)
            #expect(model.federation.state == .waiting && model.federation.rounds.isEmpty)
            try SuperLink.ask(host, question())
            try await until { model.federation.rounds.first?.bytesUp != nil }
            #expect(model.federation.passedOver == nil)
        }
    }

    @Test func isLeftAtOnceWhileTheServerKeepsItBusy() async throws {
        try await prepare()
        try SuperLink.ask(host, question())
        SuperLink.with(host) { $0.faults["pull-object"] = Array(repeating: (SuperLink.never, ""), count: 100) }
        try await inFederation { try await until { SuperLink.with(host) { $0.calls.contains("pull-object") } } }
        #expect(model.problem == nil && !model.federation.isOn)
    }

    @Test func anAddressThatIsNoneIsRefused() async throws {
        try await prepare()
        for address in ["", "phone", "ftp://here", "http://links.example.org:8000"] {
            (model.federation.address, model.problem) = (address, nil)
            await model.joinFederation()
            #expect(model.problem?.english.contains("address") == true && !model.federation.isOn)
        }
    }
}
