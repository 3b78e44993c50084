/// What there is to know of a model besides its weights: one description for all families, as the exporter read it from the model's
/// `config.json`.
///
///     attn_in = RMSNorm(x)                              q, k, v = projections of attn_in
///     q̂, k̂ = RoPE(norm(q)), RoPE(norm(k))               norm where there is `qkNorm`
///     attn_out = softmax(mask(cap(q̂ k̂ᵀ · scale))) v     cap(s) = c tanh(s / c) where there is `attnLogitSoftcapping`
///     x_mid = x + norm(o(attn_out))                     norm where there are `postNorms`
///     y = x_mid + norm(down(act(gate(mlp_in)) ∘ up(mlp_in))),  mlp_in = RMSNorm(x_mid)
public struct Architecture: Codable, Sendable, Equatable {
    /// The name of the family in `config.json`, for people.
    public let modelType: String
    public let hiddenSize: Int
    public let intermediateSize: Int
    public let numAttentionHeads: Int
    public let numKeyValueHeads: Int
    public let headDim: Int
    public let vocabSize: Int
    public let rmsNormEps: Float
    public let tieWordEmbeddings: Bool
    /// The linear layers of a block, in the order of every flat vector of LoRA parameters.
    let modules: [Module]
    /// The names of those with a bias.
    let biases: [String]
    let qkNorm: Bool
    let postNorms: Bool
    let hiddenAct: Activation
    /// What `q̂ k̂ᵀ` is multiplied by.
    let attentionScale: Float
    let attnLogitSoftcapping: Float?
    let finalLogitSoftcapping: Float?
    /// What the embedding is multiplied by.
    let embeddingScale: Float
    /// The kinds of attention in the model.
    let attention: [AttentionKind]
    /// For each block the index of its kind.
    let layers: [Int]

    public var numHiddenLayers: Int { layers.count }

    /// The linear layers by the short names that `RunSettings.projections` has.
    public var projectionNames: [String] { modules.map(\.shortName) }
}

/// What differs between the attention of one block and another.
struct AttentionKind: Codable, Sendable, Equatable {
    /// Radians a position of each pair of dimensions that RoPE turns; empty where there is no RoPE.
    let frequencies: [Float]
    /// What the turned dimensions are multiplied by.
    let ropeScale: Float
    /// How many positions a query sees, its own included; nil for all before it.
    let slidingWindow: Int?
}

/// One of the seven matrices of a block's mathematics.
enum Projection: String, Codable, CaseIterable, Sendable {
    case q, k, v, o, gate, up, down
}

/// A linear layer of a block, named as in Hugging Face and mlx-lm checkpoints: one projection, or several whose outputs lie behind each
/// other. It is written as the pair of its name and them.
struct Module: Codable, Sendable, Equatable {
    let name: String
    let projections: [Projection]

    /// The last part of the name without `_proj`: `q`, …, `down`, or `qkv`, `gate_up`.
    var shortName: String {
        let last = name.split(separator: ".").last.map(String.init) ?? name
        return last.hasSuffix("_proj") ? String(last.dropLast("_proj".count)) : last
    }

    init(from decoder: any Decoder) throws {
        var pair = try decoder.unkeyedContainer()
        name = try pair.decode(String.self)
        projections = try pair.decode([Projection].self)
    }

    func encode(to encoder: any Encoder) throws {
        var pair = encoder.unkeyedContainer()
        try pair.encode(name)
        try pair.encode(projections)
    }
}

extension Architecture {
    /// The input features of a projection.
    func inputs(_ projection: Projection) -> Int {
        switch projection {
        case .q, .k, .v, .gate, .up: hiddenSize
        case .o: numAttentionHeads * headDim
        case .down: intermediateSize
        }
    }

    /// The output features of a projection.
    func outputs(_ projection: Projection) -> Int {
        switch projection {
        case .q: numAttentionHeads * headDim
        case .k, .v: numKeyValueHeads * headDim
        case .o, .down: hiddenSize
        case .gate, .up: intermediateSize
        }
    }

    /// (input, output) features of a module, whose projections have the same input.
    func dimensions(_ module: Module) -> (Int, Int) {
        (module.projections.first.map(inputs) ?? 0, module.projections.reduce(0) { $0 + outputs($1) })
    }

    /// The module that computes a projection, and which of its outputs the projection's are. `ModelBundle` has checked that there is one.
    func place(_ projection: Projection) -> (module: Module, outputs: Range<Int>) {
        for module in modules {
            guard let index = module.projections.firstIndex(of: projection) else { continue }
            let start = module.projections[..<index].reduce(0) { $0 + outputs($1) }
            return (module, start..<start + outputs(projection))
        }
        preconditionFailure("no module for \(projection)")
    }

    /// The names and lengths of a block's norms.
    var norms: [(name: String, size: Int)] {
        var norms = [("input_layernorm", hiddenSize), ("post_attention_layernorm", hiddenSize)]
        if postNorms {
            norms += [("pre_feedforward_layernorm", hiddenSize), ("post_feedforward_layernorm", hiddenSize)]
        }
        if qkNorm { norms += [("self_attn.q_norm", headDim), ("self_attn.k_norm", headDim)] }
        return norms.map { ($0.0 + ".weight", $0.1) }
    }

    /// Whether the sizes can be a model's, and every part of a block is there. No product of the sizes, here or in a plan, overflows.
    var isConsistent: Bool {
        let counts = [numHiddenLayers, numAttentionHeads, numKeyValueHeads, headDim]
        guard counts.allSatisfy({ (1...(1 << 12)).contains($0) }) else { return false }
        let widths = [hiddenSize, intermediateSize, vocabSize, outputs(.q), outputs(.k)]
        let factors = [attentionScale, embeddingScale, attnLogitSoftcapping, finalLogitSoftcapping].compactMap { $0 }
        let parts = modules.flatMap(\.projections)
        return widths.allSatisfy { (1...(1 << 20)).contains($0) } && numAttentionHeads % numKeyValueHeads == 0
            && factors.allSatisfy { $0.isFinite && $0 > 0 } && layers.allSatisfy(attention.indices.contains)
            && attention.allSatisfy { $0.frequencies.count * 2 <= headDim && $0.slidingWindow ?? 1 >= 1 }
            && parts.count == Projection.allCases.count && Set(parts) == Set(Projection.allCases)
            && modules.allSatisfy { Set($0.projections.map(inputs)).count == 1 }
            && biases.allSatisfy(modules.map(\.name).contains)
    }
}
