import Foundation
import MeSPBundle
import MeSPFiles
import MeSPSentences

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// A client of a Flower federation. It joins a SuperLink, waits for messages, and sends answers.
///
/// The received message and the unsent answer are saved in files, so a restarted node continues its work. The node drops a message that the server no
/// longer waits for. If the content of a message cannot be read or answered, the node sends an answer that reports a failure.
package struct SuperNode: Sendable {
    package enum Event: Sendable, Equatable {
        case joined(node: UInt64)
        case received(Question, bytes: Int)
        /// An answer has been sent. `bytes` excludes the objects that the server already had.
        case sent(Question, bytes: Int)
        /// The server no longer waits for the answer to a message.
        case dropped(Question, Sentence)
        /// A message could not be read or answered. The server learns of the failure but not of the reason.
        case failed(Question, String)
        case passedOver(Sentence)
        case waiting(Sentence)
        case reached
    }

    package struct Question: Sendable, Equatable {
        package let id: String
        package let node: UInt64
        /// The type: `train`, `evaluate` or `query`, optionally followed by a dot and a name.
        package let type: String
        package let run: UInt64
        package let group: String
        /// The time when the server's app created the message, by the server's clock.
        package let created: Date
        package internal(set) var records = FlowerRecords()
        /// The folder for files of the work on this message. It is removed when the answer has been sent or the message has been dropped.
        package let folder: URL
    }

    let api: FleetAPI
    let folder: URL
    let mostBytes: Int
    let seconds: Seconds

    /// Waiting times, in seconds.
    struct Seconds: Sendable {
        /// The heartbeat interval that the node announces to the server. The node sends a heartbeat after 80% of this interval.
        var heartbeat = 30.0
        var poll = 3.0
        /// The time for which a node retries to activate its key. The server refuses a key for some time if its node ended without deactivation.
        var lease = 75.0
        /// The time after which a failed call is repeated. It doubles with each failure, up to 60 times this time.
        var retry = 1.0
    }

    /// - Parameters:
    ///   - server: the address of a SuperLink, such as `https://links.example.org:8000`. An http address must be this machine's.
    ///   - folder: the folder for the node's files and, except on iOS, for its private key. It is created if necessary.
    ///   - configuration: the session configuration, which sets the allowed networks.
    /// - Throws: an error if the address is not valid, or the folder or the key cannot be used.
    package init(
        server: URL, folder: URL, mostBytes: Int, configuration: URLSessionConfiguration = .ephemeral
    ) throws {
        #if canImport(FoundationNetworking)
            let transport = CurlTransport()
        #else
            let transport = URLSessionTransport(configuration: configuration)
        #endif
        try self.init(server: server, folder: folder, mostBytes: mostBytes, transport: transport)
    }

    init(
        server: URL, folder: URL, mostBytes: Int, transport: any HTTPTransport, seconds: Seconds = Seconds()
    ) throws {
        guard ["http", "https"].contains(server.scheme), let host = server.host, !host.isEmpty else {
            throw MeSPError(
                "\(server.absoluteString) is not a SuperLink's address; write it as in https://links.example.org:8000.")
        }
        guard server.scheme == "https" || ["127.0.0.1", "::1", "localhost"].contains(host) else {
            throw MeSPError(
                "\(server.absoluteString) is an address without TLS, where others can read and change what is sent; have the SuperLink started with --ssl-certfile, and write https."
            )
        }
        try explaining({ try makeFolder(folder) }, as: { "\(folder.path) cannot be made (\($0))." })
        let key = try NodeKey(file: folder.appendingPathComponent("node.key"))
        try Data(key.openSSH.utf8).write(to: folder.appendingPathComponent("node.pub"), options: .atomic)
        api = FleetAPI(server: server, key: key, transport: transport)
        (self.folder, self.mostBytes, self.seconds) = (folder, mostBytes, seconds)
    }

    /// Takes part in the federation until the task is cancelled.
    ///
    /// - Parameters:
    ///   - answer: returns the answer to a message. The closure is called for one message at a time.
    /// - Throws: `CancellationError`; or another error, for example if the server refuses the node or another node uses the folder.
    package func run(
        report: @escaping @Sendable (Event) -> Void,
        answer: @escaping @Sendable (Question) async throws -> FlowerRecords
    ) async throws {
        let lock = try FolderLock(folder)
        defer { withExtendedLifetime(lock) {} }
        let node = try await join(report)
        report(.joined(node: node))
        do {
            try await withThrowingTaskGroup(of: Void.self) { group in
                defer { group.cancelAll() }
                group.addTask { while true { try await beat(node, report) } }
                group.addTask { while true { try await handleMessage(node, report, answer) } }
                try await group.next()
            }
        } catch {
            // The current task may be cancelled, so a new task makes the call.
            await Task { _ = try? await api.call("deactivate-node", within: 5) { $0.add(1, node) } }.value
            throw error
        }
    }

    // MARK: - Being there

    /// Joins the server. Uses the previous id again if the server still knows this id.
    private func join(_ report: (Event) -> Void) async throws -> UInt64 {
        let (file, server) = (folder.appendingPathComponent("node.id"), api.server.absoluteString)
        let last = (try? String(contentsOf: file, encoding: .utf8))?.split(separator: "\n").map(String.init) ?? []
        if last.count == 2, last[1] == server, let id = UInt64(last[0]), (try? await isKnown(id)) == true {
            return id
        }
        let id = try await activate(report)
        // A server that has lost its state assigns another id. The message saved here is then unknown to the server.
        if last != [String(id), server] { try PendingMessage(folder: folder, mostBytes: mostBytes).empty() }
        try writeDurably(Data("\(id)\n\(server)\n".utf8), to: file)
        return id
    }

    /// Sends a heartbeat to the server.
    ///
    /// - Returns: whether the server knows the node.
    private func isKnown(_ node: UInt64) async throws -> Bool {
        try await api.call("send-node-heartbeat") {
            $0.add(1) { $0.add(1, node) }
            $0.add(2, seconds.heartbeat)
        }
        .number(1) != 0
    }

    private func activate(_ report: (Event) -> Void) async throws -> UInt64 {
        let key = Data(api.key.publicKey.utf8)
        do {
            try await persistently(report) { try await api.call("register-node") { $0.add(1, key) } }
        } catch let refusal as FleetAPI.Refusal
            where [FleetAPI.Refusal.keyIsRegistered, FleetAPI.Refusal.registersByHand].contains(refusal.code)
        {}
        let began = ContinuousClock.now
        while true {
            do {
                let answer = try await persistently(report) {
                    try await api.call("activate-node") {
                        $0.add(1, key)
                        $0.add(2, seconds.heartbeat)
                    }
                }
                return answer.number(1)
            } catch let refusal as FleetAPI.Refusal where refusal.code == FleetAPI.Refusal.cannotActivate {
                guard ContinuousClock.now - began < .seconds(seconds.lease) else {
                    throw MeSPError(
                        "\(api.server.absoluteString) does not let this node in: have \(folder.appendingPathComponent("node.pub").path) registered there with flwr supernode register, or end the other node that uses its key."
                    )
                }
                report(.waiting("\(api.server.absoluteString) does not let this node in yet."))
                try await Task.sleep(for: .seconds(5))
            }
        }
    }

    private func beat(_ node: UInt64, _ report: (Event) -> Void) async throws {
        try await Task.sleep(for: .seconds(seconds.heartbeat * 0.8))
        guard try await persistently(report, { try await isKnown(node) }) else {
            throw MeSPError("\(api.server.absoluteString) no longer knows this node; join again.")
        }
    }

    /// The number of failing answers in a row after which the node ends.
    private static let mostFailures = 10

    /// Calls `body` and returns its result. Repeats the call at growing intervals while the server is unreachable, or fails.
    @discardableResult
    func persistently<R>(_ report: (Event) -> Void, _ body: () async throws -> R) async throws -> R {
        var (pause, failures) = (seconds.retry, 0)
        while true {
            do {
                let result = try await body()
                if pause > seconds.retry { report(.reached) }
                return result
            } catch let failure as FleetAPI.Unreachable {
                failures = failure.hasAnswer ? failures + 1 : 0
                guard failures < Self.mostFailures else {
                    throw MeSPError(
                        "\(failure.sentence), \(failures) times in a row; ask its operator, and join again later."
                    )
                }
                report(.waiting(failure.sentence))
                try await Task.sleep(for: .seconds(pause))
                pause = min(2 * pause, 60 * seconds.retry)
            }
        }
    }
}
