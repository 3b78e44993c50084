/// A mixture of experts: gated MLPs of one width, of which a router chooses some for each token. Where the block has an MLP too, that MLP's
/// output is multiplied by σ(x gᵀ).
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

    var isConsistent: Bool {
        (1...(1 << 12)).contains(numExperts) && (1...numExperts).contains(numExpertsPerTok)
            && (1...(1 << 20)).contains(intermediateSize) && scaling.isFinite && scaling > 0
    }
}
