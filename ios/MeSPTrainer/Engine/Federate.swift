import Foundation
import MeSPCore
import MeSPFederation
import MeSPFiles
import MeSPSentences

struct FederationSettings: Decodable {
    /// The address of a SuperLink, such as `https://links.example.org:8000`.
    let superlink: String
    /// The folder for the node's key and the received message.
    let folder: String
    let bundle: String
    /// A folder of tokens; nil for the bundle's own text.
    let data: String?
    /// The name of this node in its answers; nil for the node's number.
    let name: String?
    let memoryLimitMb: Double?

    init(contentsOf url: URL) throws { self = try readSettings(url) }

    /// Takes part in a federation until a signal arrives or an error occurs. Prints one line of JSON for each event.
    func run() throws {
        guard let server = URL(string: superlink) else {
            throw MeSPError("\(superlink) is not an address; write it as in https://links.example.org:8000.")
        }
        let node = try SuperNode(
            server: server, folder: URL(fileURLWithPath: folder),
            mostBytes: FederatedRun.mostBytes(URL(fileURLWithPath: bundle)))
        let outcome = Guarded<Result<Void, any Error>?>(nil)
        let task = Task.detached {
            do {
                try await node.run(report: tell) { question in
                    try await withCheckedThrowingContinuation { continuation in
                        MLXWork.start("round") { continuation.resume(with: Result { try answer(question) }) }
                    }
                }
                outcome.withLock { $0 = .success(()) }
            } catch {
                outcome.withLock { $0 = .failure(error) }
            }
        }
        while outcome.withLock({ $0 }) == nil {
            // On Linux, a semaphore's timeout would depend on the wall clock.
            usleep(200_000)
            if stopRequested != 0 { task.cancel() }
        }
        do { try outcome.withLock { $0 }?.get() } catch is CancellationError {}
        try print("end", [String: String]())
    }

    private func answer(_ question: SuperNode.Question) throws -> FlowerRecords {
        let round = try FederatedRun(
            question, bundle: URL(fileURLWithPath: bundle), data: data.map { URL(fileURLWithPath: $0) },
            memoryLimit: memoryLimitMb.map { Int(whole: $0 * 1e6) })
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
            stopRequested = 1  // without a reader the node ends
        }
    }
}
