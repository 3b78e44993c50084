import MLX
import MeSPBundle

/// A processor with the sizes of the parts that formulas are computed in, for sequences of one length. The sizes keep temporaries small.
///
/// A CPU cuts W by rows, so that each row is unpacked once for all tokens. Unpacking W costs a GPU nothing, so a GPU cuts wide arrays by tokens.
/// Cutting by tokens takes the same memory as cutting by rows, with fewer and larger kernels. Parts.swift says how a part is computed.
package struct Machine {
    package let processor: Processor
    /// The size near which temporaries stay, in bytes.
    let bytes: Int
    /// The number of rows of a projection's weight in a tile.
    var projectionRows = Int.max
    /// The number of the MLP's features in a tile, a multiple of the quantization group.
    var features = Int.max
    /// The number of tokens in a segment. Some mixers take a longer sequence in segments.
    var mixerTokens = Int.max
    /// The number of tokens that go through the MLP, its derivative and the loss at a time.
    var mlpTokens = Int.max
    /// The number of tokens in a tile of the MLP and of its derivative.
    var mlpTileTokens = Int.max
    /// The numbers of query rows and of key-value heads in a tile of attention.
    var queryRows = Int.max
    var keyHeads = Int.max
    /// The numbers of tokens and of rows of the vocabulary in a tile of the loss. Each tile of tokens reads W again.
    var lossTokens = Int.max
    var vocabularyRows = Int.max
    /// Whether the machine evaluates each part of a formula (`evaluatesParts`), each of several tiles (`evaluatesTiles`), and each stage of a phase
    /// (`evaluatesStages`).
    private(set) var evaluatesParts: Bool
    let evaluatesTiles: Bool
    var evaluatesStages = true
    /// A function called after the evaluation of each part; nil once the kernels are compiled. A GPU compiles kernels in its first step, and in the
    /// first pass over a text, for some seconds per block. Without these calls, a person who leaves the app would wait for the block's end.
    let pause: (() -> Void)?

    /// Makes a machine that cuts only heads and rows of arrays.
    package init(_ processor: Processor, bytes: Int = uncut, pause: (() -> Void)? = nil) {
        (self.processor, self.bytes, self.pause) = (processor, bytes, pause)
        evaluatesTiles = processor.backend == .cpu && bytes < Self.uncut
        evaluatesParts = evaluatesTiles
    }

    /// The machine of a forward pass. It evaluates the parts of a phase together, as a phase of the forward pass has few arrays.
    var forForwardPass: Machine {
        var machine = self
        machine.evaluatesParts = false
        return machine
    }

    /// The value of `bytes` with which nothing is cut.
    package static let uncut = Int.max / 2

    /// The most multiplications between two boundaries of the head, unless one tile has more; nil for `Processor.workBetweenBoundaries`.
    @TaskLocal static var mostWork: Int?

    /// The most tokens of a segment. At most half of this number go through the MLP and the loss at a time. If few query rows fit in a tile of
    /// attention, the tile has at most a sixteenth of this number of rows. Tests set this number to cut short sequences.
    @TaskLocal package static var segmentTokens = 1024

    /// Returns the number of rows of x `[n, …]` that row-wise arithmetic takes at a time. On a CPU each operation writes an array. So on a CPU these
    /// rows take a quarter of `bytes`, so that several such arrays take the memory of a tile of a product.
    func rowsAtOnce(of x: MLXArray) -> Int {
        evaluatesTiles ? max(1, bytes / 4 * x.dim(0) / x.nbytes) : x.dim(0)
    }

    /// Returns the number of columns of x `[n, …]` that column-wise arithmetic takes at a time. If W is dequantized before a product, all columns are
    /// taken, as x then has a column for each dequantized row of W.
    func columnsAtOnce(of x: MLXArray) -> Int {
        evaluatesTiles && processor.dequantizesInProduct ? max(1, bytes / 4 / (x.nbytes / x.dim(1))) : x.dim(1)
    }
}
