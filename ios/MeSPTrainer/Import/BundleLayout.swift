import MeSPBundle
import MeSPFiles

struct PlacedArray: Equatable {
    let name: String
    let shape: [Int]
    let dtype: ElementType

    init(_ name: String, _ shape: [Int], _ dtype: ElementType) {
        (self.name, self.shape, self.dtype) = (name, shape, dtype)
    }

    fileprivate var words: Int { (shape.reduce(1, *) * dtype.dtype.size + 3) / 4 }
}

/// The layout of a weight file: consecutive arrays, each at a multiple of 64 bytes.
struct BundleLayout: Equatable {
    private(set) var words = 0
    private let arrays: [PlacedArray]

    private static let alignment = 16  // words

    init(_ arrays: [PlacedArray]) {
        self.arrays = arrays
        let end = arrays.reduce(0) { $0 + Self.aligned($1.words) }
        let page = mappingUnit / 4
        words = (end + page - 1) / page * page
    }

    private static func aligned(_ words: Int) -> Int { (words + alignment - 1) / alignment * alignment }

    init(
        _ block: BlockShape, _ index: Int, _ quantizations: Quantizations, dtype: (_ tensor: String) -> ElementType
    ) throws {
        let module = "model.layers.\(index)."
        func placed(_ weight: Weight) -> PlacedArray { .init(weight.name, weight.shape, dtype(module + weight.name)) }
        let plain = block.plainArrays
        var arrays = plain.filter { !$0.name.hasSuffix(".bias") }.map(placed)
        for matrix in block.matrices {
            let (rows, columns) = (matrix.shape[0], matrix.shape[1])
            let quantization = try quantizations.of(module + matrix.name, columns: columns)
            let type = dtype("\(module)\(matrix.name).scales")
            arrays += quantization.arrays(matrix.name, rows: rows, columns: columns, type)
            arrays += plain.filter { $0.name == "\(matrix.name).bias" }.map(placed)
        }
        self.init(arrays)
    }

    init(
        _ architecture: Architecture, table: String, _ quantizations: Quantizations, hasNorm: Bool,
        dtype: (_ tensor: String) -> ElementType
    ) throws {
        let hidden = architecture.hiddenSize
        let quantization = try quantizations.of(table, columns: hidden)
        let norm = hasNorm ? [PlacedArray("norm", [hidden], dtype("model.norm.weight"))] : []
        let table = quantization.arrays("", rows: architecture.vocabSize, columns: hidden, dtype("\(table).scales"))
        self.init(table + norm)
    }

    var fields: [String: JSONValue] {
        var offset = 0
        let entries = arrays.map { array -> JSONValue in
            defer { offset += Self.aligned(array.words) }
            return .object([
                "name": .string(array.name), "offset": .integer(offset), "dtype": .string(array.dtype.rawValue),
                "shape": .array(array.shape.map(JSONValue.integer)),
            ])
        }
        return ["words": .integer(words), "arrays": .array(entries)]
    }
}
