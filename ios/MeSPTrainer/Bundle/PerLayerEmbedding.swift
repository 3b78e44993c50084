/// The term norm(out(act(gate(h)) ∘ p)) that a block adds to h, the residual stream after its MLP. Here p is the layer's part of the tokens'
/// embeddings. The block's output is the sum multiplied by its `layer_scalar`.
package struct PerLayerEmbedding: Decodable, Sendable, Equatable {
    let modules: [Module]
    /// The features of p.
    package let size: Int

    /// Returns the numbers of input and output features of a projection in a model of width `hidden`; nil for any other projection.
    func dimensions(_ projection: Projection, hidden: Int) -> (inputs: Int, outputs: Int)? {
        switch projection {
        case .perLayerGate: (hidden, size)
        case .perLayerOut: (size, hidden)
        default: nil
        }
    }
}
