/// The part of a block that treats each token independently: down(act(gate(mlp_in)) ∘ up(mlp_in)), a mixture of experts, or the sum of both.
package struct MLP: Decodable, Sendable, Equatable {
    /// The linear layers, in the order of flat LoRA vectors. The list is empty if there are only experts.
    package let modules: [Module]
    package let intermediateSize: Int
    package let experts: Experts?

    func dimensions(_ projection: Projection, hidden: Int) -> (inputs: Int, outputs: Int)? {
        guard !modules.isEmpty else { return nil }
        return switch projection {
        case .gate, .up: (hidden, intermediateSize)
        case .down: (intermediateSize, hidden)
        default: nil
        }
    }

    var isConsistent: Bool {
        let least = modules.isEmpty && experts != nil ? 0 : 1
        return (least...(least << 20)).contains(intermediateSize) && experts?.isConsistent ?? true
            && (least == 1 || experts?.mlpGate == nil)
    }
}

package enum Activation: String, Codable, Sendable {
    /// silu(x) = x σ(x)
    case silu
    /// gelu(x) = x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2
    case gelu
}
