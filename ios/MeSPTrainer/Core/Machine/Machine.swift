import MLX
import MeSPBundle

/// A processor at work on sequences of one length: the parts that a formula is computed by, so that temporaries stay near a size.
///
/// A CPU cuts W by rows, so that each row is unpacked once for all tokens. A GPU cuts wide arrays by tokens, as W costs nothing there: fewer and
/// larger kernels take the same memory. Parts.swift says how a part is computed.
package struct Machine {
    package let processor: Processor
    /// The size of a temporary, in bytes.
    let bytes: Int
    /// Rows of a projection's weight.
    var projectionRows = Int.max
    /// Intermediate features of the MLP, a multiple of the quantization group.
    var features = Int.max
    /// Tokens of a segment, of a mixer that goes by segments where the sequence is longer.
    var mixerTokens = Int.max
    /// Tokens that go through the MLP, its derivative and the loss at a time.
    var mlpTokens = Int.max
    /// Tokens in a tile of the MLP and of its derivative.
    var mlpTileTokens = Int.max
    /// Query rows of attention, and the key-value heads that they go through at a time.
    var queryRows = Int.max
    var keyHeads = Int.max
    /// Tokens in a tile of the loss, and rows of the vocabulary. W is read again for each of the former.
    var lossTokens = Int.max
    var vocabularyRows = Int.max
    /// Whether each part of a formula is evaluated, each of several tiles, and each stage of a phase.
    private(set) var evaluatesParts: Bool
    let evaluatesTiles: Bool
    var evaluatesStages = true
    /// Called after each part, which is evaluated first. A GPU compiles kernels in its first step, and in the first pass of a text, for some
    /// seconds a block; without this a person who leaves the app would wait for the block's end. nil where that is over.
    let pause: (() -> Void)?

    /// A machine that cuts nothing but heads and rows of arrays.
    package init(_ processor: Processor, bytes: Int = uncut, pause: (() -> Void)? = nil) {
        (self.processor, self.bytes, self.pause) = (processor, bytes, pause)
        evaluatesTiles = processor.backend == .cpu && bytes < Self.uncut
        evaluatesParts = evaluatesTiles
    }

    /// The machine of a forward pass. It evaluates the parts of a phase together, as they have few arrays.
    var forForwardPass: Machine {
        var machine = self
        machine.evaluatesParts = false
        return machine
    }

    /// The size of temporaries where nothing is cut.
    package static let uncut = Int.max / 2

    /// The multiplications from one boundary of the head to the next, where a part of the vocabulary has no more; nil for the processor's.
    @TaskLocal static var mostWork: Int?

    /// The most tokens of a segment, twice those that go through the MLP and the loss at a time, and 16 times the query rows of attention
    /// where these are few; tests cut short sequences.
    @TaskLocal package static var segmentTokens = 1024

    /// The number of rows of x `[n, …]` that go through arithmetic by rows at a time: on a CPU, where each operation writes an array, as many as
    /// take a quarter of `bytes`, so that some take what a tile of a product does.
    func rowsAtOnce(of x: MLXArray) -> Int {
        evaluatesTiles ? max(1, bytes / 4 * x.dim(0) / x.nbytes) : x.dim(0)
    }

    /// The columns of x `[n, …]`, likewise. Where W is dequantized before a product, x is as wide as the part of W that is.
    func columnsAtOnce(of x: MLXArray) -> Int {
        evaluatesTiles && processor.dequantizesInProduct ? max(1, bytes / 4 / (x.nbytes / x.dim(1))) : x.dim(1)
    }
}
