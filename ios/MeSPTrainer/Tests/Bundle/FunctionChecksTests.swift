import Foundation
import MLX
import Testing

@testable import MeSPBundle
@testable import MeSPCore
@testable import MeSPFiles

@Suite struct FunctionChecksTests {
    private static let fixtures = (Fixture.cases + Fixture.roundedCases).map {
        $0.appendingPathComponent("bundle.mesp")
    }

    @Test(arguments: [demoBundle] + fixtures) func whatWasExportedPasses(_ url: URL) throws {
        var bundle = try ModelBundle(url: url, device: url == demoBundle ? .gpu : .cpu, checksums: false)
        if url.path.contains("bfloat16") { bundle.dtype = .bfloat16 }
        for (kind, blocks) in bundle.manifest.blocks.enumerated() {
            for files in [\Manifest.Blocks.functions, \.plainFunctions, \.packed] {
                for (length, file) in blocks[keyPath: files] {
                    let length = try #require(Int(length))
                    try bundle.checkFunctions(file, kind: kind, files, length: length)
                    var others = [(files, length + 1)]
                    if files != \.plainFunctions { others.append((files == \.packed ? \.functions : \.packed, length)) }
                    for (other, length) in others {
                        let said = message { try bundle.checkFunctions(file, kind: kind, other, length: length) }
                        #expect(said.contains("does not have the inputs and outputs of a block"))
                    }
                }
            }
        }
    }

    /// The checksums match the replaced file, so only the check of functions can refuse it.
    @Test func noFunctionIsImportedBeforeItIsChecked() throws {
        let source = try tiedBundle()
        let manifest = try ModelBundle(url: source, checksums: false).manifest
        let (length, rank) = (try #require(manifest.seqLens.max()), manifest.ranks[0])
        let x = TestFunction.Array.array([16])
        let lies = TestFunction(x, [.node("Slice", [[100], [104], [1]], [0], .array([4]))], outputs: 9)
        let other = TestFunction(x, [.node("Exp", [], [0], x)], outputs: 9)
        let file = "block.plain.\(length).mlxfn"
        for (function, reason) in [
            (lies, "the inputs, outputs or parameters of Slice do not match"),
            (other, "it does not have the inputs and outputs of a block"),
        ] {
            let folder = try source.copy()
            let manifest = folder.appendingPathComponent("manifest.json")
            let url = folder.appendingPathComponent(file)
            let old = try (Data(contentsOf: url), sha256(of: url))
            let new = function.file()
            try new.write(to: url)
            try manifest.replace(old.1, with: sha256(of: url))
            try manifest.replace("\"size\": \(old.0.count)", with: "\"size\": \(new.count)")
            let bundle = try ModelBundle(url: folder)
            let sentence = message { _ = try bundle.importFunctions(\.plainFunctions, length: length, rank: rank) }
            #expect(
                sentence
                    == "\(file) in \(folder.path) is not a function that mesp-export writes (\(reason)); export the bundle again."
            )
        }
    }

    @Test func aFileThatLiesIsRefused() throws {
        let x = TestFunction.Array.array([16])
        func refused(
            _ reason: String, _ bad: TestFunction.Node..., for good: [TestFunction.Node], input: TestFunction.Array = x,
            line: Int = #line
        ) {
            #expect(said(TestFunction(input, good)) == "", "line \(line)")
            #expect(said(TestFunction(input, bad)).contains(reason), "line \(line)")
        }
        let unmatched = "do not match"
        refused(unmatched, .node("Exp", [], [0], .array([160])), for: [.node("Exp", [], [0], x)])
        refused(unmatched, .node("Exp", [], [0], .array([16], .uint8)), for: [.node("Exp", [], [0], x)])
        refused(unmatched, .node("Exp", [], [0, 0], x), for: [.node("Exp", [], [0], x)])
        refused("before it is computed", .node("Exp", [], [7], x), for: [.node("Exp", [], [0], x)])
        refused(
            "two of its arrays", .node("Exp", [], [0], x), .node("Exp", [], [0], x, id: 1),
            for: [.node("Exp", [], [0], x), .node("Exp", [], [0], x)])
        let slice = TestFunction.Node.node("Slice", [[12], [16], [1]], [0], .array([4]))
        refused(unmatched, .node("Slice", [[13], [17], [1]], [0], .array([4])), for: [slice])
        refused(unmatched, .node("Slice", [[-1], [3], [1]], [0], .array([4])), for: [slice])
        refused(unmatched, .node("Slice", [[12], [16], [1]], [0], .array([400])), for: [slice])
        let reshape = TestFunction.Node.node("Reshape", [[-1, 4]], [0], .array([4, 4]))
        refused(unmatched, .node("Reshape", [[-1, -1]], [0], .array([4, 4])), for: [reshape])
        refused(unmatched, .node("Reshape", [[-1, 5]], [0], .array([3, 5])), for: [reshape])
        refused("damaged", .node("Reshape", [[-4, -4]], [0], .array([-4, -4])), for: [reshape])
        let huge = [Int32](repeating: .max, count: 4)
        refused("too large", .node("Broadcast", [huge], [0], .array(huge)), for: [reshape])
        refused(
            "too large",
            .node("ExpandDims", [Swift.Array(0..<16)], [0], .array(Swift.Array(repeating: 1, count: 16) + [16])),
            for: [reshape])
        refused("too large", .node("Reshape", [huge], [0], .array(huge)), for: [reshape])
        refused("it is damaged", .node("A\nB", [], [0], x), for: [reshape])
        for name in ["AsStrided", "SliceUpdate", "Scatter", "CustomKernel"] {
            refused("the primitive \(name) is not supported", .node(name, [], [0], x), for: [reshape])
        }
    }

    @Test func whatMLXNeverMakesIsRefused() throws {
        typealias Node = TestFunction.Node
        let column = TestFunction.Array.array([4, 1])
        func refused(
            _ bad: Node, of input: TestFunction.Array, for good: Node? = nil, of other: TestFunction.Array? = nil,
            line: Int = #line
        ) {
            if let good { #expect(said(TestFunction(other ?? input, [good])) == "", "line \(line)") }
            #expect(said(TestFunction(input, [bad])).contains("do not match"), "line \(line)")
        }
        refused(
            .node("Reduce", integer: 2, [[1]], [0], column), of: column,
            for: .node("Reduce", integer: 2, [[1]], [0], column), of: .array([4, 2]))
        refused(
            .node("Reduce", integer: 2, [[0]], [0], .array([1, 2])), of: .array([0, 2]),
            for: .node("Reduce", integer: 2, [[0]], [0], .array([1, 2])), of: .array([4, 2]))
        refused(
            .node("Broadcast", [[4, 1]], [0], column), of: column,
            for: .node("Broadcast", [[4, 1]], [0], column), of: .array([1, 1]))
        refused(.node("Broadcast", [[4, 0]], [0], .array([4, 0])), of: column)
        refused(.node("ExpandDims", [[]], [0], column), of: column)
        refused(.node("Flatten", [], state: Data(count: 8), [0], column), of: column)
        refused(
            .node("Slice", [[0, 0], [4, 1], [1, 1]], [0], column), of: column,
            for: .node("Slice", [[0, 0], [4, 1], [1, 1]], [0], column), of: .array([5, 1]))
        refused(.node("Slice", [[0, 0], [1, 1], [2, 1]], [0], .array([1, 1])), of: column)
        refused(.node("Concatenate", integer: 0, [], [0], column), of: column)
        refused(.node("AsType", [], type: .float32, [0], column), of: column)
        refused(.node("View", [], type: .float32, [0], column), of: column)
        refused(.node("Exp", [], [0], .array([0])), of: .array([0]), for: .node("Exp", [], [0], column), of: column)
        let state = Data([0, 0, 128, 63, 1, 0, 0, 0])
        for (heads, size, isRefused) in [
            (1, 64, false), (1, 72, false), (1, 96, false), (0, 64, true), (1, 256, true),
        ] as [(Int32, Int32, Bool)] {
            let array = TestFunction.Array.array([1, heads, 9, size])
            let node = Node.node("ScaledDotProductAttention", [], state: state, [0, 0, 0], array, device: 1)
            let said = message { try check(TestFunction(array, [node]).file(), onGPU: true) }
            #expect(
                said.contains("do not match") == isRefused && (isRefused || said.isEmpty),
                "\(heads) of \(size): \(said)")
        }
        // These bytes are flags of attention besides the one for the causal mask. A function that sets one of them is refused.
        for index in 5...7 {
            var other = state
            other[index] = 1
            let array = TestFunction.Array.array([1, 1, 9, 64])
            let node = Node.node("ScaledDotProductAttention", [], state: other, [0, 0, 0], array, device: 1)
            #expect(message { try check(TestFunction(array, [node]).file(), onGPU: true) }.contains("do not match"))
        }
        let row = TestFunction.Array.array([4])
        let norm = Node.node("RMSNorm", [], state: Data([0, 0, 128, 63]), [0, 0], row)
        let file = TestFunction(row, [norm]).file()
        #expect(message { try check(file) } == "RMSNorm is for another device")
    }

    @Test func indicesAreKnownToBeWithinTheirArray() {
        func gather(of size: Int32, _ nodes: TestFunction.Node..., indices: UInt64, shape: [Int32]) -> String {
            let input = TestFunction.Array.array([size])
            return said(TestFunction(input, nodes + [.node("Gather", [[0], [1]], [0, indices], .array(shape + [1]))]))
        }
        let refused = "the indices of Gather may be out of bounds"
        for index: Int32 in [0, 5, 15] {
            #expect(gather(of: 16, .constant([index]), indices: 1, shape: []) == "")
        }
        for index: Int32 in [-1, 16, 1_000_000, .min] {
            #expect(gather(of: 16, .constant([index]), indices: 1, shape: []).contains(refused))
        }
        let computed = TestFunction.Node.node("View", [], type: .uint32, [0], .array([16], .uint32))
        #expect(gather(of: 16, computed, indices: 1, shape: [16]).contains(refused))
        func masked(_ mask: Int32, operation: Int32 = 0) -> String {
            gather(
                of: 16, computed, .constant([mask], .uint32), .node("Broadcast", [[16]], [2], .array([16], .uint32)),
                .node("BitwiseBinary", integer: operation, [], [1, 3], .array([16], .uint32)),
                .node("Broadcast", [[2, 16]], [4], .array([2, 16], .uint32)), indices: 5, shape: [2, 16])
        }
        #expect(masked(15) == "")
        #expect(masked(16).contains(refused))
        #expect(masked(15, operation: 1).contains(refused))
        let bytes = TestFunction.Node.node("AsType", [], type: .uint8, [0], .array([256], .uint8))
        #expect(gather(of: 256, bytes, indices: 1, shape: [256]) == "")
        let fewer = TestFunction.Node.node("AsType", [], type: .uint8, [0], .array([255], .uint8))
        #expect(gather(of: 255, fewer, indices: 1, shape: [255]).contains(refused))
    }

    @Test func theWholeFileIsOneOfABlocksFunctions() throws {
        let function = TestFunction(.array([16]), [.node("Exp", [], [0], .array([16]))])
        #expect(said(function) == "")
        for count in function.file().indices {
            #expect(message { try check(function.file().prefix(count)) } != "")
        }
        #expect(message { try check(function.file() + [0]) } == "it is damaged")
        #expect(message { try check(function.file(), onGPU: true) } == "Exp is for another device")
        for version in ["0.31.1", "0.32.1", "0.33.0", "0.32.x"] {
            let other = function.file().prefix(8) + Data(version.utf8) + function.file().dropFirst(14)
            #expect(message { try check(Data(other)) } == "it is not in the layout of MLX 0.32.2")
        }
        var metadata = function.file()
        metadata.replaceSubrange(19..<27, with: text("a"))
        #expect(message { try check(metadata) } == "it is damaged")
    }

    @Test func layoutsOfVersions() {
        for version in ["0.32.2", "0.32.4", "0.32.10"] { #expect(hasFunctionLayout(mlx: version), "\(version)") }
        for version in ["0.31.1", "0.32.0", "0.32.1", "0.33.0", "0.33.2", "1.32.2", "0.32", "0.32.2.1", ""] {
            #expect(!hasFunctionLayout(mlx: version), "\(version)")
        }
    }

    private func check(_ file: Data, onGPU: Bool = false) throws {
        _ = try checkFunctions(file, onGPU: onGPU)
    }

    private func said(_ function: TestFunction) -> String {
        message { try check(function.file()) }
    }
}

private struct TestFunction {
    enum Element: Int32 {
        case uint8 = 1
        case uint32 = 3
        case int32 = 7
        case float32 = 10
        var bytes: UInt8 { self == .uint8 ? 1 : 4 }
        var data: Data { numberData(rawValue) + [bytes] }
    }

    struct Array {
        let shape: [Int32]
        let element: Element
        static func array(_ shape: [Int32], _ element: Element = .float32) -> Array {
            Array(shape: shape, element: element)
        }
        var data: Data { list(shape.map(numberData)) + element.data }
    }

    struct Node {
        let id: UInt64?
        let content: Data

        static func node(
            _ name: String, integer: Int32? = nil, _ lists: [[Int32]] = [], type: Element? = nil,
            state: Data = Data(), _ inputs: [UInt64],
            _ output: Array, id: UInt64? = nil, device: Int32 = 0
        ) -> Node {
            var content = Data([1]) + list(inputs.map(numberData)) + [0, device, 0].map(numberData).reduce(Data(), +)
            content += text(name)
            content += integer.map(numberData) ?? Data()
            content += lists.map { list($0.map(numberData)) }.reduce(Data(), +) + (type?.data ?? Data()) + state
            return Node(id: id, content: content + numberData(UInt64(0)) + output.data)
        }

        static func constant(_ values: [Int32], _ element: Element = .int32) -> Node {
            let shape = values.count == 1 ? [] : [Int32(values.count)]
            return Node(
                id: nil,
                content: Data([0, 1]) + Array(shape: shape, element: element).data
                    + values.map(numberData).reduce(Data(), +))
        }
    }

    private let body: Data

    init(_ input: Array, _ nodes: [Node], outputs: Int = 1) {
        let tape = nodes.enumerated().map { numberData($1.id ?? UInt64($0 + 1)) + $1.content }
        let ids = list([numberData(UInt64(0))]) + list([input.data])
        let last = nodes.last?.id ?? UInt64(nodes.count)
        body =
            list([]) + ids + list(Swift.Array(repeating: numberData(last), count: outputs))
            + list([numberData(UInt64(0)) + [0, 0]] + tape)
    }

    func file() -> Data { text("0.32.2") + numberData(Int32(1)) + [0] + text("") + body }
}

private func numberData<Integer: FixedWidthInteger>(_ number: Integer) -> Data {
    withUnsafeBytes(of: number.littleEndian) { Data($0) }
}

private func list(_ items: [Data]) -> Data { numberData(UInt64(items.count)) + items.reduce(Data(), +) }

private func text(_ text: String) -> Data { numberData(UInt64(text.utf8.count)) + Data(text.utf8) }
