import Foundation
import MeSPControl
import MeSPCore
import MeSPFederation
import MeSPSentences
import Observation

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// The app's connection to a federation. In a federation people train the adapters of one bundle together, and each person's text stays on that
/// person's device. The app answers each message of the server with a run.
@MainActor @Observable public final class Federation {
    /// The SuperLink's address, as the person typed it.
    public var address = ""
    /// The name that the server gives this device; empty for a number.
    public var name = ""
    /// Whether to use only networks that cost nothing extra and are not in Low Data Mode.
    public var sparesData = true
    /// Whether to train only on the charger.
    public var needsCharger = true { didSet { followCharger() } }

    public enum State: Sendable, Equatable {
        case off
        case joining
        /// Waiting for the server's next message.
        case waiting
        case waitingForCharger
        case training(round: String)
    }
    public private(set) var state = State.off
    public var isOn: Bool { state != .off }
    /// The reason why the server cannot be reached now; nil if it can.
    package private(set) var unreachable: Sentence?
    /// The reason why the last message could not be answered; nil if it could.
    public private(set) var passedOver: Sentence?
    /// A sentence about the present activity.
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
    /// The bundle that is trained; nil while the federation is off.
    public private(set) var bundle: StoredBundle?

    /// A message of the server, and its outcome.
    public struct Round: Sendable, Identifiable, Equatable {
        public let id: String
        /// The name that the server gives the round.
        public let name: String
        public let bytesDown: Int
        /// The size of the answer in bytes; nil until it has been sent.
        public var bytesUp: Int?
        /// The reason why the message could not be answered; nil if it was answered, or will be.
        public var problem: Sentence?
    }
    /// The rounds, the latest first.
    public private(set) var rounds = [Round]()

    /// A statement of which data leave the device and which data stay. The person agrees to this statement before joining.
    public static let agreement: Sentence =
        "This device sends the adapters that it trains, the number of tokens that they were trained on, the mean loss, the peak of memory, and the name that you give it. Your texts, your choices and the model's answers stay here. Adapters can reveal something about the text that they were trained on, so take part only if you trust the operator of the server."

    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private let controller: RunController
    /// A function that opens the node. Its parameters are the server's address, the node's folder, the largest size of a message in bytes, and the
    /// session configuration.
    @ObservationIgnored var open: @Sendable (URL, URL, Int, URLSessionConfiguration) throws -> SuperNode = {
        try SuperNode(server: $0, folder: $1, mostBytes: $2, configuration: $3)
    }
    @ObservationIgnored private var work: Task<Void, any Error>?

    init(monitor: any DeviceMonitor, controller: RunController) {
        (self.monitor, self.controller) = (monitor, controller)
        monitor.observers.append { [weak self] _ in self?.followCharger() }
    }

    /// Joins the federation. Returns when the person leaves it.
    ///
    /// - Parameters:
    ///   - data: the folder of the text's tokens; nil for the bundle's own text.
    ///   - folder: the folder for the node's files.
    /// - Throws: `MeSPError`
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

    /// Leaves the federation. A run in progress stops. The server's message is kept. If the app joins again in time, it answers that message.
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

    /// Pauses the run if `needsCharger` is set and the battery is not charging. Otherwise resumes the run.
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
        // The list lacks a message that an earlier launch of the app received, so the message is added.
        if !rounds.contains(where: { $0.id == question.id }) {
            rounds.insert(Round(id: question.id, name: question.group, bytesDown: 0), at: 0)
        }
        for index in rounds.indices where rounds[index].id == question.id { change(&rounds[index]) }
    }
}
