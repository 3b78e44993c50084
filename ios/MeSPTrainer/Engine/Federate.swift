import Foundation
import MeSPCore
import MeSPFederation
import MeSPFiles
import MeSPSentences

/// The input of `mesp-engine federate`: which SuperLink to join, and what to train on.
struct FederationSettings: Decodable {
    /// A SuperLink's address, as in `https://links.example.org:8000`.
    let superlink: String
    /// The node's key and what it has received.
    let folder: String
    let bundle: String
    /// A folder of tokens; nil for the bundle's own text.
    let data: String?
    /// The server's name of this node; nil for its number.
    let name: String?
    let memoryLimitMb: Double?

    init(contentsOf url: URL) throws { self = try readSettings(url) }

    /// The longest time that a node waits for its server after a signal, in fifths of a second.
    private static let mostWaits = 150

    /// Takes part in a federation until a signal comes. Prints a record for each thing that happens.
    func run() throws {
        guard let server = URL(string: superlink) else {
            throw MeSPError("\(superlink) is not an address; write it as in https://links.example.org:8000.")
        }
        let node = try SuperNode(
            server: server, folder: URL(fileURLWithPath: folder),
            mostBytes: FederatedRun.mostBytes(URL(fileURLWithPath: bundle)))
        let outcome = Outcome()
        let task = Task.detached {
            do {
                try await node.run(report: tell) { question in
                    try await withCheckedThrowingContinuation { continuation in
                        MLXWork.start("round") {
                            outcome.isTraining = true
                            let result = Result { try answer(question) }
                            outcome.isTraining = false
                            continuation.resume(with: result)
                        }
                    }
                }
                outcome.end = .success(())
            } catch {
                outcome.end = .failure(error)
            }
        }
        var waits = 0
        // A run is saved, however long that takes. Foundation for Linux can stand still with what a server sends.
        while outcome.end == nil, waits < Self.mostWaits {
            // Not by a semaphore, whose time limit is one of the wall clock on Linux.
            usleep(200_000)
            guard stopRequested != 0 else { continue }
            task.cancel()
            if !outcome.isTraining { waits += 1 }
        }
        do { try outcome.end?.get() } catch is CancellationError {}
        try print("end", [String: String]())
    }

    private func answer(_ question: SuperNode.Question) throws -> FlowerRecords {
        let round = try FederatedRun(
            question, bundle: URL(fileURLWithPath: bundle), data: data.map { URL(fileURLWithPath: $0) },
            memoryLimit: memoryLimitMb.map { Int($0 * 1e6) })
        try Run.run(
            round.settings,
            atBlock: { _ in
                try checkStop()
                if .now > round.deadline { throw MeSPError("The run took longer than the server waits.") }
            })
        return try round.answer(as: name)
    }

    private func tell(_ event: SuperNode.Event) {
        struct Message: Encodable {
            let id, kind, round: String
            var bytes: Int?
            var message: String?

            init(_ question: SuperNode.Question, bytes: Int? = nil, message: String? = nil) {
                (id, kind, round) = (question.id, question.type, question.group)
                (self.bytes, self.message) = (bytes, message)
            }
        }
        do {
            switch event {
            case .joined(let node): try print("joined", ["node": node])
            case .received(let question, let bytes): try print("received", Message(question, bytes: bytes))
            case .sent(let question, let bytes): try print("sent", Message(question, bytes: bytes))
            case .dropped(let question, let why): try print("dropped", Message(question, message: why.english))
            case .failed(let question, let why): try print("failed", Message(question, message: why))
            case .passedOver(let why): try print("passed_over", ["message": why.english])
            case .waiting(let why): try print("waiting", ["message": why.english])
            case .reached: try print("reached", [String: String]())
            }
        } catch {
            stopRequested = 1  // without a reader it is over
        }
    }
}

private final class Outcome: @unchecked Sendable {
    private let lock = NSLock()
    private var lockedEnd: Result<Void, any Error>?
    private var lockedIsTraining = false

    /// How the node ended; nil before.
    var end: Result<Void, any Error>? {
        get { lock.withLock { lockedEnd } }
        set { lock.withLock { lockedEnd = newValue } }
    }

    /// Whether a round is being trained or saved.
    var isTraining: Bool {
        get { lock.withLock { lockedIsTraining } }
        set { lock.withLock { lockedIsTraining = newValue } }
    }
}
