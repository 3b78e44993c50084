import MLX
import MeSPBundle

/// The part of a matrix that is computed at once.
///
/// On a CPU it is W that is cut, and each part is dequantized once for all tokens. On a GPU W costs
/// nothing, and wide arrays are cut by tokens: fewer and larger kernels for the same memory.
package struct TileSizes {
    /// Rows of a projection's weight.
    let projection: Int
    /// Intermediate features of the MLP, a multiple of the quantization group.
    let mlp: Int
    /// Tokens of a segment, of a mixer that goes by segments where the sequence is longer.
    let mixerTokens: Int
    /// Tokens in the MLP's derivative and in the loss, and of these in a tile of the former.
    let mlpTokens: Int
    let tokens: Int
    /// Query rows of attention, and the key-value heads that they go through at a time.
    let attention: Int
    let keyHeads: Int
    /// Tokens in a tile of the loss, and rows of the vocabulary. W is read again for each of the former.
    let lossTokens: Int
    package let vocabulary: Int
    let pace: Pace
    /// The size of a temporary, in bytes.
    let bytes: Int
    /// Whether what a block's phases leave is evaluated on a GPU too: an `eval` costs it what writing some 16 MB would, and bounds
    /// the arrays as long as the sequence, of which a phase makes a dozen, to those of that phase.
    private let evaluatesPhases: Bool
    /// Whether arithmetic by rows goes some rows at a time.
    private let cutsRows: Bool

    /// The sizes to which temporaries may be cut, in bytes, from the largest, which the default plan takes: larger ones are no faster. On a
    /// GPU, where a kernel costs as much as some 500 kB of memory traffic, they grow with the sequence, so that a step of any length has
    /// about as many kernels, up to where that is a tenth of what the kernel takes; in wide models, whose products take longer, less.
    static func choices(_ backend: Backend, hiddenSize: Int, length: Int) -> [Int] {
        let largest = backend == .cpu ? 1 << 20 : min(min(4096, (4 << 20) / hiddenSize) * length, 7 << 19)
        return [largest, largest / 2, largest / 4]
    }

    /// The most tokens of a segment, twice those that go through the MLP and the loss at a time, and 16 times the query rows of attention
    /// where these are few; tests cut short sequences.
    @TaskLocal package static var segmentTokens = 1024

    /// The tokens of a segment of a mixer. A sequence of more than twice `segmentTokens` has several segments where a product unpacks W
    /// for its tokens anyway, unless blocks share keys and values. Packed records have one segment, which takes some percent more memory
    /// than planned, as a plan does not depend on packing.
    static func mixerTokens(_ a: Architecture, _ length: Int, _ backend: Backend) -> Int {
        guard backend == .cpu, CPUProducts.current.dequantizeInside, length > 2 * segmentTokens, a.owners.isEmpty
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
    ///
    /// - Parameter pause: see `Pace`.
    package init(
        _ a: Architecture, group: Int, length: Int, bytes: Int, backend: Backend,
        pause: (() -> Void)? = nil
    ) {
        self.bytes = bytes
        let floats = bytes / 4
        let rows = floats / (a.attentionHeads * length)
        let evenly = Self.evenly
        mixerTokens = Self.mixerTokens(a, length, backend)
        switch backend {
        case .cpu:
            // OpenBLAS packs the keys for each tile: with few rows that takes as long as the products. Where the scores of 16 take more than
            // `bytes`, one key-value head at a time has more rows in as much memory; as many for the longest would take too much.
            let isLong = rows < 16
            let heads = isLong ? a.headsPerKey : a.attentionHeads
            let most = max(1, Self.segmentTokens / 16)
            (attention, keyHeads) =
                isLong ? (min(most, (rows > 1 ? 16 : 8) * a.attentionHeads / heads), 1) : (rows, .max)
            let dequantizeInside = CPUProducts.current.dequantizeInside
            // If a product unpacks W for its tokens anyway, as many tokens at a time as make a tile about square: of more, the tile has fewer
            // rows of W, and OpenBLAS packs the tokens for each; with fewer, W is unpacked more often.
            mlpTokens = dequantizeInside ? evenly(length, Self.segmentTokens / 2) : length
            // The memory of a row of W in use: its products, and itself where it is dequantized for all of them.
            let row = dequantizeInside ? 2 * mlpTokens : max(a.hiddenSize, length)
            projection = dequantizeInside ? .max : max(64, floats / max(row, a.mixedSize))
            // Long sequences have scores of more than `bytes`. Tiles of half as much cost them nothing, and save passes over the tokens.
            let wide = dequantizeInside ? max(floats, attention * heads * length / 2) : floats
            mlp = max(1, wide / row / group) * group
            (tokens, lossTokens) = (length, length)
            vocabulary = max(64, wide / row)
            (pace, evaluatesPhases, cutsRows) = (.evaluated, true, true)
        case .gpu:
            (attention, keyHeads) = (evenly(length, max(8, rows)), .max)
            (projection, mlp, mlpTokens) = (.max, .max, length)
            tokens = evenly(length, max(8, floats / a.widestMLP))
            lossTokens = min(256, length)
            vocabulary = max(64, 2 * floats / lossTokens)
            pace = Pace(isChained: true, pause: pause)
            evaluatesPhases = length * a.hiddenSize * 4 >= 2 << 20
            cutsRows = false
        }
    }

    /// The number of rows of x `[n, …]` that go through arithmetic by rows at a time: on a CPU, where each operation writes an array, as many as
    /// take a quarter of `bytes`, so that some take what a tile of a product does.
    func rows(of x: MLXArray) -> Int { cutsRows ? max(1, bytes / 4 * x.dim(0) / x.nbytes) : x.dim(0) }

    /// Ends a phase of a block: what it leaves is evaluated where that pays.
    func endPhase(_ arrays: [MLXArray]) {
        if evaluatesPhases { submit(arrays) }
        pace.rest(arrays)
    }
}

/// The way in which the temporaries of a piece of work are freed before the next begins.
package struct Pace {
    /// The next piece depends on it, so that MLX encodes one after the other, and nobody waits for a GPU that would then have nothing to
    /// do. `Memory.memoryLimit` bounds what lives until the GPU has got so far. Otherwise each piece is evaluated: a CPU computes while it
    /// waits.
    let isChained: Bool
    /// Called after each piece, which is evaluated first. A GPU compiles kernels in its first step, and in the first pass of a text, for some
    /// seconds a block; without this a person who leaves the app would wait for the block's end.
    var pause: (() -> Void)?

    static var evaluated: Pace { Pace(isChained: false) }
    static var chained: Pace { Pace(isChained: true) }

    /// Ends a piece of work that has others behind it in the same function.
    func finish(_ arrays: [MLXArray]) {
        if !isChained || pause != nil { submit(arrays) }
        pause?()
    }

    /// Ends a piece that is evaluated only where it is paused after.
    func rest(_ arrays: [MLXArray]) { if pause != nil { finish(arrays) } }

    /// The inputs of the next piece, available only after `done`.
    func next(_ inputs: [MLXArray], after done: [MLXArray]) -> [MLXArray] {
        if isChained, pause == nil {
            // MLX takes the stream of the first array, and C++'s own where that was evaluated before (MLX 0.32.2, ops.cpp:6408).
            let (first, others) = (Array(done.prefix(1)), Array(done.dropFirst()))
            return Array(depends(inputs: first + inputs, dependencies: others).dropFirst(first.count))
        }
        finish(done)
        return inputs
    }
}

/// Evaluates arrays. On a CPU it waits only for what was submitted before: the graph of the next piece of work is made while these are
/// computed, in no more memory, as that is taken when the next piece is submitted. Whoever unmaps or trims memory evaluates first.
func submit(_ arrays: [MLXArray]) {
    guard Device.isCPU else { return eval(arrays) }
    Stream.cpu.synchronize()
    asyncEval(arrays)
}

/// Puts `part` in the place of some rows, evaluated; without a copy of the others where nobody else has the array.
func replace(_ rows: Range<Int>, of array: inout MLXArray, by part: MLXArray) {
    guard rows.count < array.dim(0) else {
        array = part
        return
    }
    array = array[.ellipsis]  // an object of its own
    array[rows] = part
    // Of an array that unfinished work reads, this would be a copy.
    if Device.isCPU { Stream.cpu.synchronize() }
    eval(array)
}

/// `0..<count` in pieces of `size`, the last perhaps shorter.
package func tiles(of count: Int, size: Int) -> [Range<Int>] {
    stride(from: 0, to: count, by: min(size, max(count, 1))).map { $0..<min($0 + min(size, count), count) }
}
