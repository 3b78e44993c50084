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
