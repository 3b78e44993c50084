/// The per-layer token embedding: a block adds norm(out(act(gate(h)) ∘ p)) to h, the residual stream after the MLP. p is the layer's part of the
/// embedding.
///
/// The block's output is the sum multiplied by `layer_scalar`.
package struct PerLayerEmbedding: Decodable, Sendable, Equatable {
    let modules: [Module]
    package let size: Int

    func dimensions(_ projection: Projection, hidden: Int) -> (inputs: Int, outputs: Int)? {
        switch projection {
        case .perLayerGate: (hidden, size)
        case .perLayerOut: (size, hidden)
        default: nil
        }
    }
}
