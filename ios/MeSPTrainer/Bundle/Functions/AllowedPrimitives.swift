import Foundation
import MeSPFiles

/// The MLX primitives that a bundle's function may contain. exporter/mesp/block_function/allowed_primitives.json defines them, and `json` is
/// generated from it.
struct AllowedPrimitives: Decodable {
    /// For each element type, MLX's code and the size in bytes.
    let types: [ElementType: [Int]]
    let limits: Limits
    let signature: Signature
    let quantizations: [String: [[Int]]]
    let attention: Attention
    let primitives: [String: Primitive]

    func element(_ code: [Int]) -> ElementType? { types.first { $0.value == code }?.key }

    struct Limits: Decodable {
        let dimensions: Int
        let arrayBytes: Int
    }

    struct Attention: Decodable {
        let short, shortRows: Int
        let shortDims, longDims: [Int]
    }

    struct Signature: Decodable {
        let inputs, packed, shared, first, then: [String]
        let attention, gatedDeltaNet, shortConvolution, mamba2: [String]
        let postNorms, perLayer: [String]
    }

    struct Primitive: Decodable {
        let state: String
        let rule: Rule
        let types: Set<ElementType>
        let inputs: Int?
        let allowed: [[Int]]?
        let empty, changes: Bool?
        let device: Int32?
    }

    enum Rule: String, Decodable {
        case arange, attention, broadcast, compare, concatenate, convert, depends, elementwise, expand, flatten, gather,
            norm
        case product, quantized, reduce, reshape, rope, scan, select, slice, softmax, split, squeeze, transpose,
            unflatten, view
    }

    static let list = Result { try JSONDecoder.snakeCase.decode(AllowedPrimitives.self, from: Data(json.utf8)) }
}
