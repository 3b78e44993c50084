import MLX
import MeSPBundle

/// A sequence between its forward and its backward pass, with the arrays that are kept for the backward pass.
struct SequenceInStep {
    let context: BlockwiseModel.SequenceContext
    /// In the forward pass, the current block's input. Between the passes, the last block's output. In the backward pass, the gradient of the current
    /// block's output.
    var residual: MLXArray
    var inputs: BlockArrays
    var kept = [Int: Intermediates]()
}
