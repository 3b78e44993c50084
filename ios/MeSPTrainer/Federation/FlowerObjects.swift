import Foundation
import MeSPFiles
import MeSPSentences

/// An object in Flower's protocol. A message consists of such objects. The id of an object is the SHA-256 of its content:
///
///     "<type> <ids of the children, separated by commas> <length of the body>", a zero byte, the body
struct FlowerObject {
    let type: String
    let children: [String]
    let body: Data

    var content: Data { Data("\(type) \(children.joined(separator: ",")) \(body.count)".utf8) + [0] + body }

    static func check(_ content: Data, id: String) throws {
        guard sha256(content) == id else {
            throw MeSPError("The server sent an object that is not the one that was asked for.")
        }
    }

    init(_ type: String, children: [String] = [], body: Data) {
        (self.type, self.children, self.body) = (type, children, body)
    }

    init(content: Data) throws {
        let parts = content.prefix { $0 != 0 }.split(separator: UInt8(ascii: " "), omittingEmptySubsequences: false)
            .map { String(decoding: $0, as: UTF8.self) }
        let body = Data(content.drop { $0 != 0 }.dropFirst())
        guard parts.count == 3, Int(parts[2]) == body.count else {
            throw MeSPError("The server sent an object that is incomplete; ask its operator.")
        }
        self.init(parts[0], children: parts[1].split(separator: ",").map(String.init), body: body)
    }
}

struct FlowerObjectTree {
    let id: String
    let children: [FlowerObjectTree]

    init(id: String, children: [FlowerObjectTree]) { (self.id, self.children) = (id, children) }

    /// Reads a tree.
    ///
    /// - Throws: `MeSPError` if the tree has more than `depth` levels, or an id is not a SHA-256.
    init(_ message: ProtobufMessage, depth: Int = 8) throws {
        id = message.text(1)
        guard depth > 0, id.count == 64, id.allSatisfy(\.isHexDigit) else {
            throw MeSPError("The server sent an invalid object tree; ask its operator.")
        }
        children = try message.messages(2).map { try FlowerObjectTree($0, depth: depth - 1) }
    }

    /// The ids without duplicates, children before their parents.
    var ids: [String] {
        var seen = Set<String>()
        func visit(_ tree: FlowerObjectTree) -> [String] {
            tree.children.flatMap(visit) + (seen.insert(tree.id).inserted ? [tree.id] : [])
        }
        return visit(self)
    }

    func write(to message: inout ProtobufWriter) {
        message.add(1, id)
        for child in children { message.add(2) { child.write(to: &$0) } }
    }
}

struct FlowerObjectStore {
    private(set) var contents = [String: Data]()

    /// Adds an object. Equal children are stored once.
    ///
    /// - Parameter body: a closure that returns the body. It receives the index of each of `children` among the distinct children.
    mutating func add(_ type: String, children: [FlowerObjectTree] = [], body: ([Int]) throws -> Data) throws
        -> FlowerObjectTree
    {
        var unique = [FlowerObjectTree]()
        let places = children.map { child in
            if let place = unique.firstIndex(where: { $0.id == child.id }) { return place }
            unique.append(child)
            return unique.count - 1
        }
        let content = FlowerObject(type, children: unique.map(\.id), body: try body(places)).content
        let id = sha256(content)
        contents[id] = content
        return FlowerObjectTree(id: id, children: unique)
    }

    /// Adds a received object.
    ///
    /// - Throws: `MeSPError` if the SHA-256 of the content is not the id.
    mutating func take(_ content: Data, id: String) throws {
        try FlowerObject.check(content, id: id)
        contents[id] = content
    }

    func object(_ id: String) throws -> FlowerObject {
        guard let content = contents[id] else { throw MeSPError("The server sent a message that lacks a part.") }
        return try FlowerObject(content: content)
    }
}

// MARK: - Records as objects

extension FlowerObjectStore {
    private static let chunk = 5_242_880
    /// The maximum size, in bytes, of an object's body that lists the object's children.
    private static let mostOfNames = 1 << 20

    mutating func add(_ records: FlowerRecords) throws -> FlowerObjectTree {
        var trees = [String: FlowerObjectTree]()
        for (name, record) in records.arrays { trees[name] = try add(record) }
        for (name, record) in records.metrics { trees[name] = try add("MetricRecord") { _ in Self.encoded(record) } }
        for (name, record) in records.configs { trees[name] = try add("ConfigRecord") { _ in Self.encoded(record) } }
        return try add(named: trees, "RecordDict")
    }

    private mutating func add(_ arrays: [String: FlowerArray]) throws -> FlowerObjectTree {
        var trees = [String: FlowerObjectTree]()
        for (name, array) in arrays {
            let file = array.npy
            let chunks = try stride(from: 0, to: file.count, by: Self.chunk).map { start in
                try add("ArrayChunk") { _ in file[start..<min(start + Self.chunk, file.count)] }
            }
            trees[name] = try add("Array", children: chunks) { places in
                try JSONSerialization.data(
                    withJSONObject: [
                        "dtype": array.kind.name, "shape": array.shape, "stype": "numpy.ndarray",
                        "arraychunk_ids": places,
                    ], options: .sortedKeys)
            }
        }
        return try add(named: trees, "ArrayRecord")
    }

    private mutating func add(named trees: [String: FlowerObjectTree], _ type: String) throws -> FlowerObjectTree {
        let sorted = trees.sorted { $0.key < $1.key }
        return try add(type, children: sorted.map(\.value)) { _ in
            try JSONSerialization.data(withJSONObject: trees.mapValues(\.id), options: .sortedKeys)
        }
    }

    private static func encoded(_ record: [String: FlowerValue]) -> Data {
        var message = ProtobufWriter()
        for (name, value) in record.sorted(by: { $0.key < $1.key }) {
            message.add(1) { item in
                item.add(1, name)
                item.add(2) { value.write(to: &$0) }
            }
        }
        return message.data
    }

    /// Returns the records of a `RecordDict`.
    ///
    /// - Parameter most: the maximum size of the records, in bytes. A child that is referenced several times counts several times.
    func records(_ id: String, most: Int) throws -> FlowerRecords {
        var room = most
        func take(_ bytes: Int) throws {
            room -= bytes
            guard room >= 0 else { throw PendingMessage.tooLarge(most) }
        }
        var records = FlowerRecords()
        for (name, id) in try named(object(id), "RecordDict") {
            let object = try object(id)
            try take(object.body.count)
            switch object.type {
            case "ArrayRecord":
                records.arrays[name] = try named(object, "ArrayRecord").mapValues { try array($0, take) }
            case "MetricRecord": records.metrics[name] = try values(object)
            case "ConfigRecord": records.configs[name] = try values(object)
            default: throw MeSPError("The server sent a \(object.type), which this version does not know.")
            }
        }
        return records
    }

    private func named(_ object: FlowerObject, _ type: String) throws -> [String: String] {
        guard object.type == type, object.body.count <= Self.mostOfNames,
            let names = try? JSONDecoder().decode([String: String].self, from: object.body)
        else { throw MeSPError("The server sent a \(object.type) where a \(type) belongs.") }
        return names
    }

    private func values(_ object: FlowerObject) throws -> [String: FlowerValue] {
        var values = [String: FlowerValue]()
        for item in try ProtobufMessage(object.body).messages(1) {
            values[item.text(1)] = try item.messages(2).last.flatMap { try FlowerValue($0) }
        }
        return values
    }

    /// Returns an array.
    ///
    /// - Parameter take: a closure that receives the sizes of the array's description and of each chunk, in bytes.
    private func array(_ id: String, _ take: (Int) throws -> Void) throws -> FlowerArray {
        struct Description: Decodable {
            let stype: String
            let chunks: [Int]
            enum CodingKeys: String, CodingKey {
                case stype
                case chunks = "arraychunk_ids"
            }
        }
        let object = try object(id)
        try take(object.body.count)
        guard object.type == "Array", object.body.count <= Self.mostOfNames,
            let array = try? JSONDecoder().decode(Description.self, from: object.body),
            array.stype == "numpy.ndarray", array.chunks.allSatisfy(object.children.indices.contains)
        else { throw MeSPError("The server sent an array in a form that this version does not know.") }
        var chunks = [String: Data]()
        for id in Set(object.children) { chunks[id] = try self.object(id).body }
        let parts = array.chunks.compactMap { chunks[object.children[$0]] }
        for part in parts { try take(part.count) }
        return try FlowerArray(npy: parts.reduce(into: Data()) { $0.append($1) })
    }
}
