import Foundation
import MeSPSentences
import Testing

@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPFederation
@testable import MeSPFiles

@Suite(.serialized) struct FederationFuzzTests {
    private let cases = FuzzTests.cases
    private static let most = 1 << 20

    private func damaged(_ data: Data, _ random: inout FuzzTests.Generator) -> Data {
        var data = Data(data)
        for _ in 0..<Int.random(in: 1...3, using: &random) where !data.isEmpty {
            let index = Int.random(in: 0..<data.count, using: &random)
            switch Int.random(in: 0..<6, using: &random) {
            case 0: data[index] ^= 1 << UInt8.random(in: 0..<8, using: &random)
            case 1: data = data.prefix(index)
            case 2: data.insert(contentsOf: Data(repeating: UInt8(ascii: "["), count: 600), at: index)
            case 3: data.append(contentsOf: data.suffix(from: index))
            case 4: data[index] = UInt8(ascii: "9")
            default:
                let numbers: [UInt64] = [.max, 1 << 63, 0x7ff8 << 48, 0]
                let number = numbers.randomElement(using: &random) ?? 0
                let bytes = withUnsafeBytes(of: number.littleEndian) { Data($0) }.prefix(data.count - index)
                data.replaceSubrange(index..<index + bytes.count, with: bytes)
            }
        }
        return data
    }

    /// Returns a message with damaged objects.
    private func damaged(
        _ tree: FlowerObjectTree, _ contents: [String: Data], _ random: inout FuzzTests.Generator
    ) throws -> (FlowerObjectTree, [String: Data]) {
        let bad = Int.random(in: 0..<tree.ids.count, using: &random)
        var (new, changed) = ([String: Data](), [String: String]())
        func visit(_ tree: FlowerObjectTree) throws -> FlowerObjectTree {
            let children = try tree.children.map(visit)
            var content = try #require(contents[tree.id])
            for child in tree.children {
                guard let id = changed[child.id] else { continue }
                while let place = content.range(of: Data(child.id.utf8)) {
                    content.replaceSubrange(place, with: Data(id.utf8))
                }
            }
            if tree.ids.count - 1 == bad || Int.random(in: 0..<8, using: &random) == 0 {
                let object = try FlowerObject(content: content)
                let body = damaged(object.body, &random)
                content = FlowerObject(object.type, children: object.children, body: body).content
                if Int.random(in: 0..<10, using: &random) == 0 { content = damaged(content, &random) }
            }
            let id = sha256(content)
            (new[id], changed[tree.id]) = (content, id == tree.id ? nil : id)
            return FlowerObjectTree(id: id, children: children)
        }
        return (try visit(tree), new)
    }

    @Test func messages() throws {
        let bundle = try tiedBundle()
        let folder = temporaryFolder()
        let pending = PendingMessage(folder: folder, mostBytes: Self.most)
        var sound = FlowerObjectStore()
        let round = SuperLink.round(
            of: try ModelBundle(url: bundle, checksums: false).manifest,
            ["projections": .texts(["q", "v"]), "batch_size": .int(2)])
        let records = try sound.add(round)
        let message = try sound.add("Message", children: [records]) { _ in Data() }
        var random = FuzzTests.Generator(state: 11)
        var (refused, before) = (0, memoryFootprint())
        for number in 0..<cases {
            let (tree, contents) = try damaged(message, sound.contents, &random)
            do {
                try pending.empty()
                let objects = folder.appendingPathComponent("objects")
                try objects.makeFolder()
                for (id, content) in contents { try content.write(to: objects.appendingPathComponent(id)) }
                let (records, bytes) = try pending.content(of: tree)
                #expect(bytes <= 2 * Self.most)
                guard number % 5 == 0 else { continue }  // writes to the disk
                let question = SuperLink.question(records, in: try pending.workFolder)
                let settings = try FederatedRun(question, bundle: bundle).settings
                #expect(settings.bundle == bundle.path && settings.output.hasPrefix(folder.path))
            } catch let error as MeSPError {
                refused += 1
                #expect(!error.sentence.english.isEmpty)
            }
            if number == 50 { before = memoryFootprint() }
        }
        #expect(refused > cases / 4 && refused < cases, "cases of both kinds")
        #expect(memoryFootprint() - before < 50_000_000)
    }

    @Test func answers() throws {
        var random = FuzzTests.Generator(state: 12)
        var metadata = try Metadata(ProtobufMessage(Data()))
        (metadata.run, metadata.source, metadata.destination, metadata.group) = (7, 1, 5, "1")
        (metadata.type, metadata.timeToLive, metadata.created) = ("train", 3600, 1e9)
        let leaf = FlowerObjectTree(id: String(repeating: "a", count: 64), children: [])
        let tree = FlowerObjectTree(id: String(repeating: "b", count: 64), children: [leaf, leaf])
        var writer = ProtobufWriter()
        writer.add(2) { $0.add(1) { metadata.write(to: &$0) } }
        writer.add(3) { tree.write(to: &$0) }
        var refused = 0
        for _ in 0..<cases {
            do {
                let answer = try ProtobufMessage(damaged(writer.data, &random))
                guard let message = try answer.messages(2).first, let tree = try answer.messages(3).first else {
                    continue
                }
                let metadata = try Metadata(message.messages(1).last ?? ProtobufMessage(Data()))
                #expect(metadata.created.isFinite && metadata.timeToLive.isFinite && metadata.group.utf8.count <= 1000)
                #expect(metadata.reply().timeToLive.isFinite)
                _ = metadata.hasExpired
                #expect(try FlowerObjectTree(tree).ids.allSatisfy { $0.count == 64 })
            } catch is MeSPError {
                refused += 1
            }
        }
        #expect(refused > cases / 10 && refused < cases, "cases of both kinds")
    }
}
