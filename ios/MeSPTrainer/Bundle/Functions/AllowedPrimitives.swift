import Foundation
import MeSPFiles

/// The primitives that a function in a bundle may have: exporter/mesp/block_function/allowed_primitives.json, whose text says what its
/// fields are. `tests/block_function/test_check_functions.py` holds the copy here equal to it.
struct AllowedPrimitives: Decodable {
    /// MLX's code of each type, and the bytes of an element.
    let types: [ElementType: [Int]]
    let limits: Limits
    /// The arrays that a block's function takes and returns, by the parts of a block: see `FunctionSignature`.
    let signature: Signature
    /// Bits and group sizes by MLX's code of the mode.
    let quantizations: [String: [[Int]]]
    /// For which arrays there is a kernel of attention.
    let attention: Attention
    let primitives: [String: Primitive]

    /// The type with MLX's code and the bytes of an element.
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

    private static let json = #"""
        {
          "about": "Which primitives of MLX a function in a bundle may have, what their state is, and what holds between their inputs, state and outputs. docs/security.md says what for, and exporter/mesp/block_function/mlxfn.py how a file is laid out. An array has at most `dimensions` dimensions, each from 0 to 2^31 - 1, and at most `array_bytes` bytes.",
          "mlx": "0.32.2",
          "types": {"bool": [0, 1], "uint8": [1, 1], "uint32": [3, 4], "uint64": [4, 8], "int32": [7, 4], "float32": [10, 4], "bfloat16": [12, 2]},
          "limits": {"dimensions": 16, "array_bytes": 1099511627776},
          "signature": {
            "about": "The inputs and outputs of a block's function: of each array its type, where `dtype` is the manifest's, and its shape. Behind `inputs` come `per_layer`, of a model with embeddings for each layer, its layer's part of them; `shared`, of attention that takes the keys and values of another block, these; and of a function for packed records `packed`, of each token the position at which its record begins. `lora` is the number of LoRA parameters of a rank, `words` the length of the block's file. A block returns `first`, the four arrays of its mixer, `then`, and with post-norms `post_norms`.",
            "inputs": ["dtype 1 length hidden", "float32 lora", "float32", "uint32 words"],
            "per_layer": ["dtype 1 length per_layer"],
            "shared": ["dtype 1 kv_heads length head_dim", "dtype 1 kv_heads length head_dim"],
            "packed": ["int32 length"],
            "first": ["dtype 1 length hidden", "dtype 1 length hidden"],
            "attention": ["dtype 1 heads length query", "dtype 1 kv_heads length head_dim", "dtype 1 kv_heads length head_dim", "dtype 1 length mixer_width"],
            "gated_delta_net": ["dtype 1 length channels", "dtype 1 length mixer_width", "dtype 1 length ba", "dtype 1 length mixer_width"],
            "short_convolution": ["dtype 1 length hidden", "dtype 1 length hidden", "dtype 1 length hidden", "dtype 1 length hidden"],
            "mamba2": ["dtype 1 length mixer_width", "dtype 1 length channels", "dtype 1 length heads", "dtype 1 length mixer_width"],
            "then": ["dtype 1 length hidden", "dtype 1 length intermediate", "dtype 1 length intermediate"],
            "post_norms": ["dtype 1 length hidden", "dtype 1 length hidden"]
          },
          "state": {
            "i": "int32",
            "f": "float32",
            "d": "float64",
            "?": "bool, a byte that is 0 or 1",
            "B": "uint8",
            "iB": "a type: its code, and the bytes of an element",
            "S": "a list of int32: its length as uint64, and its items"
          },
          "allowed": "Of each field of the state from the first on, the values that it may have.",
          "empty": "Whether its arrays may have no element. Of a head that is turned as a whole, MLX's operations put the part that is not turned, which is empty, behind the one that is.",
          "changes": "Whether the outputs have another shape or type than the first input. Where they would not, MLX's operation makes no such primitive but returns its input (ops.cpp), and the primitive may read or write outside of its arrays.",
          "device": "MLX's code of the only device, where there is one: on others MLX's operation makes other primitives (fast.cpp).",
          "quantizations": {"0": [[2, 32], [2, 64], [2, 128], [3, 32], [3, 64], [3, 128], [4, 32], [4, 64], [4, 128], [5, 32], [5, 64], [5, 128], [6, 32], [6, 64], [6, 128], [8, 32], [8, 64], [8, 128]], "1": [[4, 32]], "2": [[8, 32]], "3": [[4, 16]]},
          "attention": {
            "about": "For which arrays MLX takes Metal's kernel of attention (scaled_dot_product_attention.cpp); for others MLX's operation makes other primitives. Up to `short` queries a head, d is one of `short_dims`, and queries times heads / kv is at most `short_rows`; with more, d is one of `long_dims`.",
            "short": 8,
            "short_dims": [64, 96, 128, 256],
            "short_rows": 32,
            "long_dims": [64, 72, 80, 96, 128]
          },
          "rules": {
            "elementwise": "`inputs` arrays of one shape and type; the output has both.",
            "compare": "Two arrays of one shape and type; the output is bool, of that shape.",
            "select": "A bool array and two of one type, all of one shape; the output has that shape and type.",
            "convert": "One array; the output has its shape and the type in the state.",
            "view": "One array of at least one dimension; the output has the type in the state, and its shape but for the last dimension, whose bytes are as many.",
            "arange": "No array; the output has one dimension, of max(0, ceil((stop - start) / step)) for the finite start, stop and step in the state, where step is not 0.",
            "broadcast": "One array; the output has the shape in the state, whose last dimensions are the array's where those are not 1.",
            "reshape": "One array; the output has the shape in the state, of as many elements, where -1 stands at most once for what is left.",
            "expand": "One array; the output has its dimensions, and ones at the ascending places in the state.",
            "squeeze": "One array; the output lacks the dimensions at the ascending places in the state, which are 1.",
            "flatten": "One array; the output has one dimension in place of those from the first to the second in the state, which is greater.",
            "unflatten": "One array; the output has the shape in the state in place of the dimension in the state, of as many elements.",
            "transpose": "One array; the output's dimension i is the array's at place i of the state, a permutation.",
            "slice": "One array; of each dimension the state has 0 <= start <= stop <= size and step >= 1, and the output n = ceil((stop - start) / step); step is 1 where n is.",
            "split": "One array; the outputs are its parts along the dimension in the state, between the ascending indices in the state, of which there are 1 to 9.",
            "concatenate": "Two arrays or more of one type, and of one shape but for the dimension in the state, of which the output has the sum.",
            "depends": "At least as many arrays as outputs; output i has the shape and type of array i.",
            "gather": "An array and one of indices, for the one dimension in the state; the output has the shape of the indices, and behind it the slice sizes in the state, none greater than the array's, and 1 for that dimension. Indices are known to be below the dimension: uint8 for one of 256 or more, a constant of integers from 0 on, that broadcast, or the bitwise and (0) of anything with such a one.",
            "reduce": "One array; the output has its shape, but 1 at the ascending places in the state, of which there is one or more.",
            "scan": "One array, with the dimension in the state; the output has its shape and type.",
            "softmax": "One array of at least one dimension; the output has its shape and type.",
            "norm": "An array [..., n] and a weight [n] of one type; the output has the shape and type of the first.",
            "product": "A [..., m, k] and B [..., k, n] of one type, of the same other dimensions; the output is [..., m, n]. AddMM has a third of that shape and type.",
            "quantized": "x [..., k], w uint32 [n, k * bits / 32] and scales [n, k / group_size], for a quantization of `quantizations` in the state, transposed; for mode 0 biases as the scales, both of the type of x, for others uint8 scales alone. The output is [..., n], of the type of x.",
            "rope": "x [batch, heads, length, d], a constant int32 offset [], and float32 periods [dims / 2], where dims is the first of the state, even, from 2 to d; the output has the shape and type of x.",
            "attention": "q [batch, heads, n, d], k and v [batch, kv, m, d] of one type, where kv divides heads, n is at most m, and Metal has a kernel (`attention`), and a bool mask [batch, heads, n, m] unless the state says causal; the state has no sinks and no logarithms, and does not force the kernel. The output is q's shape and type."
          },
          "primitives": {
            "Add": {"state": "", "rule": "elementwise", "types": ["int32", "float32", "bfloat16"], "inputs": 2},
            "AddMM": {"state": "ff", "rule": "product", "types": ["float32", "bfloat16"]},
            "Arange": {"state": "ddd", "rule": "arange", "types": ["int32", "uint32", "uint64", "float32"]},
            "AsType": {"state": "iB", "rule": "convert", "types": ["bool", "uint8", "uint32", "uint64", "int32", "float32", "bfloat16"], "changes": true},
            "BitwiseBinary": {"state": "i", "rule": "elementwise", "types": ["bool", "uint32", "uint64"], "inputs": 2, "allowed": [[0, 1, 2, 3, 4]]},
            "Broadcast": {"state": "S", "rule": "broadcast", "types": ["bool", "uint8", "uint32", "uint64", "int32", "float32", "bfloat16"], "changes": true},
            "Concatenate": {"state": "i", "rule": "concatenate", "types": ["float32", "bfloat16"], "empty": true},
            "Cos": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 1},
            "Depends": {"state": "", "rule": "depends", "types": ["bool", "uint8", "uint32", "uint64", "int32", "float32", "bfloat16"]},
            "Divide": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 2},
            "Exp": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 1},
            "ExpandDims": {"state": "S", "rule": "expand", "types": ["bool", "uint8", "uint32", "uint64", "int32", "float32", "bfloat16"], "changes": true},
            "Flatten": {"state": "ii", "rule": "flatten", "types": ["bool", "uint8", "uint32", "uint64", "int32", "float32", "bfloat16"], "changes": true},
            "Full": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 1},
            "Gather": {"state": "SS", "rule": "gather", "types": ["float32", "bfloat16"]},
            "Greater": {"state": "", "rule": "compare", "types": ["int32"]},
            "GreaterEqual": {"state": "", "rule": "compare", "types": ["int32"]},
            "Less": {"state": "", "rule": "compare", "types": ["int32"]},
            "LogAddExp": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 2},
            "Matmul": {"state": "", "rule": "product", "types": ["float32", "bfloat16"]},
            "Multiply": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 2},
            "Negative": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 1},
            "Power": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 2},
            "QuantizedMatmul": {"state": "iii?", "rule": "quantized", "types": ["float32", "bfloat16"]},
            "RMSNorm": {"state": "f", "rule": "norm", "types": ["float32", "bfloat16"], "device": 1},
            "Reduce": {"state": "iS", "rule": "reduce", "types": ["uint32", "uint64", "float32", "bfloat16"], "allowed": [[2]], "changes": true},
            "Reshape": {"state": "S", "rule": "reshape", "types": ["bool", "uint8", "uint32", "uint64", "int32", "float32", "bfloat16"]},
            "RoPE": {"state": "i?ff?", "rule": "rope", "types": ["float32", "bfloat16"], "device": 1},
            "Scan": {"state": "ii??", "rule": "scan", "types": ["float32", "bfloat16"], "allowed": [[2]]},
            "ScaledDotProductAttention": {"state": "f????", "rule": "attention", "types": ["float32", "bfloat16"], "device": 1},
            "Select": {"state": "", "rule": "select", "types": ["float32", "bfloat16"]},
            "Sigmoid": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 1},
            "Sin": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 1},
            "Slice": {"state": "SSS", "rule": "slice", "types": ["bool", "uint8", "uint32", "uint64", "int32", "float32", "bfloat16"], "empty": true, "changes": true},
            "Softmax": {"state": "?", "rule": "softmax", "types": ["float32", "bfloat16"]},
            "Split": {"state": "Si", "rule": "split", "types": ["float32", "bfloat16"], "changes": true},
            "Sqrt": {"state": "?", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 1},
            "Square": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 1},
            "Squeeze": {"state": "S", "rule": "squeeze", "types": ["bool", "uint8", "uint32", "uint64", "int32", "float32", "bfloat16"]},
            "Subtract": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 2},
            "Tanh": {"state": "", "rule": "elementwise", "types": ["float32", "bfloat16"], "inputs": 1},
            "Transpose": {"state": "S", "rule": "transpose", "types": ["bool", "uint8", "uint32", "uint64", "int32", "float32", "bfloat16"]},
            "Unflatten": {"state": "iS", "rule": "unflatten", "types": ["bool", "uint8", "uint32", "uint64", "int32", "float32", "bfloat16"], "changes": true},
            "View": {"state": "iB", "rule": "view", "types": ["bool", "uint8", "uint32", "uint64", "int32", "float32", "bfloat16"], "changes": true}
          }
        }
        """#
}
