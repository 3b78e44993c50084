/// The term that a block adds to h, the residual stream after its MLP: norm(out(act(gate(h)) ∘ p)), where p is its layer's part of the tokens'
/// embeddings. The block's output is that sum times its `layer_scalar`.
package struct PerLayerEmbedding: Decodable, Sendable, Equatable {
    let modules: [Module]
    /// The features of p.
    package let size: Int

    /// (input, output) features of one of its projections in a model of this width; nil for a projection that it has not.
    func dimensions(_ projection: Projection, hidden: Int) -> (inputs: Int, outputs: Int)? {
        switch projection {
        case .perLayerGate: (hidden, size)
        case .perLayerOut: (size, hidden)
        default: nil
        }
    }
}
