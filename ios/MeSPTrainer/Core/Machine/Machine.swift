import MLX
import MeSPBundle

/// A processor, and the tile sizes of computations on it for one sequence length. The sizes keep temporary arrays small.
package struct Machine {
    package let processor: Processor
    /// The approximate size limit of temporary arrays, in bytes.
    let bytes: Int
    /// The number of rows of a projection's weight in a tile.
    var projectionRows = Int.max
    /// The number of the MLP's features in a tile, a multiple of the quantization group.
    var features = Int.max
    /// The maximum number of tokens that a mixer processes at a time, in one segment of the sequence.
    var mixerTokens = Int.max
    /// The number of tokens that go through the MLP, its backward pass and the loss at a time.
    var mlpTokens = Int.max
    /// The number of tokens in a tile of the MLP and of its backward pass.
    var mlpTileTokens = Int.max
    /// The numbers of query rows and of key-value heads in a tile of attention.
    var queryRows = Int.max
    var keyHeads = Int.max
    /// The numbers of tokens and of rows of the vocabulary in a tile of the loss.
    var lossTokens = Int.max
    var vocabularyRows = Int.max
    /// These values and `pause` decide where the functions of Parts.swift evaluate arrays.
    private(set) var evaluatesParts: Bool
    let evaluatesTiles: Bool
    /// Whether nothing is evaluated, as within a transformation of MLX.
    var isLazy = false
    var evaluatesStages = true
    /// A function called after the evaluation of each part while a GPU compiles kernels; otherwise nil. Compiling takes some seconds per block. The
    /// calls let the app pause within a block.
    let pause: (() -> Void)?

    /// Creates a machine with unlimited tile sizes. `bytes` then limits only computations that process some heads, rows or columns at a time.
    package init(_ processor: Processor, bytes: Int = uncut, pause: (() -> Void)? = nil) {
        (self.processor, self.bytes, self.pause) = (processor, bytes, pause)
        evaluatesTiles = processor.backend == .cpu && bytes < Self.uncut
        evaluatesParts = evaluatesTiles
    }

    /// The machine of a forward pass.
    var forForwardPass: Machine {
        var machine = self
        machine.evaluatesParts = false
        return machine
    }

    /// The value of `bytes` that sets no limit on temporary arrays.
    package static let uncut = Int.max / 2

    /// The maximum number of multiplications between two calls of `atBoundary` in the head; nil for `Processor.workBetweenBoundaries`.
    @TaskLocal static var mostWork: Int?

    /// The maximum number of tokens in a segment of a split sequence (`mixerTokens`). The sizes of some other tiles depend on this number. Tests
    /// lower it to split short sequences.
    @TaskLocal package static var segmentTokens = 1024

    /// Returns the number of rows of x `[n, …]` that row-wise arithmetic processes at a time: all, or on a CPU with a limit, as many as take a
    /// quarter of `bytes`, but at least one.
    func rowsAtOnce(of x: MLXArray) -> Int {
        evaluatesTiles ? max(1, bytes / 4 * x.dim(0) / x.nbytes) : x.dim(0)
    }

    /// Returns the number of columns of x `[n, …]` that column-wise arithmetic processes at a time.
    func columnsAtOnce(of x: MLXArray) -> Int {
        evaluatesTiles && processor.dequantizesInProduct ? max(1, bytes / 4 / (x.nbytes / x.dim(1))) : x.dim(1)
    }
}
