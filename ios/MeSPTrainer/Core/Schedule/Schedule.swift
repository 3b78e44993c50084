import MLX
import MeSPBundle

/// A processor, and the tile sizes of computations on it for one sequence length. The sizes keep temporary arrays small.
package struct Schedule {
    package let processor: Processor
    let bytes: Int
    var projectionRows = Int.max
    /// The number of the MLP's features in a tile, a multiple of the quantization group.
    var features = Int.max
    /// The maximum number of tokens that a mixer processes at a time, in one segment of the sequence.
    var mixerTokens = Int.max
    var mlpTokens = Int.max
    var mlpTileTokens = Int.max
    var queryRows = Int.max
    var keyHeads = Int.max
    var lossTokens = Int.max
    var vocabularyRows = Int.max
    /// These values and `pause` decide where the functions of Parts.swift evaluate arrays.
    private(set) var evaluatesParts: Bool
    let evaluatesTiles: Bool
    var isLazy = false
    var evaluatesStages = true
    /// A function called after the evaluation of each part while a GPU compiles kernels; otherwise nil. Compiling takes some seconds per block. The
    /// calls let the app pause within a block.
    let pause: (() -> Void)?

    /// `bytes` then limits only computations that process some heads, rows or columns at a time.
    package init(_ processor: Processor, bytes: Int = uncut, pause: (() -> Void)? = nil) {
        (self.processor, self.bytes, self.pause) = (processor, bytes, pause)
        evaluatesTiles = processor.backend == .cpu && bytes < Self.uncut
        evaluatesParts = evaluatesTiles
    }

    var forForwardPass: Schedule {
        var schedule = self
        schedule.evaluatesParts = false
        return schedule
    }

    package static let uncut = Int.max / 2

    /// The maximum number of multiplications between two calls of `atBoundary` in the head; nil for `Processor.workBetweenBoundaries`.
    @TaskLocal static var mostWork: Int?

    @TaskLocal package static var segmentTokens = 1024

    func rowsAtOnce(of x: MLXArray) -> Int {
        evaluatesTiles ? max(1, bytes / 4 * x.dim(0) / x.nbytes) : x.dim(0)
    }

    func columnsAtOnce(of x: MLXArray) -> Int {
        evaluatesTiles && processor.dequantizesInProduct ? max(1, bytes / 4 / (x.nbytes / x.dim(1))) : x.dim(1)
    }
}
