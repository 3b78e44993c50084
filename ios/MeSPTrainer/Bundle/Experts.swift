/// A mixture of experts: gated MLPs of one width. A router chooses some of them for each token. If the block also has an MLP and `mlpGate` names g,
/// the output of the MLP is multiplied by σ(x gᵀ).
package struct Experts: Decodable, Sendable, Equatable {
    /// The function that turns the router's outputs into scores.
    package enum Scores: String, Decodable, Sendable { case softmax, sigmoid }

    /// The name of the router, a linear layer `[num_experts, hidden]`.
    package let router: String
    /// The prefix of the names of the experts' stacked matrices.
    let matrices: String
    package let scores: Scores
    /// The name of a vector that is added to the scores to choose experts. The weights of the chosen experts' outputs do not depend on this vector.
    /// nil if there is none.
    package let bias: String?
    package let numExperts: Int
    package let numExpertsPerTok: Int
    package let intermediateSize: Int
    package let scaling: Float
    /// The name of g, a linear layer `[1, hidden]`; nil if the factor is 1.
    package let mlpGate: String?

    package var gate: String { matrices + ".gate_proj" }
    package var up: String { matrices + ".up_proj" }
    package var down: String { matrices + ".down_proj" }

    /// The stacked gate, up and down matrices of all experts. They have adapters in a run that trains the experts.
    var modules: [Module] {
        [(gate, .expertGate), (up, .expertUp), (down, .expertDown)].map { Module(name: $0, projections: [$1]) }
    }

    /// Returns the numbers of input and output features of an expert's projection in a model of width `hidden`; nil for any other projection.
    func dimensions(_ projection: Projection, hidden: Int) -> (inputs: Int, outputs: Int)? {
        switch projection {
        case .expertGate, .expertUp: (hidden, intermediateSize)
        case .expertDown: (intermediateSize, hidden)
        default: nil
        }
    }

    var isConsistent: Bool {
        (1...(1 << 12)).contains(numExperts) && (1...numExperts).contains(numExpertsPerTok)
            && (1...(1 << 20)).contains(intermediateSize) && scaling.isFinite && scaling > 0
    }
}
