/// A matrix in the formulas of a block.
package enum Projection: String, Decodable, CaseIterable, Sendable {
    /// The projections of attention; g has a gate for each head.
    case q, k, v, g, o
    /// The input projections of a gated delta net; qkv goes through its convolution.
    case qkv, z, b, a
    /// The input projection of a short convolution or Mamba-2, with three consecutive parts.
    case `in`
    /// The output projection of a mixer that is not attention.
    case out
    /// The projections of the MLP.
    case gate, up, down
    /// The projections of embeddings for each layer.
    case perLayerGate = "ple_gate"
    case perLayerOut = "ple_out"
    /// The projections of the experts, stacked.
    case expertGate = "expert_gate"
    case expertUp = "expert_up"
    case expertDown = "expert_down"
}

/// A linear layer of a block, or one stacked matrix of all its experts, named as in Hugging Face and mlx-lm checkpoints. It has one projection, or
/// several with consecutive outputs. In JSON a module is the pair of its name and its projections.
package struct Module: Decodable, Sendable, Equatable {
    package let name: String
    package let projections: [Projection]

    /// Whether the module is a stack with one matrix of each expert. Other modules are linear layers.
    package var isStacked: Bool { [.expertGate, .expertUp, .expertDown].contains(projections.first) }

    /// The last part of the name without `_proj`, such as `q`, `down` or `gate_up`; `experts` for every stacked module.
    package var shortName: String {
        if isStacked { return "experts" }
        let last = name.split(separator: ".").last.map(String.init) ?? name
        return last.hasSuffix("_proj") ? String(last.dropLast("_proj".count)) : last
    }

    init(name: String, projections: [Projection]) { (self.name, self.projections) = (name, projections) }

    package init(from decoder: any Decoder) throws {
        var pair = try decoder.unkeyedContainer()
        name = try pair.decode(String.self)
        projections = try pair.decode([Projection].self)
    }
}

/// A linear layer in Hugging Face's model that joins several linear layers of a block, or a parameter that joins matrices of experts. The outputs of
/// the parts are concatenated. In JSON it is the pair of its name and the names of its parts.
package struct JoinedModule: Decodable, Sendable, Equatable {
    package let name: String
    package let parts: [String]

    package init(from decoder: any Decoder) throws {
        var pair = try decoder.unkeyedContainer()
        name = try pair.decode(String.self)
        parts = try pair.decode([String].self)
    }
}
