import MLX
import MeSPBundle

/// A sequence between its forward and its backward pass, with what stays of one for the other.
struct SequenceInStep {
    let context: BlockwiseModel.SequenceContext
    /// The residual stream: in the forward pass a block's input, then the last block's output; in the backward pass its gradient d.
    var residual: MLXArray
    /// The inputs of the blocks from the first trained one.
    var inputs: BlockArrays
    /// The last blocks' intermediates, where the plan has memory for them.
    var kept = [Int: Intermediates]()
}
