import Foundation
import MeSPSentences

/// The message that a node has, and its answer, in files.
///
///     message      the message's metadata and object tree
///     reply        the answer's
///     objects/ID   what both consist of
///     work/        files of the work on the answer
struct PendingMessage {
    let folder: URL
    /// The most bytes of a message's objects, and of what they stand for.
    let mostBytes: Int
    /// More objects than any message has.
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
            try FileManager.default.createDirectory(at: work, withIntermediateDirectories: true)
            return work
        }
    }

    /// The message that was received and not yet answered.
    var message: (Metadata, FlowerObjectTree)? { get throws { try read("message") } }
    var reply: (Metadata, FlowerObjectTree)? { get throws { try read("reply") } }

    /// A file that is damaged is removed: nothing can be done with it, and the node continues without.
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

    /// Keeps a message, and nothing of the one before, which may have been left half emptied.
    func receive(_ metadata: Metadata, _ tree: FlowerObjectTree) throws {
        try empty()
        try write("message", metadata, tree)
    }

    /// The bytes of an object that is here; nil where it isn't.
    func size(_ id: String) throws -> Int? {
        let file = objects.appendingPathComponent(id)
        guard FileManager.default.fileExists(atPath: file.path) else { return nil }
        return try FileManager.default.attributesOfItem(atPath: file.path)[.size] as? Int
    }

    /// - Parameter bytes: of the objects that are here
    /// - Throws: `MeSPError` where a tree has more than a message of this model's.
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

    /// - Throws: `MeSPError` where the content is not that of the id.
    func take(_ content: Data, id: String) throws {
        try FlowerObject.check(content, id: id)
        try FileManager.default.createDirectory(at: objects, withIntermediateDirectories: true)
        try writeDurably(content, to: objects.appendingPathComponent(id))
    }

    /// The content of a message of a tree, and the bytes of its objects.
    func content(of tree: FlowerObjectTree) throws -> (FlowerRecords, bytes: Int) {
        var store = FlowerObjectStore()
        for id in tree.ids { try store.take(object(id), id: id) }
        guard let content = try store.object(tree.id).children.first else {
            throw MeSPError("The server sent a message without content.")
        }
        return (try store.records(content, most: mostBytes), store.contents.values.reduce(0) { $0 + $1.count })
    }

    /// Keeps the answer to a message; without records, that there is none.
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

    /// Makes room for the next message. Without `message` the rest is nothing.
    func empty() throws {
        for name in ["message", "reply", "work", "objects"] {
            let file = folder.appendingPathComponent(name)
            if FileManager.default.fileExists(atPath: file.path) { try FileManager.default.removeItem(at: file) }
        }
    }
}
