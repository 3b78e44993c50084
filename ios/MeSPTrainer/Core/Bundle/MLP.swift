/// The part of a block that takes each token by itself: down(act(gate(mlp_in)) ∘ up(mlp_in)).
package struct MLP: Decodable, Sendable, Equatable {
    /// The linear layers, in the order of every flat vector of LoRA parameters.
    let modules: [Module]
    let intermediateSize: Int

    /// (input, output) features of one of its projections in a model of this width; nil for a projection that it has not.
    func dimensions(_ projection: Projection, hidden: Int) -> (inputs: Int, outputs: Int)? {
        switch projection {
        case .gate, .up: (hidden, intermediateSize)
        case .down: (intermediateSize, hidden)
        default: nil
        }
    }
}

/// The term that a block adds to h, its residual stream behind the MLP: norm(out(act(gate(h)) ∘ p)), where p is its layer's part of the tokens'
/// embeddings. The block's output is that sum times its `layer_scalar`.
package struct PerLayerEmbedding: Decodable, Sendable, Equatable {
    let modules: [Module]
    /// The features of p.
    let size: Int

    /// (input, output) features of one of its projections in a model of this width; nil for a projection that it has not.
    func dimensions(_ projection: Projection, hidden: Int) -> (inputs: Int, outputs: Int)? {
        switch projection {
        case .perLayerGate: (hidden, size)
        case .perLayerOut: (size, hidden)
        default: nil
        }
    }
}
