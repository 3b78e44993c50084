import Foundation
import MeSPSentences

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// The client of Flower's Fleet API over HTTP. Requests and responses are protobuf messages. Flower may change this API between versions; `version`
/// is the supported one.
struct FleetAPI: Sendable {
    static let version = "1.41.0"

    let server: URL
    let key: NodeKey
    let transport: any HTTPTransport

    /// An error after which the same call may succeed later: the network failed, or the server is slow or busy.
    struct Unreachable: Error {
        let sentence: Sentence
        var hasAnswer = false
    }

    struct Refusal: LocalizedError, Decodable {
        static let keyIsRegistered = 23
        static let registersByHand = 2001
        static let cannotActivate = 2004
        static let runHasEnded = 2007

        let code: Int
        let detail: String
        var errorDescription: String? { detail }
    }

    /// The maximum sizes of responses, in bytes.
    private static let mostOfObject = 6 << 20, mostBytes = 1 << 20

    /// Calls a function of the API.
    ///
    /// - Throws: `Unreachable`, `Refusal` or `MeSPError`; `CancellationError` as soon as the task is cancelled.
    @discardableResult
    func call(_ name: String, within seconds: Double = 300, _ write: (inout ProtobufWriter) -> Void) async throws
        -> ProtobufMessage
    {
        var message = ProtobufWriter()
        write(&message)
        var request = URLRequest(url: server.appendingPathComponent("v1/fleet/\(name)"), timeoutInterval: 30)
        request.httpMethod = "POST"
        request.httpBody = message.data
        let now = Date.now.formatted(Date.ISO8601FormatStyle(includingFractionalSeconds: true))
        let headers = [
            "content-type": "application/protobuf", "accept": "application/protobuf", "accept-encoding": "identity",
            "flwr-public-key": Data(key.publicKey.utf8).base64EncodedString(), "flwr-timestamp": now,
            "flwr-signature": try key.signature(of: now).base64EncodedString(),
            "flwr-package-name": "flwr", "flwr-package-version": Self.version, "flwr-component-name": "SuperNode",
        ]
        #if canImport(FoundationNetworking)
            request.setValue("close", forHTTPHeaderField: "connection")  // each call has a connection of its own
        #endif
        for (name, value) in headers { request.setValue(value, forHTTPHeaderField: name) }
        let (data, status): (Data, Int)
        do {
            (data, status) = try await transport.send(
                request, most: name == "pull-object" ? Self.mostOfObject : Self.mostBytes, within: seconds)
        } catch HTTPFailure.unreachable(let reason) {
            throw Unreachable(sentence: "\(server.absoluteString) cannot be reached: \(reason)")
        } catch HTTPFailure.tooSlow {
            throw Unreachable(sentence: "\(server.absoluteString) takes too long to answer.")
        } catch HTTPFailure.tooLong {
            throw MeSPError(
                "\(server.absoluteString) answers \(name) with more bytes than any answer of Flower has; ask its operator."
            )
        } catch HTTPFailure.unsaidLength {
            throw MeSPError(
                "\(server.absoluteString) answers \(name) compressed or without a length, which no SuperLink of Flower does; ask its operator."
            )
        }
        switch status {
        case 200: return try ProtobufMessage(data)
        case 401:
            throw MeSPError(
                "The SuperLink does not know this node's key, or the clocks differ by more than five seconds; have the key registered with flwr supernode register, and set the clock."
            )
        case 429, 500, 502, 503, 504:
            throw Unreachable(sentence: "\(server.absoluteString) is busy (\(status)).", hasAnswer: true)
        default:
            if let refusal = try? JSONDecoder().decode(Refusal.self, from: data) { throw refusal }
            throw MeSPError(
                "\(server.absoluteString) does not speak the fleet protocol of Flower \(Self.version): it answers \(status) to \(name). Run that version's SuperLink there."
            )
        }
    }
}

struct Metadata {
    var run: UInt64
    var message: String
    var source: UInt64
    var destination: UInt64
    var replyTo = ""
    var group: String
    /// The time to live, in seconds from `created`.
    var timeToLive: Double
    var type: String
    /// The time of creation, in seconds since 1970.
    var created: Double
    var sourceTask: UInt64?
    var destinationTask: UInt64?

    /// Reads the metadata.
    ///
    /// - Throws: `MeSPError` if a time is not finite, or a text is longer than 1000 bytes.
    init(_ message: ProtobufMessage) throws {
        (run, self.message) = (message.number(1), message.text(2))
        (source, destination) = (message.number(3), message.number(4))
        (replyTo, group) = (message.text(5), message.text(6))
        (timeToLive, type, created) = (message.double(7), message.text(8), message.double(9))
        sourceTask = message.has(10) ? message.number(10) : nil
        destinationTask = message.has(11) ? message.number(11) : nil
        guard timeToLive.isFinite, created.isFinite, (created + timeToLive).isFinite,
            [self.message, replyTo, group, type].allSatisfy({ $0.utf8.count <= 1000 })
        else { throw MeSPError("The server sent a message whose metadata is invalid; ask its operator.") }
    }

    /// Returns the metadata of an answer. The answer expires at the same time as this message.
    func reply(now: Date = .now) -> Metadata {
        var reply = self
        (reply.message, reply.replyTo) = ("", message)
        (reply.source, reply.destination) = (destination, source)
        (reply.sourceTask, reply.destinationTask) = (destinationTask, sourceTask)
        reply.created = now.timeIntervalSince1970
        reply.timeToLive = created + timeToLive - reply.created
        return reply
    }

    var hasExpired: Bool { created + timeToLive <= Date.now.timeIntervalSince1970 }

    func write(to message: inout ProtobufWriter) {
        message.add(1, run)
        message.add(2, self.message)
        message.add(3, source)
        message.add(4, destination)
        message.add(5, replyTo)
        message.add(6, group)
        message.add(7, timeToLive)
        message.add(8, type)
        message.add(9, created)
        if let sourceTask { message.add(10, sourceTask, isPresent: true) }
        if let destinationTask { message.add(11, destinationTask, isPresent: true) }
    }
}
