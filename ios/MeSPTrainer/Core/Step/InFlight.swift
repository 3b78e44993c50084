import MLX
import MeSPBundle

/// A sequence between its forward and its backward pass, with what stays of one for the other.
struct InFlight {
    let context: BlockwiseModel.Context
    /// On the way forward a block's input, then the last block's output; on the way back d.
    var state: MLXArray
    /// The inputs of the blocks from the first trained one.
    var inputs: BlockArrays
    /// The last blocks' intermediates, where the plan has memory for them.
    var kept = [Int: Intermediates]()
}
