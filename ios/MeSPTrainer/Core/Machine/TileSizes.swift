import MLX
import MeSPBundle

/// The sizes of tiles: of a projection, the MLP, attention, and the vocabulary in the loss.
extension Machine {
    /// The sizes to which temporaries may be cut, in bytes, from the largest, which the default plan takes: larger ones are no faster. On a
    /// GPU, where a kernel costs as much as some 500 kB of memory traffic, they grow with the sequence, so that a step of any length has
    /// about as many kernels, up to where that is a tenth of what the kernel takes; in wide models, whose products take longer, less.
    static func choices(_ backend: Backend, hiddenSize: Int, length: Int) -> [Int] {
        let largest = backend == .cpu ? 1 << 20 : min(min(4096, (4 << 20) / hiddenSize) * length, 7 << 19)
        return [largest, largest / 2, largest / 4]
    }

    /// The tokens of a segment of a mixer. A sequence of more than twice `segmentTokens` has several segments where a product unpacks W
    /// for its tokens anyway, unless blocks share keys and values. Packed records have one segment, which takes some percent more memory
    /// than planned, as a plan does not depend on packing.
    static func mixerTokens(_ a: Architecture, _ length: Int, _ processor: Processor) -> Int {
        guard processor.backend == .cpu, processor.dequantizesInProduct, length > 2 * segmentTokens, a.owners.isEmpty
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
            mlpTokens = processor.dequantizesInProduct ? evenly(length, Self.segmentTokens / 2) : length
            // The memory of a row of W in use: its products, and itself where it is dequantized for all of them.
            let row = processor.dequantizesInProduct ? 2 * mlpTokens : max(a.hiddenSize, length)
            projectionRows = processor.dequantizesInProduct ? .max : max(64, floats / max(row, a.mixerWidth))
            // Long sequences have scores of more than `bytes`. Tiles of half as much cost them nothing, and save passes over the tokens.
            let wide = processor.dequantizesInProduct ? max(floats, queryRows * heads * length / 2) : floats
            features = max(1, wide / row / group) * group
            (mlpTileTokens, lossTokens) = (length, length)
            vocabularyRows = min(processor.dequantizesInProduct ? .max : 1 << 14, max(64, wide / row))
        case .gpu:
            queryRows = evenly(length, max(8, rows))
            mlpTokens = length
            mlpTileTokens = evenly(length, max(8, floats / a.widestMLP))
            lossTokens = min(256, length)
            vocabularyRows = max(64, 2 * floats / lossTokens)
            // An `eval` costs a GPU what writing some 16 MB would.
            evaluatesStages = length * a.hiddenSize * 4 >= 2 << 20
        }
    }
}

/// `0..<count` in pieces of `size`, the last perhaps shorter.
package func tiles(of count: Int, size: Int) -> [Range<Int>] {
    stride(from: 0, to: count, by: min(size, max(count, 1))).map { $0..<min($0 + min(size, count), count) }
}
