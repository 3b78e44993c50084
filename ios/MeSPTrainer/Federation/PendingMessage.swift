import Foundation
import MeSPFiles
import MeSPSentences

/// The files of a received message and its answer.
///
///     message      the message's metadata and object tree
///     reply        the answer's metadata and object tree
///     objects/ID   the objects of the message and the answer
///     work/        files for the computation of the answer
struct PendingMessage {
    let folder: URL
    let mostBytes: Int
    private static let mostObjects = 4096

    static func tooLarge(_ most: Int) -> MeSPError {
        MeSPError(
            "The server sent a message of more than \(max(most / 1_000_000, 1)) MB, which is more than this model's adapters take; ask its operator."
        )
    }

    private var objects: URL { folder.appendingPathComponent("objects") }

    var workFolder: URL {
        get throws {
            let work = folder.appendingPathComponent("work")
            try makeFolder(work)
            return work
        }
    }

    /// The received message; nil if there is none. `reply` is the unsent answer.
    var message: (Metadata, FlowerObjectTree)? { get throws { try read("message") } }
    var reply: (Metadata, FlowerObjectTree)? { get throws { try read("reply") } }

    /// Reads a file. Returns nil if the file does not exist or is damaged. Removes a damaged file.
    private func read(_ name: String) throws -> (Metadata, FlowerObjectTree)? {
        let file = folder.appendingPathComponent(name)
        guard FileManager.default.fileExists(atPath: file.path) else { return nil }
        let data = try Data(contentsOf: file)
        do {
            let saved = try ProtobufMessage(data)
            if let metadata = try saved.messages(1).last, let tree = try saved.messages(2).last {
                return (try Metadata(metadata), try FlowerObjectTree(tree))
            }
        } catch is MeSPError {}
        try FileManager.default.removeItem(at: file)
        return nil
    }

    private func write(_ name: String, _ metadata: Metadata, _ tree: FlowerObjectTree) throws {
        var saved = ProtobufWriter()
        saved.add(1) { metadata.write(to: &$0) }
        saved.add(2) { tree.write(to: &$0) }
        try writeDurably(saved.data, to: folder.appendingPathComponent(name))
    }

    /// Saves a message. Removes all files of the previous message.
    func receive(_ metadata: Metadata, _ tree: FlowerObjectTree) throws {
        try empty()
        try write("message", metadata, tree)
    }

    func size(_ id: String) throws -> Int? {
        let file = objects.appendingPathComponent(id)
        guard FileManager.default.fileExists(atPath: file.path) else { return nil }
        return try FileManager.default.attributesOfItem(atPath: file.path)[.size] as? Int
    }

    /// Checks the limits of a message.
    ///
    /// - Throws: `MeSPError` if the size or the number of objects is too large.
    func check(_ tree: FlowerObjectTree, bytes: Int) throws {
        guard bytes <= mostBytes, tree.ids.count <= Self.mostObjects else { throw Self.tooLarge(mostBytes) }
    }

    func object(_ id: String) throws -> Data {
        guard id.allSatisfy(\.isHexDigit), let content = try? Data(contentsOf: objects.appendingPathComponent(id))
        else {
            throw MeSPError("The server asked for an object that is not this node's.")
        }
        return content
    }

    func take(_ content: Data, id: String) throws {
        try FlowerObject.check(content, id: id)
        try makeFolder(objects)
        try writeDurably(content, to: objects.appendingPathComponent(id))
    }

    func content(of tree: FlowerObjectTree) throws -> (FlowerRecords, bytes: Int) {
        var store = FlowerObjectStore()
        for id in tree.ids { try store.take(object(id), id: id) }
        guard let content = try store.object(tree.id).children.first else {
            throw MeSPError("The server sent a message without content.")
        }
        return (try store.records(content, most: mostBytes), store.contents.values.reduce(0) { $0 + $1.count })
    }

    /// Saves the answer to a message. If `records` is nil, the answer reports a failure.
    func answer(_ metadata: Metadata, with records: FlowerRecords?) throws {
        var (store, reply) = (FlowerObjectStore(), metadata.reply())
        let children = try records.map { [try store.add($0)] } ?? []
        let tree = try store.add("Message", children: children) { _ in
            var message = ProtobufWriter()
            message.add(1) { reply.write(to: &$0) }
            if records == nil {
                message.add(3) {
                    $0.add(1, signed: 2)  // CLIENT_APP_RAISED_EXCEPTION
                    $0.add(2, "The node could not do it.")
                }
            }
            return message.data
        }
        for (id, content) in store.contents { try take(content, id: id) }
        reply.message = tree.id
        try write("reply", reply, tree)
    }

    /// Removes the message, the answer, their objects and the work folder. The file `message` is removed first, because a restarted node ignores the
    /// other files if there is no `message`.
    func empty() throws {
        for name in ["message", "reply", "work", "objects"] {
            let file = folder.appendingPathComponent(name)
            if FileManager.default.fileExists(atPath: file.path) { try FileManager.default.removeItem(at: file) }
        }
    }
}
