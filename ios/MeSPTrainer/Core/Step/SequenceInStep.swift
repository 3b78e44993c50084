import MLX
import MeSPBundle

/// A sequence between its forward and its backward pass, with the arrays that are kept for the backward pass.
struct SequenceInStep {
    let context: BlockwiseModel.SequenceContext
    /// The residual stream in the forward pass: a block's input and, at the end, the last block's output. In the backward pass, the gradient d of a
    /// block's output.
    var residual: MLXArray
    /// The inputs of the blocks, from the first trained one on.
    var inputs: BlockArrays
    /// The intermediates of the last blocks, if the plan has memory for them.
    var kept = [Int: Intermediates]()
}
