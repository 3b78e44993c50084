import MLX
import MeSPBundle

extension Schedule {
    /// Returns the possible sizes of temporary arrays in bytes, the largest first. On a GPU the sizes grow with the sequence length up to a limit, so
    /// that the number of kernels hardly depends on the length.
    static func choices(_ processor: Processor, hiddenSize: Int, length: Int) -> [Int] {
        let largest = processor.backend == .cpu ? 1 << 20 : min(min(4096, (4 << 20) / hiddenSize) * length, 7 << 19)
        return [largest, largest / 2, largest / 4]
    }

    /// A sequence has several segments if three conditions hold: it is longer than twice `segmentTokens`, the processor is a CPU whose products
    /// dequantize W, and no blocks share keys and values.
    static func mixerTokens(_ a: Architecture, _ length: Int, _ processor: Processor) -> Int {
        guard processor.backend == .cpu, processor.dequantizesInProduct, length > 2 * segmentTokens, a.owners.isEmpty
        else { return length }
        let (tokens, chunk) = (evenly(length, segmentTokens), ChunkDecays.chunk)
        return tokens < chunk ? tokens : (tokens + chunk - 1) / chunk * chunk
    }

    private static func evenly(_ count: Int, _ size: Int) -> Int {
        let parts = (count + size - 1) / size
        return (count + parts - 1) / parts
    }

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
            // OpenBLAS packs the keys for each tile, so tiles of few rows are slow. If the scores of 16 rows take more than `bytes`, a tile has one
            // key-value head and more rows.
            let isLong = rows < 16
            let heads = isLong ? a.headsPerKey : a.attentionHeads
            let most = max(1, Self.segmentTokens / 16)
            (queryRows, keyHeads) =
                isLong ? (min(most, (rows > 1 ? 16 : 8) * a.attentionHeads / heads), 1) : (rows, .max)
            // This number of tokens makes a tile about square. With more tokens, a tile would have fewer rows of W. With fewer tokens, W would be
            // dequantized more often.
            mlpTokens = processor.dequantizesInProduct ? evenly(length, Self.segmentTokens / 2) : length
            // The number of floats in a tile for each row of W.
            let row = processor.dequantizesInProduct ? 2 * mlpTokens : max(a.hiddenSize, length)
            projectionRows = processor.dequantizesInProduct ? .max : max(64, floats / max(row, a.mixerWidth))
            // The scores of long sequences take more than `bytes`. Other tiles may take half as much as these scores without a higher peak.
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
            // An `eval` costs a GPU as much time as writing about 16 MB, so stages with small arrays are not evaluated.
            evaluatesStages = length * a.hiddenSize * 4 >= 2 << 20
        }
    }
}

package func tiles(of count: Int, size: Int) -> [Range<Int>] {
    stride(from: 0, to: count, by: min(size, max(count, 1))).map { $0..<min($0 + min(size, count), count) }
}

extension ModelBundle {
    package func schedule(length: Int, bytes: Int, pause: (() -> Void)? = nil) -> Schedule {
        Schedule(architecture, group: featureGroup, length: length, bytes: bytes, processor: processor, pause: pause)
    }
}
