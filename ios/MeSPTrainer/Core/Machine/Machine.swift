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
    /// Tokens that go through the MLP, its derivative and the loss at a time, and the tokens of a tile of that derivative.
    var mlpTokens = Int.max
    var tokens = Int.max
    /// Query rows of attention, and the key-value heads that they go through at a time.
    var queryRows = Int.max
    var keyHeads = Int.max
    /// Tokens in a tile of the loss, and rows of the vocabulary. W is read again for each of the former.
    var lossTokens = Int.max
    var vocabularyRows = Int.max
    /// Whether each part of a formula is evaluated, each of several tiles, and each stage of a phase.
    private(set) var evaluatesParts: Bool
    let evaluatesTiles: Bool
    private(set) var evaluatesStages = true
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
    var forward: Machine {
        var machine = self
        machine.evaluatesParts = false
        return machine
    }

    /// The sizes to which temporaries may be cut, in bytes, from the largest, which the default plan takes: larger ones are no faster. On a
    /// GPU, where a kernel costs as much as some 500 kB of memory traffic, they grow with the sequence, so that a step of any length has
    /// about as many kernels, up to where that is a tenth of what the kernel takes; in wide models, whose products take longer, less.
    static func choices(_ backend: Backend, hiddenSize: Int, length: Int) -> [Int] {
        let largest = backend == .cpu ? 1 << 20 : min(min(4096, (4 << 20) / hiddenSize) * length, 7 << 19)
        return [largest, largest / 2, largest / 4]
    }

    /// The size of temporaries where nothing is cut.
    package static let uncut = Int.max / 2

    /// The multiplications from one boundary of the head to the next, where a part of the vocabulary has no more; nil for the processor's.
    @TaskLocal static var mostWork: Int?

    /// The most tokens of a segment, twice those that go through the MLP and the loss at a time, and 16 times the query rows of attention
    /// where these are few; tests cut short sequences.
    @TaskLocal package static var segmentTokens = 1024

    /// The tokens of a segment of a mixer. A sequence of more than twice `segmentTokens` has several segments where a product unpacks W
    /// for its tokens anyway, unless blocks share keys and values. Packed records have one segment, which takes some percent more memory
    /// than planned, as a plan does not depend on packing.
    static func mixerTokens(_ a: Architecture, _ length: Int, _ processor: Processor) -> Int {
        guard processor.backend == .cpu, processor.unpacksInside, length > 2 * segmentTokens, a.owners.isEmpty
        else { return length }
        let (tokens, chunk) = (evenly(length, segmentTokens), ChunkDecays.chunk)
        return tokens < chunk ? tokens : (tokens + chunk - 1) / chunk * chunk
    }

    /// Parts of one size, of which none is longer than `size`.
    private static func evenly(_ count: Int, _ size: Int) -> Int {
        let parts = (count + size - 1) / size
        return (count + parts - 1) / parts
    }

    /// Sizes that keep each temporary near `bytes`, for sequences of `length` tokens.
    package init(
        _ a: Architecture, group: Int, length: Int, bytes: Int, processor: Processor, pause: (() -> Void)? = nil
    ) {
        self.init(processor, bytes: bytes, pause: pause)
        let floats = bytes / 4
        let rows = floats / (a.attentionHeads * length)
        let evenly = Self.evenly
        mixerTokens = Self.mixerTokens(a, length, processor)
        switch processor.backend {
        case .cpu:
            // OpenBLAS packs the keys for each tile: with few rows that takes as long as the products. Where the scores of 16 take more than
            // `bytes`, one key-value head at a time has more rows in as much memory; as many for the longest would take too much.
            let isLong = rows < 16
            let heads = isLong ? a.headsPerKey : a.attentionHeads
            let most = max(1, Self.segmentTokens / 16)
            (queryRows, keyHeads) =
                isLong ? (min(most, (rows > 1 ? 16 : 8) * a.attentionHeads / heads), 1) : (rows, .max)
            // If a product unpacks W for its tokens anyway, as many tokens at a time as make a tile about square: of more, the tile has fewer
            // rows of W, and OpenBLAS packs the tokens for each; with fewer, W is unpacked more often.
            mlpTokens = processor.unpacksInside ? evenly(length, Self.segmentTokens / 2) : length
            // The memory of a row of W in use: its products, and itself where it is dequantized for all of them.
            let row = processor.unpacksInside ? 2 * mlpTokens : max(a.hiddenSize, length)
            projectionRows = processor.unpacksInside ? .max : max(64, floats / max(row, a.mixerWidth))
            // Long sequences have scores of more than `bytes`. Tiles of half as much cost them nothing, and save passes over the tokens.
            let wide = processor.unpacksInside ? max(floats, queryRows * heads * length / 2) : floats
            features = max(1, wide / row / group) * group
            (tokens, lossTokens) = (length, length)
            vocabularyRows = min(processor.unpacksInside ? .max : 1 << 14, max(64, wide / row))
        case .gpu:
            queryRows = evenly(length, max(8, rows))
            mlpTokens = length
            tokens = evenly(length, max(8, floats / a.widestMLP))
            lossTokens = min(256, length)
            vocabularyRows = max(64, 2 * floats / lossTokens)
            // An `eval` costs a GPU what writing some 16 MB would.
            evaluatesStages = length * a.hiddenSize * 4 >= 2 << 20
        }
    }

    /// The number of rows of x `[n, …]` that go through arithmetic by rows at a time: on a CPU, where each operation writes an array, as many as
    /// take a quarter of `bytes`, so that some take what a tile of a product does.
    func rowsAtOnce(of x: MLXArray) -> Int {
        evaluatesTiles ? max(1, bytes / 4 * x.dim(0) / x.nbytes) : x.dim(0)
    }
}

/// `0..<count` in pieces of `size`, the last perhaps shorter.
package func tiles(of count: Int, size: Int) -> [Range<Int>] {
    stride(from: 0, to: count, by: min(size, max(count, 1))).map { $0..<min($0 + min(size, count), count) }
}
