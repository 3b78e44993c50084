/// The part of a block that takes each token by itself: down(act(gate(mlp_in)) ∘ up(mlp_in)), a mixture of experts, or the sum of both.
package struct MLP: Decodable, Sendable, Equatable {
    /// The linear layers, in the order of every flat vector of LoRA parameters; none where there are only experts.
    package let modules: [Module]
    /// 0 where there are only experts.
    package let intermediateSize: Int
    /// nil where there are none.
    package let experts: Experts?

    /// (input, output) features of one of its projections in a model of this width; nil for a projection that it has not.
    func dimensions(_ projection: Projection, hidden: Int) -> (inputs: Int, outputs: Int)? {
        guard !modules.isEmpty else { return nil }
        return switch projection {
        case .gate, .up: (hidden, intermediateSize)
        case .down: (intermediateSize, hidden)
        default: nil
        }
    }

    /// Whether its sizes can be a model's.
    var isConsistent: Bool {
        let least = modules.isEmpty && experts != nil ? 0 : 1
        return (least...(least << 20)).contains(intermediateSize) && experts?.isConsistent ?? true
            && (least == 1 || experts?.mlpGate == nil)
    }
}

/// f of the MLP's gated activation  act = f(gate) ∘ up.
package enum Activation: String, Codable, Sendable {
    /// silu(x) = x σ(x)
    case silu
    /// gelu(x) = x (1 + t) / 2,  t = tanh(√(2/π) (x + 0.044715 x³)), the approximation by tanh
    case gelu
}
