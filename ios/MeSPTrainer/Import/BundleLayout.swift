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

    init(_ block: BlockShape, _ index: Int, _ quantizations: Quantizations, _ dtype: ElementType) throws {
        let plain = block.plainArrays
        func isBias(_ weight: Weight) -> Bool { weight.name.hasSuffix(".bias") }
        var arrays = plain.filter { !isBias($0) }.map { PlacedArray($0.name, $0.shape, dtype) }
        for matrix in block.matrices {
            let (rows, columns) = (matrix.shape[0], matrix.shape[1])
            let quantization = try quantizations.of("model.layers.\(index).\(matrix.name)", columns: columns)
            arrays += quantization.arrays("\(matrix.name).", rows: rows, columns: columns, dtype)
            arrays += plain.filter { $0.name == "\(matrix.name).bias" }.map { PlacedArray($0.name, $0.shape, dtype) }
        }
        self.init(arrays)
    }

    /// Creates the layout of the file of the embedding or the head.
    ///
    /// - Parameter hasNorm: whether the file also has the model's last norm.
    init(
        _ architecture: Architecture, table: String, _ quantizations: Quantizations, _ dtype: ElementType, hasNorm: Bool
    )
        throws
    {
        let hidden = architecture.hiddenSize
        let quantization = try quantizations.of(table, columns: hidden)
        let norm = hasNorm ? [PlacedArray("norm", [hidden], dtype)] : []
        self.init(quantization.arrays("", rows: architecture.vocabSize, columns: hidden, dtype) + norm)
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
