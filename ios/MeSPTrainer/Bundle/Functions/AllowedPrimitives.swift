import Foundation
import MeSPFiles

/// The primitives that a function in a bundle may have, from exporter/mesp/block_function/allowed_primitives.json, which describes its fields. `json`
/// in AllowedPrimitivesTable.swift is generated from it.
struct AllowedPrimitives: Decodable {
    /// MLX's code of each type, and the size of an element in bytes.
    let types: [ElementType: [Int]]
    let limits: Limits
    /// The arrays that a block's function takes and returns, for each part of a block. See `FunctionSignature`.
    let signature: Signature
    /// Pairs of bits and group size that MLX supports, by MLX's code of the quantization mode.
    let quantizations: [String: [[Int]]]
    /// The arrays for which MLX has an attention kernel.
    let attention: Attention
    let primitives: [String: Primitive]

    /// Returns the type for a pair of MLX's code and element size.
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
