/// The constants that were fitted to measured peaks. All other terms of a prediction are counted.
///
/// `python tools/bench.py --table families` prints measured and predicted peaks on a CPU, and `--table gpu` the ledger's and predicted ones on a GPU.
/// After a change of MLX or malloc, choose the smallest constants with which no peak is more than `marginPercent` above its prediction.
extension Planner {
    static let marginPercent = 8

    /// The bytes of the process once MLX has started, and the size of a function's graph in halves of its file's size.
    static let processOnCPU = (base: 5_000_000, ofThread: 1_000_000)
    static let processOnGPU = 6_750_000
    static let halfFilesOfGraph = 15

    /// The bytes that malloc keeps on Linux: `ofArray` times an array's bytes above `small`, at most `ofMLP` for the MLP's; for kept arrays a part of
    /// them, at most `ofKept`; and for small tiles.
    static let gaps = (
        ofArray: 3, small: 900_000, ofMLP: 3_000_000, partOfKept: 16, ofKept: 2_000_000, ofSmallTiles: 4_000_000
    )

    /// Tenths of the arrays that a block's mixer and its MLP have at once on a GPU; tenths of a phase by which MLX exceeds its workspace with short
    /// command buffers; and tenths of a phase in the workspace with long ones.
    static let mixerOnGPU = (queries: 142, keysOrValues: 157, others: 40, tiles: 51, postNorms: 17)
    static let mlpOnGPU = (tiles: 34, hidden: 180, vectors: 38, vectorsOfDoRA: 48, postNorms: 46)
    static let (excess, longWorkspace) = (3, 4)
}
