import MLX
import MeSPBundle

/// A sequence between its forward and its backward pass, with the arrays that are kept for the backward pass.
struct SequenceInStep {
    let context: BlockwiseModel.SequenceContext
    /// The current block's input in the forward pass, and the gradient of its output in the backward pass. Between the passes, the last block's
    /// output.
    var residual: MLXArray
    /// The inputs of the blocks, from the first trained block on.
    var inputs: BlockArrays
    /// The intermediates of the last blocks, as far as the plan keeps them.
    var kept = [Int: Intermediates]()
}
