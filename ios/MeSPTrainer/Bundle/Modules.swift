/// One of the matrices of a block's mathematics.
package enum Projection: String, Decodable, CaseIterable, Sendable {
    /// The projections of attention; g gives each head a gate.
    case q, k, v, g, o
    /// Into a gated delta net; qkv before its convolution.
    case qkv, z, b, a
    /// Into a short convolution or Mamba-2: their three parts one after another.
    case `in`
    /// Out of a mixer that is not attention.
    case out
    /// The projections of the MLP.
    case gate, up, down
    /// The projections of embeddings for each layer.
    case perLayerGate = "ple_gate"
    case perLayerOut = "ple_out"
    /// Those of all experts of a mixture.
    case expertGate = "expert_gate"
    case expertUp = "expert_up"
    case expertDown = "expert_down"
}

/// A linear layer of a block, named as in Hugging Face and mlx-lm checkpoints: one projection, or several whose outputs follow one
/// another. In JSON it is the pair of its name and its projections.
package struct Module: Decodable, Sendable, Equatable {
    package let name: String
    package let projections: [Projection]

    /// Whether it is one kind of matrix of all experts, stacked, and not a linear layer.
    package var isStacked: Bool { [.expertGate, .expertUp, .expertDown].contains(projections.first) }

    /// The last part of the name without `_proj`: `q`, …, `down`, or `qkv`, `gate_up`; `experts` of all kinds of their matrices.
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

/// A linear layer of Hugging Face that joins several of a block's: their outputs follow one another. Or a parameter that joins experts'
/// matrices in the same way. In JSON it is the pair of its name and the names of its parts.
package struct JoinedModule: Decodable, Sendable, Equatable {
    package let name: String
    package let parts: [String]

    package init(from decoder: any Decoder) throws {
        var pair = try decoder.unkeyedContainer()
        name = try pair.decode(String.self)
        parts = try pair.decode([String].self)
    }
}
