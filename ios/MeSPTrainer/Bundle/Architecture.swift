/// A model's configuration: one description for all families, as the exporter read it from the model's
/// `config.json`. A block is a mixer and an MLP:
///
///     x_mid = x + norm(mixer(mixer_in)),  mixer_in = RMSNorm(x)                  norm where there are `postNorms`
///     y = x_mid + norm(down(act(gate(mlp_in)) ∘ up(mlp_in))),  mlp_in = RMSNorm(x_mid)
public struct Architecture: Decodable, Sendable, Equatable {
    /// The name of the family in `config.json`, for people.
    public let modelType: String
    public let hiddenSize: Int
    public let vocabSize: Int
    public let rmsNormEps: Float
    public let tieWordEmbeddings: Bool
    package let hiddenAct: Activation
    package let postNorms: Bool
    package let finalLogitSoftcapping: Float?
    /// The factor of the embedding.
    package let embeddingScale: Float
    /// The prefix of `.layers.N.` in the names of adapters, of mlx-lm and of PEFT.
    package let mlxPrefix: String
    package let hfPrefix: String
    /// The names of the linear layers with a bias.
    package let biases: [String]
    /// The mixers in the model.
    package let mixers: [Mixer]
    /// For each block the index of its mixer.
    package let layers: [Int]
    /// The MLPs in the model, which differ in their width, or in that some have experts.
    package let mlps: [MLP]
    /// For each block the index of its MLP.
    package let mlpLayers: [Int]
    /// Embeddings of the tokens for each layer; nil where the model has none.
    package let perLayer: PerLayerEmbedding?
    /// The linear layers that Hugging Face has in place of some of these; nil where it has none.
    package let hfModules: [JoinedModule]?

    public var numHiddenLayers: Int { layers.count }

    /// The linear layers by the short names that `RunSettings.projections` has, which are trained by default.
    public var projectionNames: [String] { unique(modules.map(\.shortName)) }
    /// All that `RunSettings.projections` may have.
    public var trainableNames: [String] { unique(trainable.map(\.shortName)) }
}

/// One of the matrices of a block's mathematics.
package enum Projection: String, Decodable, CaseIterable, Sendable {
    /// The projections of attention; g gives each head a gate.
    case q, k, v, g, o
    /// Into a gated delta net; qkv before its convolution.
    case qkv, z, b, a
    /// Into a short convolution or Mamba-2: their three parts behind each other.
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

/// A linear layer of a block, named as in Hugging Face and mlx-lm checkpoints: one projection, or several whose outputs lie behind each
/// other. It is written as the pair of its name and them.
package struct Module: Decodable, Sendable, Equatable {
    package let name: String
    package let projections: [Projection]

    /// Whether it is the matrices of one kind of all experts, which lie stacked: then it is no linear layer of its own.
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

/// A linear layer of Hugging Face whose outputs are those of some of a block's, behind each other, or a parameter that holds experts'
/// matrices so. It is written as the pair of its name and theirs.
package struct JoinedModule: Decodable, Sendable, Equatable {
    package let name: String
    package let parts: [String]

    package init(from decoder: any Decoder) throws {
        var pair = try decoder.unkeyedContainer()
        name = try pair.decode(String.self)
        parts = try pair.decode([String].self)
    }
}

/// A block's dimensions: its mixer's, its MLP's, and those that all blocks share.
package struct BlockShape: Sendable, Equatable {
    package let architecture: Architecture
    package let mixer: Mixer
    package let mlp: MLP

    /// The linear layers, in the order of every flat vector of LoRA parameters.
    package var modules: [Module] {
        mixer.modules + mlp.modules + (architecture.perLayer?.modules ?? [])
    }

    /// What may have adapters: the linear layers and, in a run that asks for it, the experts' matrices.
    package var trainable: [Module] { modules + (mlp.experts?.modules ?? []) }

    /// The number of matrices that a module stacks, as a dimension before theirs; empty of a linear layer.
    package func stack(_ module: Module) -> [Int] { module.isStacked ? [mlp.experts?.numExperts ?? 0] : [] }

    /// (input, output) features of a projection, which the block must have.
    package func dimensions(_ projection: Projection) -> (inputs: Int, outputs: Int) {
        let hidden = architecture.hiddenSize
        let dimensions = known(projection) ?? mlp.experts?.dimensions(projection, hidden: hidden)
        guard let dimensions else { preconditionFailure("no projection \(projection)") }
        return dimensions
    }

    /// The same, nil for a projection that the block has not.
    private func known(_ projection: Projection) -> (inputs: Int, outputs: Int)? {
        let hidden = architecture.hiddenSize
        return mixer.dimensions(projection, hidden: hidden) ?? mlp.dimensions(projection, hidden: hidden)
            ?? architecture.perLayer?.dimensions(projection, hidden: hidden)
    }

    /// A wide projection of the block's input: the MLP's gate or, where there are only experts, the mixer's first.
    package var wideProjection: Projection { mlp.modules.isEmpty ? mixer.modules[0].projections[0] : .gate }

    /// (input, output) features of a module, whose projections have the same input.
    package func dimensions(_ module: Module) -> (inputs: Int, outputs: Int) { dimensions([module]) }

    /// (input, output) features of modules that have the same input, together.
    package func dimensions(_ modules: [Module]) -> (inputs: Int, outputs: Int) {
        let parts = modules.flatMap(\.projections).map(dimensions)
        return (parts.first?.inputs ?? 0, parts.reduce(0) { $0 + $1.outputs })
    }

    /// The module that computes a projection, and which of its outputs the projection's are. `ModelBundle` has checked that there is one.
    package func place(_ projection: Projection) -> (module: Module, outputs: Range<Int>) {
        for module in trainable {
            guard let index = module.projections.firstIndex(of: projection) else { continue }
            let start = module.projections[..<index].reduce(0) { $0 + dimensions($1).outputs }
            return (module, start..<start + dimensions(projection).outputs)
        }
        preconditionFailure("no module for \(projection)")
    }

    /// The arrays that are not quantized: norms, the mixer's own, and biases.
    package var plainArrays: [Weight] {
        let (hidden, postNorms) = (architecture.hiddenSize, architecture.postNorms)
        let norms =
            ["input_layernorm", "post_attention_layernorm"]
            + (postNorms ? ["pre_feedforward_layernorm", "post_feedforward_layernorm"] : [])
            + (architecture.perLayer == nil ? [] : ["post_per_layer_input_norm"])
        let choosing = mlp.experts.flatMap { experts in
            experts.bias.map { Weight(name: $0, shape: [experts.numExperts], isFloat32: true) }
        }
        let scalars = architecture.perLayer == nil ? [] : [Weight(name: "layer_scalar", shape: [1])]
        let biased = modules.filter { architecture.biases.contains($0.name) }
        return norms.map { Weight(name: $0 + ".weight", shape: [hidden]) } + mixer.arrays(hidden: hidden)
            + [choosing].compactMap { $0 } + scalars
            + biased.map { Weight(name: $0.name + ".bias", shape: [dimensions($0).outputs]) }
    }

    /// The quantized matrices: those of the modules, and the frozen ones beside them.
    package var matrices: [Weight] {
        func ofModules(_ modules: [Module]) -> [Weight] {
            modules.map { module in
                let (inputs, outputs) = dimensions(module)
                return Weight(name: module.name, shape: stack(module) + [outputs, inputs])
            }
        }
        guard let experts = mlp.experts else { return ofModules(modules) }
        let hidden = architecture.hiddenSize
        let mlpGate = experts.mlpGate.map { [Weight(name: $0, shape: [1, hidden])] } ?? []
        let router = Weight(name: experts.router, shape: [experts.numExperts, hidden])
        return ofModules(modules) + mlpGate + [router] + ofModules(experts.modules)
    }

    /// Whether every part of the block is there, once.
    fileprivate var isWhole: Bool {
        let parts = modules.flatMap(\.projections)
        let all = Projection.allCases.filter { known($0) != nil }
        return parts.count == all.count && Set(parts) == Set(all)
            && modules.allSatisfy { Set($0.projections.map { dimensions($0).inputs }).count == 1 }
            && Set(modules.map(\.name)).count == modules.count
            && zip(architecture.hfModules ?? [], joined).allSatisfy { layer, parts in
                parts.isEmpty
                    || (parts.count == layer.parts.count && Set(parts.map { dimensions($0).inputs }).count == 1)
            }
            && joined.joined().count == Set(joined.joined().map(\.name)).count
    }

    /// The block's modules that each of Hugging Face's linear layers holds; empty for layers of other blocks.
    private var joined: [[Module]] {
        (architecture.hfModules ?? []).map { layer in trainable.filter { layer.parts.contains($0.name) } }
    }
}

extension Architecture {
    /// The block with this index.
    package func block(_ index: Int) -> BlockShape {
        BlockShape(architecture: self, mixer: mixers[layers[index]], mlp: mlps[mlpLayers[index]])
    }

    /// A block of each kind.
    package var kinds: [BlockShape] { firstOfKinds.map(block) }

    /// The first block of each kind: of each pair of a mixer and an MLP that some block has.
    package var firstOfKinds: [Int] {
        unique(zip(layers, mlpLayers).map { [$0, $1] }).compactMap { kind in
            layers.indices.first { [layers[$0], mlpLayers[$0]] == kind }
        }
    }

    /// The width of the widest MLP, or expert.
    package var widestMLP: Int {
        mlps.map { max($0.intermediateSize, $0.experts?.intermediateSize ?? 0) }.max() ?? 0
    }

    /// Whether some block has experts.
    package var hasExperts: Bool { mlps.contains { $0.experts != nil } }

    /// The linear layers of all blocks, each once.
    package var modules: [Module] {
        unique(mixers.flatMap(\.modules)) + unique(mlps.flatMap(\.modules)) + (perLayer?.modules ?? [])
    }

    /// What may have adapters in some block: these, and then the experts' matrices.
    package var trainable: [Module] { modules + unique(mlps.flatMap { $0.experts?.modules ?? [] }) }

    /// The block whose keys and values a block takes; nil for one that has its own, or none.
    package func keysOf(_ block: Int) -> Int? {
        if case .attention(let mixer) = mixers[layers[block]] { mixer.keysOf } else { nil }
    }

    /// The blocks whose keys and values others take too.
    package var owners: Set<Int> { Set(layers.indices.compactMap(keysOf)) }

    /// Whether each block that takes another's keys and values takes those of one before it that has such.
    private var sharesKeys: Bool {
        layers.indices.allSatisfy { block in
            guard let owner = keysOf(block) else { return true }
            guard (0..<block).contains(owner), case .attention(let mixer) = mixers[layers[block]],
                case .attention(let its) = mixers[layers[owner]]
            else { return false }
            return its.keysOf == nil && mixer.gateDim == 0
                && (its.numKeyValueHeads, its.headDim) == (mixer.numKeyValueHeads, mixer.headDim)
        }
    }

    /// The most query heads of attention, 1 if there is none.
    package var attentionHeads: Int {
        mixers.map { if case .attention(let mixer) = $0 { mixer.numAttentionHeads } else { 1 } }.max() ?? 1
    }

    /// The most query heads that share a key-value head, 1 if there is no attention.
    package var headsPerKey: Int {
        mixers.map { if case .attention(let a) = $0 { a.numAttentionHeads / a.numKeyValueHeads } else { 1 } }.max() ?? 1
    }

    /// The most features that a mixer's last projection takes.
    package var mixedSize: Int { mixers.map { $0.mixedSize(hidden: hiddenSize) }.max() ?? hiddenSize }

    /// Whether some block leaves one state of all tokens to those that follow.
    package var isRecurrent: Bool {
        mixers.contains { if case .attention = $0 { false } else { true } }
    }

    /// Whether the sizes can be a model's, and every part of a block is there. No product of the sizes, here or in a plan, overflows.
    var isConsistent: Bool {
        let widths = [hiddenSize, vocabSize]
        let factors = [embeddingScale, finalLogitSoftcapping].compactMap { $0 }
        return (1...(1 << 12)).contains(numHiddenLayers) && widths.allSatisfy { (1...(1 << 20)).contains($0) }
            && factors.allSatisfy { $0.isFinite && $0 > 0 } && mlps.allSatisfy(\.isConsistent)
            && mlpLayers.count == layers.count && mlpLayers.allSatisfy(mlps.indices.contains)
            && layers.allSatisfy(mixers.indices.contains) && mixers.allSatisfy { $0.isConsistent(hidden: hiddenSize) }
            && (hfModules ?? []).allSatisfy { layer in
                let parts = trainable.filter { layer.parts.contains($0.name) }
                return !layer.parts.isEmpty && layer.parts.allSatisfy(parts.map(\.name).contains)
                    && Set(parts.map(\.isStacked)).count == 1
            }
            && sharesKeys && perLayer.map { postNorms && (1...(1 << 12)).contains($0.size) } ?? true
            && kinds.allSatisfy(\.isWhole) && biases.allSatisfy(modules.map(\.name).contains)
    }
}

/// Without what came before.
private func unique<T: Equatable>(_ all: [T]) -> [T] {
    all.reduce(into: []) { if !$0.contains($1) { $0.append($1) } }
}
