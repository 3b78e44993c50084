import Foundation
import MeSPSentences
import Testing

@testable import MeSPFederation
@testable import MeSPFiles

struct FlowerObjectsTests {
    /// The objects of Flower 1.41's `deflate()` for `RecordDict({"arrays": ArrayRecord({"b": b, "half": half, "again": b}), "metrics":
    /// MetricRecord({"num-examples": -3, "loss": 0.5}), "config": ConfigRecord({"lr": 0.25, "round": 2, "name": "n", "on": True, "raw":
    /// b"\x00\x01"})})`. `b` is [[0, 1], [2, 3]] in float32, and `half` is [1, 65535] in uint16.
    private let objects = [
        "QXJyYXlDaHVuayAgMTQ0AJNOVU1QWQEAdgB7J2Rlc2NyJzogJzxmNCcsICdmb3J0cmFuX29yZGVyJzogRmFsc2UsICdzaGFwZSc6"
            + "ICgyLCAyKSwgfSAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAKAAAAAAAA"
            + "gD8AAABAAABAQA==",
        "QXJyYXkgZWRhMDZjYTg3YWJhMzUyYmQ2NjNiMWFkZmMzYWJkOTRlYmM3NzAwN2QwZTRjNjAzNGFmNTEyYmFkZDhkNTgzNCA4NgB7"
            + "ImR0eXBlIjogImZsb2F0MzIiLCAic2hhcGUiOiBbMiwgMl0sICJzdHlwZSI6ICJudW1weS5uZGFycmF5IiwgImFycmF5Y2h1bmtf"
            + "aWRzIjogWzBdfQ==",
        "QXJyYXlDaHVuayAgMTMyAJNOVU1QWQEAdgB7J2Rlc2NyJzogJzx1MicsICdmb3J0cmFuX29yZGVyJzogRmFsc2UsICdzaGFwZSc6"
            + "ICgyLCksIH0gICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAKAQD//w==",
        "QXJyYXkgNjE4MzFkY2I2M2E1ZjkwZjEyMWQ4NDExNDJiNzYwNTdmZDIwMjUzZDE2OGQ0YTk4OTUyNDMzOTliM2UxNWJjYSA4MgB7"
            + "ImR0eXBlIjogInVpbnQxNiIsICJzaGFwZSI6IFsyXSwgInN0eXBlIjogIm51bXB5Lm5kYXJyYXkiLCAiYXJyYXljaHVua19pZHMi"
            + "OiBbMF19",
        "QXJyYXlSZWNvcmQgN2Y2YmEwY2Q2MDhlMmYxMzg1ZTE1NWJjMTBkNDE3NGM5NzY0MTFmNWVjZTY2M2U4MGUxYTIyODNiMTI1MzBl"
            + "ZixjN2RiN2U2ZTY0M2RiODg3OGVjZjY4MjdiNTJmM2Y4ZDcxNmNjNGMwNzhhYmNkZTQ0NjM5Y2NkYTA5NzVlOGU0IDIyNgB7ImIi"
            + "OiAiN2Y2YmEwY2Q2MDhlMmYxMzg1ZTE1NWJjMTBkNDE3NGM5NzY0MTFmNWVjZTY2M2U4MGUxYTIyODNiMTI1MzBlZiIsICJoYWxm"
            + "IjogImM3ZGI3ZTZlNjQzZGI4ODc4ZWNmNjgyN2I1MmYzZjhkNzE2Y2M0YzA3OGFiY2RlNDQ2MzljY2RhMDk3NWU4ZTQiLCAiYWdh"
            + "aW4iOiAiN2Y2YmEwY2Q2MDhlMmYxMzg1ZTE1NWJjMTBkNDE3NGM5NzY0MTFmNWVjZTY2M2U4MGUxYTIyODNiMTI1MzBlZiJ9",
        "TWV0cmljUmVjb3JkICAzOQAKEgoMbnVtLWV4YW1wbGVzEgIQBQoRCgRsb3NzEgkJAAAAAAAA4D8=",
        "Q29uZmlnUmVjb3JkICA2NgAKDwoCbHISCQkAAAAAAADQPwoLCgVyb3VuZBICEAQKCwoEbmFtZRIDKgFuCggKAm9uEgIgAQoLCgNy"
            + "YXcSBDICAAE=",
        "UmVjb3JkRGljdCA0MWQ0YjU1MTlmMjg3NDM5ZWI2OTRkODlkMDlkMzNjMmExZDY4ODgwNWE4ZWJhNzFjMzFkMzY5OWQ1NWZiM2Qz"
            + "LDYyNGVkOTM4YzFkY2NjNTE0NzRkYzk4OWQzNjFhNGU2NGUxNTNmODExMGQxOWQyZDc3ZTM4N2E5YTJjYzY0MjgsZjdkNmEyY2Qw"
            + "MjVmOWIyMzA4ZmQ0MmI5ZDA3MWUxMjQxZTA0NWU4M2EzOTQ5MjI0YjllODQ5ZmY5YTUxN2MwNyAyMzUAeyJhcnJheXMiOiAiNDFk"
            + "NGI1NTE5ZjI4NzQzOWViNjk0ZDg5ZDA5ZDMzYzJhMWQ2ODg4MDVhOGViYTcxYzMxZDM2OTlkNTVmYjNkMyIsICJtZXRyaWNzIjog"
            + "IjYyNGVkOTM4YzFkY2NjNTE0NzRkYzk4OWQzNjFhNGU2NGUxNTNmODExMGQxOWQyZDc3ZTM4N2E5YTJjYzY0MjgiLCAiY29uZmln"
            + "IjogImY3ZDZhMmNkMDI1ZjliMjMwOGZkNDJiOWQwNzFlMTI0MWUwNDVlODNhMzk0OTIyNGI5ZTg0OWZmOWE1MTdjMDcifQ==",
    ].compactMap { Data(base64Encoded: $0) }
    private let id = "bd92b44d8ccd5e2c5bdc66d22f4dc7b05147ba1ef297fdc6e012c23c7466f633"

    private static let floats = FlowerArray(
        .float32, shape: [2, 2], data: [0, 1, 2, 3].map(Float.init).withUnsafeBytes { Data($0) })
    private static let halves = FlowerArray(.uint16, shape: [2], data: Data([1, 0, 255, 255]))
    private func flowersStore() throws -> FlowerObjectStore {
        var store = FlowerObjectStore()
        for content in objects { try store.take(content, id: sha256(content)) }
        return store
    }

    private let records = FlowerRecords(
        arrays: ["arrays": ["b": floats, "half": halves, "again": floats]],
        metrics: ["metrics": ["num-examples": .int(-3), "loss": .double(0.5)]],
        configs: [
            "config": [
                "lr": .double(0.25), "round": .int(2), "name": .text("n"), "on": .flag(true),
                "raw": .bytes(Data([0, 1])),
            ]
        ])

    @Test func readsWhatFlowerWrites() throws {
        let store = try flowersStore()
        #expect(store.contents.count == objects.count)
        #expect(try store.records(id, most: 1 << 26) == records)
    }

    @Test func writesWhatFlowerWrites() throws {
        var store = FlowerObjectStore()
        let (tree, flowers) = (try store.add(records), try flowersStore())
        for content in flowers.contents.values where content.starts(with: Data("ArrayChunk".utf8)) {
            #expect(store.contents.values.contains(content))
        }
        #expect(store.contents.count == flowers.contents.count)  // equal arrays are one object
        #expect(Set(tree.ids) == Set(store.contents.keys))
        #expect(try store.records(tree.id, most: 1 << 26) == records)
    }

    @Test func cutsLargeArraysIntoChunks() throws {
        let array = FlowerArray(.float32, shape: [1, 1_500_000], data: Data(repeating: 7, count: 6_000_000))
        var store = FlowerObjectStore()
        let tree = try store.add(FlowerRecords(arrays: ["arrays": ["a": array]]))
        let sizes = store.contents.values.filter { $0.starts(with: Data("ArrayChunk".utf8)) }.map(\.count)
        #expect(sizes.count == 2 && sizes.allSatisfy { $0 < 5_242_880 + 64 })
        #expect(try store.records(tree.id, most: 1 << 26).arrays["arrays"]?["a"] == array)
    }

    /// An array may name the same chunk several times. Here it names a chunk of 1 MiB once or 100,000 times.
    @Test(arguments: [1, 100_000])
    func aMessageTakesNoMoreMemoryThanItMay(times: Int) throws {
        var store = FlowerObjectStore()
        let chunk = try store.add("ArrayChunk") { _ in Data(count: 1 << 20) }
        let array = try store.add("Array", children: [chunk]) { _ in
            let places = Array(repeating: "0", count: times).joined(separator: ",")
            return Data(#"{"stype": "numpy.ndarray", "arraychunk_ids": [\#(places)]}"#.utf8)
        }
        let records = try SuperLink.add(array: array, to: &store)
        let error = #expect(throws: MeSPError.self) { try store.records(records.id, most: 1 << 26) }
        #expect(error?.sentence.english.contains("more than 67 MB") == (times > 1))
    }

    @Test func aMessageHasNoMoreFieldsThanFlowers() throws {
        #expect(throws: MeSPError.self) { try ProtobufMessage(Data(repeating: 8, count: 1 << 20)) }
        #expect(try ProtobufMessage(Data(repeating: 8, count: 1 << 16)).number(1) == 8)
    }

    @Test func damagedObjectsAreRefused() throws {
        for content in objects {
            for length in 0..<content.count {
                #expect(throws: MeSPError.self) { try FlowerObject(content: content.prefix(length)) }
            }
            let id = sha256(content)
            for place in stride(from: 0, to: content.count, by: 7) {
                var changed = content
                changed[place] ^= 1
                var store = FlowerObjectStore()
                #expect(throws: MeSPError.self) { try store.take(changed, id: id) }
            }
        }
        let npy = Self.floats.npy
        for length in 0..<npy.count {
            #expect(throws: MeSPError.self) { try FlowerArray(npy: npy.prefix(length)) }
        }
        for place in npy.indices {
            var changed = npy
            changed[place] ^= 0x11
            _ = try? FlowerArray(npy: changed)  // which may give another array, but no crash
        }
        for seed in 0..<2_000 {
            var random = SystemRandomNumberGenerator()
            let bytes = Data((0..<seed % 40).map { _ in UInt8.random(in: 0...255, using: &random) })
            if let message = try? ProtobufMessage(bytes) { _ = try? FlowerObjectTree(message) }
        }
    }

    @Test func numbersSurviveProtobuf() throws {
        for number in [0, 1, -1, 127, 128, -300, .max, .min] as [Int64] {
            var writer = ProtobufWriter()
            writer.add(3, signed: number)
            writer.add(2, UInt64(bitPattern: number))
            let message = try ProtobufMessage(writer.data)
            #expect(message.signed(3) == number && message.number(2) == UInt64(bitPattern: number))
            #expect(message.has(3) == (number != 0))
        }
    }
}
