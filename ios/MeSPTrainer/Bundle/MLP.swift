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

/// Gated MLPs of one width, of which a router chooses some for each token, and the factor σ(x gᵀ) of the output of an MLP beside them.
package struct Experts: Decodable, Sendable, Equatable {
    /// s, of what the router gives.
    package enum Scores: String, Decodable, Sendable { case softmax, sigmoid }

    /// The linear layer `[num_experts, hidden]` that gives the scores.
    package let router: String
    /// Before the names of the experts' matrices, which are stacked.
    let matrices: String
    package let scores: Scores
    /// The vector that is added to the scores, for the choice alone; nil where there is none.
    package let bias: String?
    package let numExperts: Int
    package let numExpertsPerTok: Int
    package let intermediateSize: Int
    package let scaling: Float
    /// The linear layer `[1, hidden]` that is g; nil where the factor is 1.
    package let mlpGate: String?

    package var gate: String { matrices + ".gate_proj" }
    package var up: String { matrices + ".up_proj" }
    package var down: String { matrices + ".down_proj" }

    /// Gate, up and down, each of all experts: linear layers of a run that trains the experts.
    var modules: [Module] {
        [(gate, .expertGate), (up, .expertUp), (down, .expertDown)].map { Module(name: $0, projections: [$1]) }
    }

    /// (input, output) features of one of an expert's projections in a model of this width; nil for any other.
    func dimensions(_ projection: Projection, hidden: Int) -> (inputs: Int, outputs: Int)? {
        switch projection {
        case .expertGate, .expertUp: (hidden, intermediateSize)
        case .expertDown: (intermediateSize, hidden)
        default: nil
        }
    }

    fileprivate var isConsistent: Bool {
        (1...(1 << 12)).contains(numExperts) && (1...numExperts).contains(numExpertsPerTok)
            && (1...(1 << 20)).contains(intermediateSize) && scaling.isFinite && scaling > 0
    }
}

/// The term that a block adds to h, its residual stream behind the MLP: norm(out(act(gate(h)) ∘ p)), where p is its layer's part of the tokens'
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
