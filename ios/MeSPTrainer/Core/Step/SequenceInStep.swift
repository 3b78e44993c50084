import MLX
import MeSPBundle

struct SequenceInStep {
    let context: BlockwiseModel.SequenceContext
    /// In the forward pass, the current block's input. Between the passes, the last block's output. In the backward pass, the gradient of the current
    /// block's output.
    var residual: MLXArray
    var inputs: BlockArrays
    var kept = [Int: Intermediates]()
}
