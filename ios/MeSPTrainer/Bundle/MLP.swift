/// The part of a block that treats each token independently: down(act(gate(mlp_in)) ∘ up(mlp_in)), a mixture of experts, or the sum of both.
package struct MLP: Decodable, Sendable, Equatable {
    /// The linear layers, in their order in every flat vector of LoRA parameters; empty if there are only experts.
    package let modules: [Module]
    /// The width of the MLP; 0 if there are only experts.
    package let intermediateSize: Int
    /// The experts; nil if there are none.
    package let experts: Experts?

    /// Returns the numbers of input and output features of a projection in a model of width `hidden`; nil if the MLP does not have it.
    func dimensions(_ projection: Projection, hidden: Int) -> (inputs: Int, outputs: Int)? {
        guard !modules.isEmpty else { return nil }
        return switch projection {
        case .gate, .up: (hidden, intermediateSize)
        case .down: (intermediateSize, hidden)
        default: nil
        }
    }

    /// Whether the sizes are within bounds.
    var isConsistent: Bool {
        let least = modules.isEmpty && experts != nil ? 0 : 1
        return (least...(least << 20)).contains(intermediateSize) && experts?.isConsistent ?? true
            && (least == 1 || experts?.mlpGate == nil)
    }
}

/// The function f of the MLP's gated activation,  act = f(gate) ∘ up.
package enum Activation: String, Codable, Sendable {
    /// silu(x) = x σ(x)
    case silu
    /// gelu(x) = x (1 + t) / 2,  t = tanh(√(2/π) (x + 0.044715 x³)), the approximation by tanh
    case gelu
}
