import Foundation
import MeSPSentences
import Testing

@testable import MeSPFederation

private struct Interrupted: Error {}

final class SuperNodeTests {
    private let folder = newFolder()
    private let host = UUID().uuidString.lowercased() + ".test"

    private func node(_ seconds: SuperNode.Seconds? = nil, at host: String? = nil) throws -> SuperNode {
        try SuperNode(
            server: try #require(URL(string: "https://\(host ?? self.host):8000")), folder: folder, mostBytes: 1 << 20,
            transport: SuperLink.transport(),
            seconds: seconds ?? .init(heartbeat: 30, poll: 0.01, lease: 75))
    }

    private func failure<E: Error>(
        of node: SuperNode? = nil, as type: E.Type = MeSPError.self,
        answer: @escaping @Sendable (SuperNode.Question) async throws -> FlowerRecords = SuperNodeTests.train
    ) async throws -> E? {
        let node = try node ?? self.node()
        return await #expect(throws: type) { try await node.run(report: { _ in }, answer: answer) }
    }

    @discardableResult
    private func run(
        _ node: SuperNode, until isLast: @escaping @Sendable (SuperNode.Event) -> Bool,
        answer: @escaping @Sendable (SuperNode.Question) async throws -> FlowerRecords
    ) async throws -> [SuperNode.Event] {
        let (events, continuation) = AsyncStream.makeStream(of: SuperNode.Event.self)
        let task = Task {
            defer { continuation.finish() }
            try await node.run(report: { continuation.yield($0) }, answer: answer)
        }
        var seen = [SuperNode.Event]()
        for await event in events {
            seen.append(event)
            if isLast(event) { task.cancel() }
        }
        do { try await task.value } catch is CancellationError {}
        return seen
    }

    private static func started(
        _ node: SuperNode, report: @escaping @Sendable (SuperNode.Event) -> Void = { _ in }
    ) -> Task<Void, any Error> {
        Task { try await node.run(report: report, answer: train) }
    }

    private func keeps() throws -> [String] {
        try FileManager.default.subpathsOfDirectory(atPath: folder.path)
            .filter { ![".lock", "node.id", "node.key", "node.pub", "objects"].contains($0) }
    }

    private static func isSent(_ event: SuperNode.Event) -> Bool {
        if case .sent = event { true } else { false }
    }

    @Sendable private static func train(_ question: SuperNode.Question) async throws -> FlowerRecords {
        let array = try #require(question.records.arrays["arrays"]?["a"])
        let numbers = array.data.withUnsafeBytes { $0.bindMemory(to: Float.self).map { $0 + 1 } }
        return FlowerRecords(
            arrays: ["arrays": ["a": SuperLink.numbers(numbers)]], metrics: ["metrics": ["num-examples": .int(3)]])
    }

    @Test func answersAMessage() async throws {
        try SuperLink.ask(host)
        let events = try await run(node(), until: Self.isSent, answer: Self.train)
        let (metadata, records, _) = try SuperLink.answered(host)
        #expect(records?.arrays == ["arrays": ["a": SuperLink.numbers([2, 3])]])
        #expect(records?.metrics == ["metrics": ["num-examples": .int(3)]])
        #expect(metadata.source == SuperLink.node && metadata.destination == 1 && metadata.run == 7)
        #expect(metadata.destinationTask == 11 && metadata.sourceTask == nil && metadata.type == "train")
        #expect(metadata.replyTo == SuperLink.with(host) { $0.question?.tree.id })
        #expect(metadata.timeToLive < 3600)
        #expect(events.first == .joined(node: SuperLink.node))
        let calls = SuperLink.with(host) { $0.calls }
        #expect(calls.prefix(2) == ["register-node", "activate-node"] && calls.last == "deactivate-node")
    }

    @Test func goesOnWhereItEnded() async throws {
        try SuperLink.ask(host)
        _ = try await failure(as: CancellationError.self) { _ in throw CancellationError() }
        let pulls = SuperLink.with(host) { $0.calls.filter { $0 == "pull-object" }.count }
        #expect(SuperLink.with(host) { $0.calls.filter { $0 == "activate-node" }.count } == 1)
        SuperLink.with(host) { $0.faults["push-object"] = [(400, "")] }
        _ = try await failure()
        try await run(node(), until: Self.isSent) { _ in throw Interrupted() }
        #expect(try SuperLink.answered(host).1?.arrays == ["arrays": ["a": SuperLink.numbers([2, 3])]])
        #expect(SuperLink.with(host) { $0.calls.filter { $0 == "pull-object" }.count } == pulls)
        #expect(try keeps().isEmpty)
    }

    @Test func waitsForAServerThatCannotBeReached() async throws {
        try SuperLink.ask(host)
        SuperLink.with(host) {
            $0.faults = ["activate-node": [(0, "")], "pull-object": [(503, ""), (0, "")], "push-object": [(502, "")]]
        }
        let events = try await run(node(), until: Self.isSent, answer: Self.train)
        #expect(try SuperLink.answered(host).1 != nil)
        #expect(events.filter { if case .waiting = $0 { true } else { false } }.count == 4)
        #expect(events.filter { $0 == .reached }.count == 3)
    }

    @Test(arguments: [500, 503, 429])
    func endsAfterAServerHasFailedManyTimes(status: Int) async throws {
        SuperLink.with(host) { $0.faults["pull-messages"] = Array(repeating: (status, ""), count: 100) }
        let error = try await failure(of: node(.init(heartbeat: 30, poll: 0.01, lease: 0, retry: 0.001)))
        let said = "is busy (\(status)), 10 times in a row; ask its operator, and join again later."
        #expect(error?.sentence.english.hasSuffix(said) == true)
        #expect(SuperLink.with(host) { $0.calls.count { $0 == "pull-messages" } } == 10)
    }

    @Test func saysThatItCouldNotAndNotWhy() async throws {
        try SuperLink.ask(host)
        let events = try await run(node(), until: Self.isSent) { _ in throw MeSPError("secret") }
        let (_, records, reason) = try SuperLink.answered(host)
        #expect(records == nil && reason == "The node could not do it.")
        #expect(events.contains { if case .failed(_, "secret") = $0 { true } else { false } })
    }

    private static func isDropped(_ event: SuperNode.Event) -> Bool {
        if case .dropped = event { true } else { false }
    }

    @Test(arguments: ["pull-object", "push-messages"])
    func dropsAMessageOfARunThatHasEnded(call: String) async throws {
        try SuperLink.ask(host)
        SuperLink.with(host) { $0.faults[call] = [(412, #"{"code": 2007, "detail": "finished"}"#)] }
        try await run(node(), until: Self.isDropped, answer: Self.train)
        #expect(try keeps().isEmpty)
    }

    @Test func dropsAMessageThatNobodyWaitsFor() async throws {
        try SuperLink.ask(host, age: 3601)
        let events = try await run(node(), until: Self.isDropped) { _ in throw Interrupted() }
        #expect(!events.contains { if case .failed = $0 { true } else { false } })
        #expect(try keeps().isEmpty)
        #expect(SuperLink.with(host) { !$0.calls.contains("pull-object") && $0.answer == nil })
        try SuperLink.ask(host, age: 3599.5)
        SuperLink.with(host) { $0.faults["pull-object"] = Array(repeating: (500, ""), count: 100) }
        try await run(node(), until: Self.isDropped, answer: Self.train)
        #expect(try keeps().isEmpty)
        SuperLink.with(host) { $0.faults = [:] }
        try await answersTheNext()
    }

    private func answersTheNext(at host: String? = nil) async throws {
        let host = host ?? self.host
        let next = FlowerRecords(arrays: ["arrays": ["a": SuperLink.numbers([5, 6])]])
        try SuperLink.ask(host, next)
        try await run(node(at: host), until: Self.isSent) { question in
            #expect(question.records == next)
            return try await Self.train(question)
        }
        #expect(try SuperLink.answered(host).1?.arrays == ["arrays": ["a": SuperLink.numbers([6, 7])]])
        #expect(try keeps().isEmpty)
    }

    /// A server reports an unknown message as an internal error, and a node repeats such a call. So a node must forget messages of another server.
    @Test(arguments: [false, true])
    func forgetsAMessageOfAnotherServer(isElsewhere: Bool) async throws {
        try SuperLink.ask(host)
        _ = try await failure(as: CancellationError.self) { _ in throw CancellationError() }
        #expect(try !keeps().isEmpty)
        if isElsewhere {
            // The other server also accepts the node's previous id.
            try await answersTheNext(at: UUID().uuidString.lowercased() + ".test")
        } else {
            SuperLink.with(host) { $0.node = 5 }
            try await answersTheNext()
        }
    }

    @Test func aMessageThatWasHalfRemovedLeavesNothing() async throws {
        try SuperLink.ask(host)
        SuperLink.with(host) { $0.faults["push-object"] = [(400, "")] }
        _ = try await failure { question in
            try Data().write(to: question.folder.appendingPathComponent("kept"))
            return try await Self.train(question)
        }
        #expect(try Set(keeps()).isSuperset(of: ["message", "reply", "work/kept"]))
        try FileManager.default.removeItem(at: folder.appendingPathComponent("message"))
        try SuperLink.ask(host, FlowerRecords(arrays: ["arrays": ["a": SuperLink.numbers([5, 6])]]))
        try await run(node(), until: Self.isSent) { question in
            #expect(try FileManager.default.contentsOfDirectory(atPath: question.folder.path).isEmpty)
            return try await Self.train(question)
        }
        #expect(try SuperLink.answered(host).1?.arrays == ["arrays": ["a": SuperLink.numbers([6, 7])]])
    }

    @Test func refusesInASentence() async throws {
        func sentence(_ faults: [String: [(status: Int, body: String)]]) async throws -> String? {
            SuperLink.with(host) { $0.faults = faults }
            return try await failure(of: node(.init(heartbeat: 30, poll: 0.01, lease: 0)))?.sentence.english
        }
        #expect(try await sentence(["register-node": [(404, "not found")]])?.contains("Flower 1.41") == true)
        #expect(try await sentence(["activate-node": [(401, "{}")]])?.contains("clock") == true)
        let unknown = (412, #"{"code": 2004, "detail": "No SuperNode found"}"#)
        #expect(try await sentence(["activate-node": [unknown]])?.contains("flwr supernode register") == true)
        for address in ["ftp://a", "localhost:8000", "http://", "https://", "http://192.168.0.1:8000"] {
            #expect(throws: MeSPError.self) {
                try SuperNode(server: try #require(URL(string: address)), folder: folder, mostBytes: 0)
            }
        }
        try folder.appendingPathComponent("node.key").write("no key")
        #expect(throws: MeSPError.self) { try node() }
    }

    enum Damage: String, CaseIterable {
        case anotherObject = "not the one that was asked for"
        case noObject = "lacks a part"
        case otherNumbers = "neither float32 nor uint16"
        case tooLarge = "more bytes than any answer"
        case tooMuch = "more than this model's adapters"
        case tooMany = "adapters take"
        case noAnswer = "other than a protobuf message"
    }

    @Test(arguments: Damage.allCases)
    func goesOnAfterAMessageThatItCannotRead(damage: Damage) async throws {
        try SuperLink.ask(host)
        switch damage {
        case .anotherObject, .noObject:
            SuperLink.with(host) { state in
                for (id, content) in state.question?.contents ?? [:] where id != state.question?.tree.id {
                    state.question?.contents[id] = damage == .noObject ? nil : content + [0]
                }
            }
        case .otherNumbers:
            try SuperLink.ask(host) { store in
                var npy = SuperLink.numbers([1, 2]).npy
                npy.replaceSubrange(try #require(npy.range(of: Data("<f4".utf8))), with: Data("<i8".utf8))
                let chunk = try store.add("ArrayChunk") { _ in npy }
                let array = try store.add("Array", children: [chunk]) { _ in
                    Data(#"{"dtype": "int64", "shape": [2], "stype": "numpy.ndarray", "arraychunk_ids": [0]}"#.utf8)
                }
                return try SuperLink.add(array: array, to: &store)
            }
        case .tooLarge:
            SuperLink.with(host) { $0.faults["pull-object"] = [(200, String(repeating: "x", count: 9 << 20))] }
        case .tooMuch:
            try SuperLink.ask(
                host, FlowerRecords(arrays: ["arrays": ["a": SuperLink.numbers(Array(repeating: 1, count: 1 << 18))]]))
        case .tooMany:
            try SuperLink.ask(host) { store in
                let leaves = try (0..<5000).map { number in try store.add("ArrayChunk") { _ in Data("\(number)".utf8) }
                }
                return try store.add("RecordDict", children: leaves) { _ in Data("{}".utf8) }
            }
        case .noAnswer: SuperLink.with(host) { $0.faults["pull-object"] = [(200, "x")] }
        }
        let events = try await run(node(), until: Self.isSent) { _ in throw Interrupted() }
        #expect(events.contains { if case .failed(_, let why) = $0 { why.contains(damage.rawValue) } else { false } })
        let (_, records, reason) = try SuperLink.answered(host)
        #expect(records == nil && reason == "The node could not do it.")
        try await answersTheNext()
    }

    @Test func goesOnAfterAMessageThatIsNone() async throws {
        SuperLink.with(host) {
            $0.faults["pull-messages"] = [
                (200, "\u{12}\u{0}\u{1a}\u{0}"), (200, "\u{12}\u{2}\u{a}\u{0}\u{1a}\u{3}\u{a}\u{1}x"),
            ]
        }
        try await answersTheNext()
        for name in ["message", "reply"] {
            for content in ["", "x", "\u{a}\u{0}", "\u{a}\u{0}\u{12}\u{0}"] {
                try Data(content.utf8).write(to: folder.appendingPathComponent(name))
                try await answersTheNext()
            }
        }
        try SuperLink.ask(host)
        SuperLink.with(host) { $0.faults["push-object"] = [(400, "")] }
        _ = try await failure()
        try Data("x".utf8).write(to: folder.appendingPathComponent("reply"))
        try await run(node(), until: Self.isSent, answer: Self.train)
        #expect(try SuperLink.answered(host).1?.arrays == ["arrays": ["a": SuperLink.numbers([2, 3])]])
    }

    @Test(arguments: ["pull-messages", "pull-object", "push-messages", "push-object", "send-node-heartbeat"])
    func endsWhileTheServerKeepsItBusy(call: String) async throws {
        try SuperLink.ask(host)
        SuperLink.with(host) { $0.faults[call] = Array(repeating: (SuperLink.never, ""), count: 100) }
        let task = Self.started(try node(.init(heartbeat: 0.1, poll: 0.01, lease: 0)))
        while SuperLink.with(host, { !$0.calls.contains(call) }) { try await Task.sleep(for: .milliseconds(5)) }
        task.cancel()
        await #expect(throws: CancellationError.self) { try await task.value }
        SuperLink.with(host) { $0.faults = [:] }
        if call != "send-node-heartbeat" { try await run(self.node(), until: Self.isSent, answer: Self.train) }
    }

    @Test func endsBetweenMessages() async throws {
        try SuperLink.ask(host)
        let node = try node()
        let task = Self.started(node) { [host] event in
            if case .sent = event { SuperLink.with(host) { $0.isDelivered = false } }
        }
        while SuperLink.with(host, { $0.calls.count { $0 == "push-messages" } }) < 3 {
            try await Task.sleep(for: .milliseconds(5))
        }
        task.cancel()
        await #expect(throws: CancellationError.self) { try await task.value }
    }

    @Test func keepsAMessageThatArrivesWhileItEnds() async throws {
        try SuperLink.ask(host)
        let hold = DispatchSemaphore(value: 0)
        SuperLink.with(host) { $0.held["pull-messages"] = hold }
        let task = Self.started(try node())
        while SuperLink.with(host, { !$0.isDelivered }) { try await Task.sleep(for: .milliseconds(5)) }
        task.cancel()
        for _ in 0..<100 { hold.signal() }
        await #expect(throws: CancellationError.self) { try await task.value }
        try await run(node(), until: Self.isSent, answer: Self.train)
        #expect(try SuperLink.answered(host).1?.arrays == ["arrays": ["a": SuperLink.numbers([2, 3])]])
    }

    @Test func sendsWhatIsItsAnswerOnce() async throws {
        try SuperLink.ask(host)
        let question = try #require(SuperLink.with(host) { $0.question?.tree })
        SuperLink.with(host) {
            $0.alsoWanted = [question.id, "../node.key"] + Array(repeating: question.id, count: 50)
        }
        try await run(node(), until: Self.isSent, answer: Self.train)
        let (pushed, wanted) = SuperLink.with(host) { state in
            (state.calls.count { $0 == "push-object" }, state.answer?.tree.ids.count)
        }
        #expect(pushed == wanted)
    }

    @Test func twoNodesDoNotShareAFolder() async throws {
        let first = try node()
        let (events, continuation) = AsyncStream.makeStream(of: SuperNode.Event.self)
        let task = Self.started(first) { continuation.yield($0) }
        for await event in events { if case .joined = event { break } }
        let error = try await failure()
        #expect(error?.sentence.english.contains("is writing to") == true)
        task.cancel()
        await #expect(throws: CancellationError.self) { try await task.value }
        try SuperLink.ask(host)
        try await run(node(), until: Self.isSent, answer: Self.train)
    }

    @Test func followsNoLinkInItsFolder() async throws {
        let elsewhere = folder.appendingPathComponent("elsewhere")
        try elsewhere.write("kept")
        try folder.appendingPathComponent(".lock").link(to: elsewhere)
        _ = try await failure()
        #expect(try elsewhere.readText() == "kept")
    }

    @Test func keepsItsKey() throws {
        func made() throws -> NodeKey { try NodeKey(file: folder.appendingPathComponent("key")) }
        let key = try made()
        #expect(try made().publicKey == key.publicKey)
        #expect(key.openSSH.hasPrefix("ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABB"))
        #expect(key.publicKey.split(separator: "\n").dropFirst().allSatisfy { $0.count <= 64 || $0.hasPrefix("-----") })
        let rights = try FileManager.default.attributesOfItem(atPath: folder.appendingPathComponent("key").path)
        #expect(rights[.posixPermissions] as? Int == 0o600)
    }
}
