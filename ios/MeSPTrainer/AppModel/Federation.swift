import Foundation
import MeSPControl
import MeSPCore
import MeSPFederation
import MeSPSentences
import Observation

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// Federated training: people train the adapters of one bundle together, and each person's text stays on that person's device.
///
/// The app answers a message of the server with the adapters of a run.
@MainActor @Observable public final class Federation {
    public var address = ""
    /// The device's name on the server. If it is empty, the server gets `node` and the node's number as the name.
    public var name = ""
    /// Whether to avoid expensive networks and Low Data Mode.
    public var sparesData = true
    public var needsCharger = true { didSet { followCharger() } }

    public enum State: Sendable, Equatable {
        case off
        case joining
        case waiting
        case waitingForCharger
        case training(round: String)
    }
    public private(set) var state = State.off
    public var isOn: Bool { state != .off }
    package private(set) var unreachable: Sentence?
    public private(set) var passedOver: Sentence?
    public var status: Sentence {
        if let unreachable { return unreachable }
        return switch state {
        case .off: "Not taking part"
        case .joining: "Joining"
        case .waiting: "Waiting for the next round"
        case .waitingForCharger: "Waiting for the charger"
        case .training(let round): "Training in round \(round)"
        }
    }
    public private(set) var bundle: StoredBundle?

    public struct Round: Sendable, Identifiable, Equatable {
        public let id: String
        public let name: String
        public let bytesDown: Int
        public var bytesUp: Int?
        public var problem: Sentence?
    }
    public private(set) var rounds = [Round]()

    public static let agreement: Sentence =
        "This device sends the adapters that it trains, the number of tokens that they were trained on, the mean loss, the peak of memory, and the name that you give it. Your texts, your choices and the model's answers stay here. Adapters can reveal something about the text that they were trained on, so take part only if you trust the operator of the server."

    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private let controller: RunController
    /// Opens the node from the server's address, the node's folder, the largest message size in bytes and a session configuration.
    @ObservationIgnored var open: @Sendable (URL, URL, Int, URLSessionConfiguration) throws -> SuperNode = {
        try SuperNode(server: $0, folder: $1, mostBytes: $2, configuration: $3)
    }
    @ObservationIgnored private var work: Task<Void, any Error>?

    init(monitor: any DeviceMonitor, controller: RunController) {
        (self.monitor, self.controller) = (monitor, controller)
        monitor.observers.append { [weak self] _ in self?.followCharger() }
    }

    func join(with bundle: StoredBundle, data: URL?, folder: URL) async throws {
        guard !isOn else { return }
        guard let server = URL(string: address.trimmingCharacters(in: .whitespaces)) else {
            throw MeSPError("\(address) is not an address; write it as in https://links.example.org:8000.")
        }
        let node = try open(server, folder, FederatedRun.mostBytes(bundle.url), configuration)
        (state, self.bundle, rounds, passedOver) = (.joining, bundle, [], nil)
        defer { (state, unreachable, self.bundle, work) = (.off, nil, nil, nil) }
        let (events, sender) = AsyncStream.makeStream(of: SuperNode.Event.self)
        let answer: @Sendable (SuperNode.Question) async throws -> FlowerRecords = { [weak self] question in
            guard let self else { throw CancellationError() }
            return try await self.answer(question, with: bundle.url, data)
        }
        let work = Task.detached {
            defer { sender.finish() }
            try await node.run(report: { sender.yield($0) }, answer: answer)
        }
        self.work = work
        for await event in events { take(event) }
        do { try await work.value } catch is CancellationError {}
    }

    /// Leaves the federation and stops its run. A message that was received but not answered is kept. If the app joins again in time, it answers that
    /// message.
    public func leave() { work?.cancel() }

    private var configuration: URLSessionConfiguration {
        let configuration = URLSessionConfiguration.ephemeral
        #if canImport(Darwin)
            configuration.allowsExpensiveNetworkAccess = !sparesData
            configuration.allowsConstrainedNetworkAccess = !sparesData
        #endif
        return configuration
    }

    private func answer(_ question: SuperNode.Question, with bundle: URL, _ data: URL?) async throws -> FlowerRecords {
        let round = try FederatedRun(question, bundle: bundle, data: data)
        defer { state = .waiting }
        while lacksCharger || controller.isRunning, .now < round.deadline {
            if lacksCharger { state = .waitingForCharger }
            try await Task.sleep(for: .milliseconds(200))
        }
        guard .now < round.deadline else { throw late }
        state = .training(round: question.group)
        let limit = Task { [controller] in
            try await Task.sleep(until: round.deadline, clock: .continuous)
            controller.stop()
        }
        defer { limit.cancel() }
        try await controller.run(round.settings)
        guard .now < round.deadline else { throw late }
        return try round.answer(as: name.isEmpty ? nil : name)
    }

    private var late: MeSPError { MeSPError("The server no longer waits for this round.") }

    private var lacksCharger: Bool { needsCharger && monitor.battery?.isCharging == false }

    private func followCharger() {
        guard case .training = state else { return }
        if lacksCharger { controller.pause() } else { controller.resume() }
    }

    private func take(_ event: SuperNode.Event) {
        if case .waiting(let why) = event { unreachable = why } else { unreachable = nil }
        switch event {
        case .joined: if state == .joining { state = .waiting }
        case .received(let question, let bytes):
            passedOver = nil
            rounds.insert(Round(id: question.id, name: question.group, bytesDown: bytes), at: 0)
        case .sent(let question, let bytes): end(question) { $0.bytesUp = bytes }
        case .dropped(let question, let why): end(question) { $0.problem = why }
        case .failed(let question, let why): end(question) { $0.problem = "\(why)" }
        case .passedOver(let why): passedOver = why
        case .waiting, .reached: break
        }
    }

    private func end(_ question: SuperNode.Question, _ change: (inout Round) -> Void) {
        // An earlier launch of the app may have received the message, so `rounds` may lack it.
        if !rounds.contains(where: { $0.id == question.id }) {
            rounds.insert(Round(id: question.id, name: question.group, bytesDown: 0), at: 0)
        }
        for index in rounds.indices where rounds[index].id == question.id { change(&rounds[index]) }
    }
}
