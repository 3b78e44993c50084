import Foundation
import Testing

@testable import MeSPBundle
@testable import MeSPFederation

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

/// A simulated SuperLink, Flower's server, in this process.
final class SuperLink: URLProtocol {
    struct State {
        var calls = [String]()
        var faults = [String: [(status: Int, body: String)]]()
        var held = [String: DispatchSemaphore]()
        var question: (tree: FlowerObjectTree, contents: [String: Data])?
        var isDelivered = false
        var wanted = Set<String>()
        var answer: (metadata: Metadata, tree: FlowerObjectTree)?
        var received = [String: Data]()
        var alsoWanted = [String]()
        var node = SuperLink.node
    }
    nonisolated(unsafe) private static var states = [String: State]()
    private static let lock = NSLock()

    static let never = -1

    static func with<R>(_ host: String, _ body: (inout State) throws -> R) rethrows -> R {
        try lock.withLock { try body(&states[host, default: State()]) }
    }

    static func transport() -> URLSessionTransport {
        let configuration = URLSessionConfiguration.ephemeral
        configuration.protocolClasses = [SuperLink.self]
        return URLSessionTransport(configuration: configuration)
    }

    override class func canInit(with request: URLRequest) -> Bool { true }
    override class func canonicalRequest(for request: URLRequest) -> URLRequest { request }
    override func stopLoading() {}

    override func startLoading() {
        guard let url = request.url, let host = url.host else { return }
        let signed = request.value(forHTTPHeaderField: "flwr-timestamp") ?? ""
        #expect(signed.wholeMatch(of: /\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z/) != nil)
        #if canImport(FoundationNetworking)
            #expect(request.value(forHTTPHeaderField: "connection") == "close")
        #endif
        let (status, body) = Self.with(host) { state in
            state.calls.append(url.lastPathComponent)
            if var faults = state.faults[url.lastPathComponent], !faults.isEmpty {
                let fault = faults.removeFirst()
                state.faults[url.lastPathComponent] = faults
                return (fault.status, Data(fault.body.utf8))
            }
            return (200, (try? Self.answer(url.lastPathComponent, ProtobufMessage(sent), &state)) ?? Data())
        }
        if status == Self.never { return }
        Self.with(host) { $0.held[url.lastPathComponent] }?.wait()
        guard status != 0,
            let response = HTTPURLResponse(
                url: url, statusCode: status, httpVersion: nil, headerFields: ["content-length": String(body.count)])
        else {
            client?.urlProtocol(self, didFailWithError: URLError(.networkConnectionLost))
            return
        }
        client?.urlProtocol(self, didReceive: response, cacheStoragePolicy: .notAllowed)
        client?.urlProtocol(self, didLoad: body)
        client?.urlProtocolDidFinishLoading(self)
    }

    private var sent: Data {
        if let body = request.httpBody { return body }
        guard let stream = request.httpBodyStream else { return Data() }
        stream.open()
        defer { stream.close() }
        var (data, buffer) = (Data(), [UInt8](repeating: 0, count: 1 << 16))
        while case let count = stream.read(&buffer, maxLength: buffer.count), count > 0 { data += buffer[..<count] }
        return data
    }

    static let node: UInt64 = 1 << 63 + 5

    private static func answer(_ call: String, _ message: ProtobufMessage, _ state: inout State) throws -> Data {
        var answer = ProtobufWriter()
        switch call {
        case "activate-node": answer.add(1, state.node)
        case "send-node-heartbeat": answer.add(1, try message.messages(1)[0].number(1) == state.node ? 1 : 0 as UInt64)
        case "pull-messages":
            guard let (tree, contents) = state.question, !state.isDelivered else { break }
            state.isDelivered = true
            let body = try FlowerObject(content: contents[tree.id] ?? Data()).body
            let metadata = try ProtobufMessage(body).messages(1)[0]
            var known = try Metadata(metadata)
            known.message = tree.id
            answer.add(2) { $0.add(1) { known.write(to: &$0) } }
            answer.add(3) { tree.write(to: &$0) }
        case "pull-object":
            guard let content = state.question?.contents[message.text(3)] else { break }
            answer.add(1, UInt64(1))
            answer.add(2, UInt64(1))
            answer.add(3, content)
        case "push-messages":
            let tree = try FlowerObjectTree(message.messages(3)[0])
            state.answer = (try Metadata(message.messages(2)[0].messages(1)[0]), tree)
            for id in tree.ids where state.received[id] == nil { answer.add(3, id) }
            for id in state.alsoWanted { answer.add(3, id) }
            answer.add(4, "session")
        case "push-object":
            state.received[message.text(3)] = message.bytes(4)
            answer.add(1, UInt64(1))
        default: break
        }
        return answer.data
    }

    /// Puts a message for the node on the server: `records`, or adapters of two numbers if `records` is nil.
    ///
    /// - Parameter age: the age of the message in seconds. Messages are valid for an hour.
    static func ask(_ host: String, _ records: FlowerRecords? = nil, age: Double = 0) throws {
        try ask(host, age: age) { try $0.add(records ?? FlowerRecords(arrays: ["arrays": ["a": numbers([1, 2])]])) }
    }

    static func ask(
        _ host: String, age: Double = 0, content: (inout FlowerObjectStore) throws -> FlowerObjectTree
    ) throws {
        var store = FlowerObjectStore()
        let records = try content(&store)
        let tree = try store.add("Message", children: [records]) { _ in
            var metadata = try Metadata(ProtobufMessage(Data()))
            (metadata.run, metadata.source, metadata.destination) = (7, 1, node)
            (metadata.group, metadata.type, metadata.timeToLive) = ("1", "train", 3600)
            metadata.created = Date.now.timeIntervalSince1970 - age
            metadata.sourceTask = 11
            var body = ProtobufWriter()
            body.add(1) { metadata.write(to: &$0) }
            return body.data
        }
        with(host) {
            ($0.question, $0.isDelivered, $0.answer) = ((tree, store.contents), false, nil)
        }
    }

    static func round(
        of manifest: Manifest, exchange: String = "float32", _ changes: [String: FlowerValue] = [:]
    ) -> FlowerRecords {
        let (architecture, kind) = (manifest.architecture, exchange == "float32" ? FlowerArray.Kind.float32 : .uint16)
        var arrays = [String: FlowerArray]()
        for module in architecture.modules {
            let blocks = architecture.layers.indices.map { architecture.block($0) }
                .filter { $0.modules.contains(module) }
            let shape = [blocks.count, manifest.ranks[0], blocks[0].dimensions(module).outputs]
            arrays[module.name + ".lora_b"] = FlowerArray(
                kind, shape: shape, data: Data(count: shape.reduce(kind == .float32 ? 4 : 2, *)))
        }
        let model = [manifest.model.id, manifest.model.revision].compactMap { $0 }.joined(separator: "@")
        let config: [String: FlowerValue] = [
            "model": .text(model), "exchange": .text(exchange), "timeout": .double(600), "server-round": .int(1),
            "steps": .int(2), "seq_len": .int(Int64(manifest.seqLens[0])), "rank": .int(Int64(manifest.ranks[0])),
            "alpha": .double(4), "freeze_a": .flag(true), "optimizer": .text("sgd"), "learning_rate": .double(0.1),
        ]
        return FlowerRecords(arrays: ["arrays": arrays], configs: ["config": config.merging(changes) { $1 }])
    }

    static func question(_ records: FlowerRecords, in folder: URL) -> SuperNode.Question {
        SuperNode.Question(
            id: "", node: 1, type: "train", run: 1, group: "1", created: .now, records: records, folder: folder)
    }

    static func add(array: FlowerObjectTree, to store: inout FlowerObjectStore) throws -> FlowerObjectTree {
        let arrays = try store.add("ArrayRecord", children: [array]) { _ in Data(#"{"a": "\#(array.id)"}"#.utf8) }
        return try store.add("RecordDict", children: [arrays]) { _ in Data(#"{"arrays": "\#(arrays.id)"}"#.utf8) }
    }

    static func numbers(_ numbers: [Float]) -> FlowerArray {
        FlowerArray(.float32, shape: [numbers.count], data: numbers.withUnsafeBytes { Data($0) })
    }

    static func answered(_ host: String) throws -> (Metadata, FlowerRecords?, reason: String?) {
        try with(host) { state in
            let (metadata, tree) = try #require(state.answer)
            var store = FlowerObjectStore()
            for id in tree.ids { try store.take(try #require(state.received[id]), id: id) }
            let message = try store.object(tree.id)
            let reason = try ProtobufMessage(message.body).messages(3).first?.text(2)
            return (metadata, try message.children.first.map { try store.records($0, most: 1 << 26) }, reason)
        }
    }
}
