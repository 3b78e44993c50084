/// A mixture of experts: gated MLPs of which a router chooses some for each token.
///
/// A block can also have a shared MLP. With `mlpGate` g, the output of that MLP is multiplied by σ(x gᵀ).
package struct Experts: Decodable, Sendable, Equatable {
    package enum Scores: String, Decodable, Sendable { case softmax, sigmoid }

    /// The name of the router's matrix `[num_experts, hidden]`.
    package let router: String
    let matrices: String
    package let scores: Scores
    /// The name of a vector added to the scores when experts are chosen, or nil. It does not affect the weights of the chosen experts.
    package let bias: String?
    package let numExperts: Int
    package let numExpertsPerTok: Int
    package let intermediateSize: Int
    package let scaling: Float
    /// The name of the matrix g `[1, hidden]`, or nil if the shared MLP has no gate.
    package let mlpGate: String?

    package var gate: String { matrices + ".gate_proj" }
    package var up: String { matrices + ".up_proj" }
    package var down: String { matrices + ".down_proj" }

    var modules: [Module] {
        [(gate, .expertGate), (up, .expertUp), (down, .expertDown)].map { Module(name: $0, projections: [$1]) }
    }

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
