package enum Projection: String, Decodable, CaseIterable, Sendable {
    /// Projections of attention. g computes one gate per head.
    case q, k, v, g, o
    /// Input projections of a gated delta net. The convolution is applied to qkv.
    case qkv, z, b, a
    /// The input projection of a short convolution or Mamba-2, with three consecutive parts.
    case `in`
    case out
    case gate, up, down
    case perLayerGate = "ple_gate"
    case perLayerOut = "ple_out"
    case expertGate = "expert_gate"
    case expertUp = "expert_up"
    case expertDown = "expert_down"
}

/// A linear layer of a block, or the stacked matrices of all experts of a block.
///
/// A module has one projection, or several with consecutive outputs. JSON represents a module as the pair of its name and its projections.
package struct Module: Decodable, Sendable, Equatable {
    package let name: String
    package let projections: [Projection]

    package var isStacked: Bool { [.expertGate, .expertUp, .expertDown].contains(projections.first) }

    /// The last part of the name without `_proj`, such as `q` or `gate_up`. For experts it is `experts`.
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

/// A layer or parameter of Hugging Face's model that concatenates the outputs of several modules of a block.
///
/// JSON represents it as the pair of its name and the names of its parts.
package struct JoinedModule: Decodable, Sendable, Equatable {
    package let name: String
    package let parts: [String]

    package init(from decoder: any Decoder) throws {
        var pair = try decoder.unkeyedContainer()
        name = try pair.decode(String.self)
        parts = try pair.decode([String].self)
    }
}
